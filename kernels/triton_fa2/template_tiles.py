"""Sources of the kernels that list the tiles which a mask leaves, for masks that are more than bounds of ``k - q``.

``fa2_map``: for each tile, may some score be visible (1) and are all (2), by interval arithmetic (``intervals.py``) over positions and what is
read at them; a mask that is a tensor is read once. ``fa2_lists``: for each tile of queries, or of keys, the tiles of the other side in the order
full, partly visible, empty, behind the numbers of full and of visible ones, so that a loop over the list visits what matters and
nothing else. ``fa2_fronts``: what a program reads first, the programs with most to visit in front. Block-sparse FlashAttention (Dao et al., 2022,
arXiv:2205.14135) walks over such lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fa_inductor.program import ScoreProgram

from .interval_rules import RULES
from .intervals import IntervalRenderer, chunk, letters
from .text import BESIDE, kernel

MAP_CONSTANTS = ("TILE_Q", "TILE_K", "ROWS", "RUNS")


def map_source(program: ScoreProgram) -> str:
    """``fa2_map``; ``program``'s results are the conditions that must all hold."""
    renderer = IntervalRenderer(program)
    pairs = [renderer.value(r) for r in program.results]
    keys = chunk(program)
    captures = [p for c in sorted(program.reads()) for p in (f"C{c}", *(f"C{c}_s{d}" for d in range(program.captures[c].rank)))]
    sizes = [f"Z{i}" for i in sizes_of(program)]
    body = [
        "pid = tl.program_id(0)",
        "tiles_q = (Lq + TILE_Q - 1) // TILE_Q",
        "tiles_k = (Lk + TILE_K - 1) // TILE_K",
        f"chunks = (tiles_k + {keys - 1}) // {keys}",
        "outer = pid // (chunks * tiles_q)",
        *{"bh": ["b = outer // H", "h = outer % H"], "b": ["b = outer", "h = outer * 0"], "h": ["b = outer * 0", "h = outer"], "": ["b = outer", "h = outer"]}[
            letters(program)
        ],
        "q0 = pid // chunks % tiles_q * TILE_Q",
        f"tile = pid % chunks * {keys} + tl.arange(0, {keys})",
        "k0 = tile * TILE_K",
        "b_low = b.to(tl.float64) + tl.zeros([1], tl.float64)",
        "b_high = b_low",
        "h_low = h.to(tl.float64) + tl.zeros([1], tl.float64)",
        "h_high = h_low",
        "q_low = q0.to(tl.float64) + tl.zeros([1], tl.float64)",
        "q_high = (tl.minimum(q0 + TILE_Q, Lq) - 1).to(tl.float64) + tl.zeros([1], tl.float64)",
        "k_low = k0.to(tl.float64)",
        "k_high = (tl.minimum(k0 + TILE_K, Lk) - 1).to(tl.float64)",
        "q_at = (q0 + tl.arange(0, TILE_Q)).to(tl.int64)[None, None, :]",
        "q_in = q_at < Lq",
        "k_at = (k0[:, None] + tl.arange(0, TILE_K)[None, :]).to(tl.int64)[None, :, :]",
        "k_in = k_at < Lk",
        f"inner = (q0 + TILE_Q <= Lq) & ((pid % chunks + 1) * {keys} * TILE_K <= Lk)",
        *renderer.lines,
        f"may = (tile >= 0) & {' & '.join(may for may, _ in pairs)}",
        f"every = may & {' & '.join(every for _, every in pairs)}",
        "at = (outer.to(tl.int64) * tiles_q + pid // chunks % tiles_q) * tiles_k + tile",
        "tl.store(STATE + at, (may.to(tl.int32) + 2 * every.to(tl.int32)).to(tl.int8), mask=tile < tiles_k)",
    ]
    return RULES + "\n\n" + kernel("fa2_map", ["STATE", *captures, *sizes, "H", "Lq", "Lk"], MAP_CONSTANTS, ["H", "Lq", "Lk", *sizes], body)


def sizes_of(program: ScoreProgram) -> tuple[int, ...]:
    """Numbers of the size arguments that the conditions read."""
    return tuple(sorted({int(n.value) for n in program.nodes if n.op == "size"}))  # type: ignore[arg-type]


_LIST = '''
@triton.jit
def fa2_states(STATE, own, first, own_fine, listed_fine, own_stride, listed_stride, OWN: tl.constexpr, LISTED: tl.constexpr, CHUNK: tl.constexpr):
    """(may, all) of the tiles from ``first`` on: each is OWN x LISTED tiles of the map."""
    own_at = own * OWN + tl.arange(0, OWN)
    listed_at = (first + tl.arange(0, CHUNK))[:, None] * LISTED + tl.arange(0, LISTED)[None, :]
    place = own_at.to(tl.int64)[:, None, None] * own_stride + listed_at.to(tl.int64)[None, :, :] * listed_stride
    inside = (own_at < own_fine)[:, None, None] & (listed_at < listed_fine)[None, :, :]
    state = tl.load(STATE + place, mask=inside, other=2).to(tl.int32)
    may = tl.max(tl.max(state & 1, 0), 1)
    return may, may & tl.min(tl.min(state >> 1, 0), 1)


@triton.jit
def fa2_list(STATE, LIST, row, own_length, listed_length, OWN_FINE: tl.constexpr, LISTED_FINE: tl.constexpr, OWN: tl.constexpr, LISTED: tl.constexpr,
             COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    own_fine = (own_length + OWN_FINE - 1) // OWN_FINE
    listed_fine = (listed_length + LISTED_FINE - 1) // LISTED_FINE
    own_tiles = (own_fine + OWN - 1) // OWN
    listed_tiles = (listed_fine + LISTED - 1) // LISTED
    own = row % own_tiles
    base = STATE + (row // own_tiles).to(tl.int64) * own_fine * listed_fine
    out = LIST + row.to(tl.int64) * (listed_tiles + COLUMNS_BESIDE)
    own_stride = listed_fine
    listed_stride = row * 0 + 1
    ragged = row < 0
    if COLUMNS:  # own tiles are of keys, which lie along rows of the map; a kernel's ragged tile of keys is never full
        own_stride = listed_stride
        listed_stride = own_fine
        ragged = (own + 1) * OWN * OWN_FINE > own_length
    full = own * 0
    seen = own * 0
    for first in tl.range(0, listed_tiles, CHUNK, num_stages=1):
        may, every = fa2_states(base, own, first, own_fine, listed_fine, own_stride, listed_stride, OWN, LISTED, CHUNK)
        tile = first + tl.arange(0, CHUNK)
        every = tl.where(ragged | ((tile + 1) * LISTED * LISTED_FINE > listed_length), 0, every)
        full += tl.sum(every)
        seen += tl.sum(may)
    tl.store(out, full)
    tl.store(out + 1, seen)
    at_full = own * 0
    at_part = full
    at_empty = seen
    for first in tl.range(0, listed_tiles, CHUNK, num_stages=1):
        may, every = fa2_states(base, own, first, own_fine, listed_fine, own_stride, listed_stride, OWN, LISTED, CHUNK)
        tile = first + tl.arange(0, CHUNK)
        every = tl.where(ragged | ((tile + 1) * LISTED * LISTED_FINE > listed_length), 0, every)
        part = may - every
        empty = tl.where(tile < listed_tiles, 1 - may, 0)
        at = tl.where(every > 0, at_full + tl.cumsum(every, 0) - 1, tl.where(part > 0, at_part + tl.cumsum(part, 0) - 1, at_empty + tl.cumsum(empty, 0) - 1))
        tl.store(out + 2 + at, tile, mask=tile < listed_tiles)
        at_full += tl.sum(every)
        at_part += tl.sum(part)
        at_empty += tl.sum(empty)
'''
"""``out``: the number of full tiles, of visible ones, then all in that order; behind it is room for what ``fa2_fronts`` writes."""

_FRONT = '''
@triton.jit
def fa2_front(LIST, row, rows, listed_tiles, CHUNK: tl.constexpr):
    """Writes what row ``row`` begins with into the last columns of the row of that rank, counted by visible tiles within its map."""
    columns = listed_tiles + COLUMNS_BESIDE
    own = row % rows
    base = LIST + (row // rows).to(tl.int64) * rows * columns
    mine = base + own.to(tl.int64) * columns
    full = tl.load(mine)
    seen = tl.load(mine + 1)
    first = tl.load(mine + 2)
    rank = tl.zeros([CHUNK], tl.int32)
    for other in tl.range(0, rows, CHUNK, num_stages=1):
        others = other + tl.arange(0, CHUNK)
        theirs = tl.load(base + others.to(tl.int64) * columns + 1, mask=others < rows, other=-1)
        rank += ((theirs > seen) | ((theirs == seen) & (others < own))).to(tl.int32)
    front = base + tl.sum(rank).to(tl.int64) * columns + listed_tiles + 2
    tl.store(front, own)
    tl.store(front + 1, full)
    tl.store(front + 2, seen)
    tl.store(front + 3, first)
'''
"""What runs longest starts first, and a program knows its own tile, its loops and its first tile after one wait for memory."""


@dataclass(frozen=True)
class Walk:
    """A list for tiles of ``own`` queries that are followed by tiles of ``listed`` keys; the other way round for ``columns``."""

    own: int
    listed: int
    columns: bool

    @property
    def queries(self) -> int:
        return self.listed if self.columns else self.own

    @property
    def keys(self) -> int:
        return self.own if self.columns else self.listed


def lists_source(walks: Sequence[Walk], fine_q: int, fine_k: int, chunk: int) -> str:
    """``fa2_lists`` and ``fa2_fronts`` for several lists at once; the map has tiles of ``fine_q`` x ``fine_k``. Each program writes one row of one list."""
    lists, fronts = [], []
    for i, w in enumerate(walks):
        (own, own_fine), (listed, listed_fine) = (("Lk", fine_k), ("Lq", fine_q)) if w.columns else (("Lq", fine_q), ("Lk", fine_k))
        rows = f"({own} + {w.own - 1}) // {w.own}"
        constants = f"{own_fine}, {listed_fine}, {w.own // own_fine}, {w.listed // listed_fine}, {w.columns}, {chunk}"
        lists += _share(f"maps * ({rows})", f"fa2_list(STATE, LIST{i}, pid - begin, {own}, {listed}, {constants})")
        fronts += _share(f"maps * ({rows})", f"fa2_front(LIST{i}, pid - begin, {rows}, ({listed} + {w.listed - 1}) // {w.listed}, {chunk})")
    places, sizes = [f"LIST{i}" for i in range(len(walks))], ["maps", "Lq", "Lk"]
    start = ["pid = tl.program_id(0)", "begin = pid * 0"]
    texts = [
        kernel("fa2_lists", ["STATE", *places, *sizes], (), sizes, [*start, *lists]),
        kernel("fa2_fronts", [*places, *sizes], (), sizes, [*start, *fronts]),
    ]
    return "\n\n".join([_LIST + _FRONT, *texts]).replace("COLUMNS_BESIDE", str(BESIDE))


def _share(rows: str, call: str) -> list[str]:
    """The next ``rows`` programs make this call."""
    return [f"end = begin + {rows}", "if (pid >= begin) & (pid < end):", f"    {call}", "begin = end"]
