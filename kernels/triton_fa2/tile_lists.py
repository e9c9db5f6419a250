"""Launches of ``fa2_map``, ``fa2_lists`` and ``fa2_fronts``: which tiles each kernel of a plan walks over (see ``template_tiles``).

A list is an int32 matrix with one row for each tile of queries (of keys, for dK and dV) of each batch and head whose mask is its own:
the number of full tiles, the number of visible ones, then the tiles of the other side, full ones first and empty ones last. The last four
columns are not of their row: they name the rows, those with most to visit first, each with its two numbers and its first tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fa_inductor.program import Node, ScoreProgram, from_text, to_text
from fa_inductor.request import Inputs, Plan, Size, TileLists

from .codegen import lists_kernels, map_kernel, traits_of
from .intervals import chunk, letters
from .launch import launch, tensor_arguments, tiles
from .template_tiles import Walk, sizes_of
from .text import BESIDE

_CHUNK = 256
ROWS, RUNS = 4, 8
"""Rows of a tensor of a number for each score that are read together: few, so that many programs are resident."""
_NEWLINE = "\n"
_PART = "#"


def walk(plan: Plan, kernel: str) -> Walk:
    """The list that a kernel of the plan follows."""
    m, n = int(plan.get(f"{kernel}_m")), int(plan.get(f"{kernel}_n"))
    return Walk(n, m, True) if kernel == "columns" else Walk(m, n, False)


def walks(plan: Plan, backward: bool) -> tuple[Walk, ...]:
    """The lists that a plan's kernels follow, each once."""
    return tuple(dict.fromkeys(walk(plan, k) for k in (("fwd", "rows", "columns") if backward else ("fwd",))))


def asked(plan: Plan, backward: bool) -> TileLists:
    """See ``request.TileLists``: the conditions with what they read numbered anew, so that equal masks of different layers have equal text."""
    program = traits_of(plan).conditions
    captures, sizes = tuple(sorted(program.reads())), sizes_of(program)
    place = {"load": {c: i for i, c in enumerate(captures)}, "size": {s: i for i, s in enumerate(sizes)}}
    nodes = tuple(Node(n.op, n.type, n.args, place[n.op][n.value] if n.op in place else n.value) for n in program.nodes)  # type: ignore[index]
    own = ScoreProgram(nodes, program.results, tuple(program.captures[c] for c in captures), len(sizes))
    lists = _PART.join(f"{w.own},{w.listed},{int(w.columns)}" for w in walks(plan, backward))
    return TileLists(
        plan.kernel,
        _PART.join((plan.source_hash, to_text(own).replace(_NEWLINE, "|"), lists)),
        captures,
        sizes,
        partial(list_shapes, own, walks(plan, backward)),
    )


def list_shapes(program: ScoreProgram, wanted: Sequence[Walk], shape: Sequence[Size]) -> list[tuple[Size, ...]]:
    """Rows and columns of each list."""
    batch, heads, lq, lk = shape
    lengths = [(lk, lq) if w.columns else (lq, lk) for w in wanted]
    return [(_maps(program, batch, heads) * tiles(own, w.own), tiles(listed, w.listed) + BESIDE) for w, (own, listed) in zip(wanted, lengths, strict=True)]


def answer(text: str, captures: Sequence[Tensor], sizes: Sequence[Size], shape: Sequence[Size], device: torch.device) -> list[Tensor]:
    """The lists that ``asked`` names, in its order."""
    _, program, *lists = text.split(_PART)
    wanted = [Walk(int(own), int(listed), columns == "1") for own, listed, columns in (one.split(",") for one in lists)]
    return find_lists(from_text(program.replace("|", _NEWLINE)), wanted, captures, sizes, shape, device)


def lists_for(plan: Plan, inputs: Inputs, kernels: Sequence[str]) -> dict[str, Tensor]:
    """The list of each of ``kernels``; computed here unless ``inputs`` brings them."""
    given = dict(zip(walks(plan, True), inputs.tiles, strict=False))  # those of forward come first
    if given:
        return {k: given[walk(plan, k)] for k in kernels}
    wanted = tuple(dict.fromkeys(walk(plan, k) for k in kernels))
    shape = (*inputs.q.shape[:3], inputs.k.shape[2])
    found = find_lists(traits_of(plan).conditions, wanted, inputs.captures, inputs.sizes, shape, inputs.q.device)
    return {k: found[wanted.index(walk(plan, k))] for k in kernels}


def find_lists(
    program: ScoreProgram, wanted: Sequence[Walk], captures: Sequence[Tensor], sizes: Sequence[Size], shape: Sequence[Size], device: torch.device
) -> list[Tensor]:
    """One list for each walk; ``shape``: batch, query heads, queries, keys."""
    fine_q, fine_k = min(w.queries for w in wanted), min(w.keys for w in wanted)
    state = find_map(program, fine_q, fine_k, captures, sizes, shape, device)
    found = [torch.empty(size, dtype=torch.int32, device=device) for size in list_shapes(program, wanted, shape)]
    lists, fronts = lists_kernels(tuple(wanted), fine_q, fine_k, _CHUNK)
    arguments = {f"LIST{i}": out for i, out in enumerate(found)} | {"maps": _maps(program, *shape[:2]), "Lq": shape[2], "Lk": shape[3]}
    rows = sum(out.shape[0] for out in found)
    launch(lists, rows, {"STATE": state} | arguments, num_warps=4)
    launch(fronts, rows, arguments, num_warps=1)
    return found


def find_map(
    program: ScoreProgram, tile_q: int, tile_k: int, captures: Sequence[Tensor], sizes: Sequence[Size], shape: Sequence[Size], device: torch.device
) -> Tensor:
    """(maps * query tiles * key tiles): 0 for an empty tile, 1 where some score may be visible, 3 where all are."""
    batch, heads, lq, lk = shape
    rows = _maps(program, batch, heads) * tiles(lq, tile_q)
    state = torch.empty((rows * tiles(lk, tile_k),), dtype=torch.int8, device=device)
    arguments = {"STATE": state} | tensor_arguments({f"C{c}": captures[c] for c in sorted(program.reads())})
    arguments |= {f"Z{i}": sizes[i] for i in sizes_of(program)} | {"H": heads, "Lq": lq, "Lk": lk}
    launch(
        map_kernel(program),
        rows * tiles(tiles(lk, tile_k), chunk(program)),
        arguments,
        TILE_Q=tile_q,
        TILE_K=tile_k,
        ROWS=min(tile_q, ROWS),
        RUNS=min(tile_q, RUNS),
        num_warps=4,
        num_stages=1,
    )
    return state


def _maps(program: ScoreProgram, batch: Size, heads: Size) -> Size:
    own = letters(program)
    return (batch if "b" in own else 1) * (heads if "h" in own else 1)
