"""Words for the conjuncts of a mask that are neither bounds of ``k - q`` nor predicates of the key: prefix, documents, blocks …

Only labels: what may be skipped is decided tile by tile (``fa_inductor/program/tile_map.py``), whatever a mask is called.
"""

from __future__ import annotations

from fa_inductor.program import Node, ProgramBuilder, ScoreProgram, dependencies

from .mask import diagonal, linear


def kind_of(program: ScoreProgram, at: int) -> str:
    """A word for the boolean node ``at``; "mask" for what has no other."""
    nodes = program.nodes
    own = dependencies(nodes)[at] & {"q", "k", "load"}
    if "k" not in own:
        return "query padding"
    if nodes[at].op == "or":
        return _union(program, _parts(nodes, at, "or"))
    if nodes[at].op in ("eq", "ne"):
        return _equality(program, nodes[at])
    return _order(program, nodes[at]) if nodes[at].op in ("lt", "le", "gt", "ge") else "mask"


def _parts(nodes: tuple[Node, ...], at: int, op: str) -> list[int]:
    return [p for a in nodes[at].args for p in _parts(nodes, a, op)] if nodes[at].op == op else [at]


def _union(program: ScoreProgram, parts: list[int]) -> str:
    """Some keys, or queries, that all see are added to a band: a prefix to a causal one, global tokens to a window."""
    nodes, depends = program.nodes, dependencies(program.nodes)
    bands = [p for p in parts if all(diagonal(nodes, c) for c in _parts(nodes, p, "and"))]
    rest = [p for p in parts if p not in bands]
    if not rest or any({"q", "k"} <= depends[p] for p in rest):
        words = {kind_of(program, p) for p in rest}
        return words.pop() if len(words) == 1 and not bands else "mask"
    if not all(depends[p] & {"q", "k"} for p in rest):
        return "mask"  # some heads or batches see everything
    if not bands:
        return "global"
    kinds = {found[0] for p in bands for c in _parts(nodes, p, "and") if (found := diagonal(nodes, c)) is not None}
    return "prefix" if kinds == {"upper"} and all("q" not in depends[p] for p in rest) else "global"


def _equality(program: ScoreProgram, node: Node) -> str:
    """The same function of the query's and the key's place: a document's number, a block's; a distance that is a multiple."""
    nodes, depends = program.nodes, dependencies(program.nodes)
    x, y = node.args
    if nodes[x].op == "sub" and nodes[y].op == "const" and nodes[y].value == 0:
        x, y = nodes[x].args
    if nodes[x].op == "mod" and nodes[y].op == "const" and {"q", "k"} <= depends[x] and linear(nodes, nodes[x].args[0]) is not None:
        return "dilated" if node.op == "eq" else "mask"
    if not _mirrored(program, x, y):
        return "mask"
    if node.op == "ne":
        return "other documents" if "load" in depends[x] else "mask"
    if "load" in depends[x]:
        return "documents"
    return "dilated" if nodes[x].op == "mod" else "blocks"


def _order(program: ScoreProgram, node: Node) -> str:
    """Keys up to the query's own by a number that is read for both: positions that begin anew with each document."""
    depends = dependencies(program.nodes)
    x, y = node.args if node.op in ("lt", "le") else node.args[::-1]
    return "causal positions" if "load" in depends[x] and "k" in depends[x] and _mirrored(program, x, y) else "mask"


def _mirrored(program: ScoreProgram, x: int, y: int) -> bool:
    """Is ``y`` what ``x`` is with query and key exchanged?"""
    nodes, depends = program.nodes, dependencies(program.nodes)
    if {"q", "k"} <= depends[x] | depends[y] and not ({"q", "k"} <= depends[x] or {"q", "k"} <= depends[y]):
        builder = ProgramBuilder.like(program)
        other = {"q": builder.index("k"), "k": builder.index("q")}
        leaves = {i: other[str(n.value)] for i, n in enumerate(nodes) if n.op == "index" and n.value in other}
        turned, kept = builder.inline(program, leaves), builder.inline(program)
        return turned[x] == kept[y]
    return False
