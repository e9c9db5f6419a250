"""Recognising the unmasked scores: scale and bias (``a*s + c``), soft-cap (``c*tanh(a*s/c)``), ALiBi."""

from __future__ import annotations

from dataclasses import dataclass

from fa_inductor.program import Node, ScoreProgram, dependencies
from fa_inductor.program.evaluate import load_axes


@dataclass(frozen=True)
class Core:
    """``scale * score + bias`` (bias: nodes that are summed), or a soft-cap around the scores."""

    scale: float | None
    bias: tuple[int, ...]
    softcap: float | None


def core_of(program: ScoreProgram, at: int) -> Core:
    depends = dependencies(program.nodes)
    found = _affine(program.nodes, depends, at)
    if found is not None:
        return Core(found[0], found[1], None)
    return Core(None, (), _softcap(program.nodes, depends, at))


def _affine(nodes: tuple[Node, ...], depends: tuple[frozenset[str], ...], at: int) -> tuple[float, tuple[int, ...]] | None:
    node = nodes[at]
    if node.op == "score":
        return 1.0, ()
    if node.op in ("add", "sub"):
        x, y = node.args
        for inner, other in ((x, y), (y, x)):
            if "score" in depends[inner] and "score" not in depends[other] and (node.op == "add" or inner == x):
                found = _affine(nodes, depends, inner)
                return None if found is None or node.op == "sub" else (found[0], (*found[1], other))
    if node.op in ("mul", "div"):
        literal = nodes[node.args[1]]
        found = _affine(nodes, depends, node.args[0]) if literal.op == "const" and "score" in depends[node.args[0]] else None
        if found is not None and not found[1] and (node.op == "mul" or literal.value != 0):
            value = float(literal.value)  # type: ignore[arg-type]
            return found[0] * value if node.op == "mul" else found[0] / value, ()
    return None


def _softcap(nodes: tuple[Node, ...], depends: tuple[frozenset[str], ...], at: int) -> float | None:
    node = nodes[at]
    if node.op == "mul" and nodes[node.args[0]].op == "tanh" and nodes[node.args[1]].op == "const":
        return float(nodes[node.args[1]].value)  # type: ignore[arg-type]
    return None


def hiding_bias(program: ScoreProgram, at: int) -> int | None:
    """A tensor of floats that is added to the scores ``at``, read at (b, q, k) alone: what a mask of 0 and -inf looks like. None where there are two."""
    nodes, depends = program.nodes, dependencies(program.nodes)
    found: list[int] = []
    while nodes[at].op == "add":
        inner, other = nodes[at].args if "score" in depends[nodes[at].args[0]] else nodes[at].args[::-1]
        if "score" in depends[other]:
            break
        load = nodes[other].args[0] if nodes[other].op == "round" else other
        axes = load_axes(program, nodes[load]) if nodes[load].op == "load" else None
        found += [load] if axes is not None and {"q", "k"} <= set(axes) and "h" not in axes else []
        at = inner
    return found[0] if len(found) == 1 else None


def looks_like_alibi(program: ScoreProgram, bias: int) -> bool:
    """A bias computed from positions and per-head slopes: depends on k and h, and no tensor is read at a place that depends on q or k."""
    reached, queue = set(), [bias]
    while queue:
        i = queue.pop()
        if i not in reached:
            reached.add(i)
            queue += program.nodes[i].args
    nodes = program.nodes
    keys = [i for i in reached if nodes[i].op == "index" and nodes[i].value == "k"]
    positions = any(i in nodes[j].args for i in keys for j in reached)
    depends = dependencies(nodes)
    tables = any(nodes[i].op == "load" and depends[i] & {"q", "k"} for i in reached)
    return positions and not tables and "h" in depends[bias]
