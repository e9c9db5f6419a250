"""Which boxes of the score tensor are visited, and which of them the mask touches.

A *chunk* is a range of batches and key heads, small enough for its score block to stay in the cache; for each chunk, query tiles
are walked, and for each of these the blocks of keys that can matter. A hidden block may be left out where that is exact
(``MaskFacts``): always for rows whose maximum reaches ``skip_above``. The mask itself is only applied to the columns of a block
that some row of the tile does not see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from fa_inductor.facts import HIDDEN, MaskFacts
from fa_inductor.program import Coordinates, ScoreProgram, evaluate, pruned
from fa_inductor.program.tile_map import Tiling, Truth, conditions, tile_map

Range = tuple[int, int]


@dataclass(frozen=True)
class Shape:
    """Sizes of one call. ``group``: query heads per key head."""

    batch: int
    heads: int
    kv_heads: int
    lq: int
    lk: int
    d: int
    dv: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Tiles:
    """Sizes of the tiles: rows and columns of one head's block, and the chunk's extent in batches and key heads."""

    q: int
    k: int
    batches: int
    kv_heads: int


def choose_tiles(shape: Shape, q_tile: int, k_tile: int, elements: int) -> Tiles:
    """Blocks of about ``elements`` scores: ``q_tile`` x ``k_tile`` a head (fewer rows leave room for more columns), then more heads, then more batches."""
    rows = max(1, min(q_tile // max(1, shape.group // 2), shape.lq))
    columns = max(1, min(max(k_tile, k_tile * q_tile // (4 * rows * shape.group)), shape.lk))
    per_kv_head = rows * shape.group * columns
    kv_heads = max(1, min(elements // per_kv_head, shape.kv_heads))
    batches = max(1, min(elements // (per_kv_head * kv_heads), shape.batch)) if kv_heads == shape.kv_heads else 1
    return Tiles(rows, columns, batches, kv_heads)


def ranges(stop: int, step: int, start: int = 0) -> Iterator[Range]:
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


FINE = 128
"""Keys that are skipped together where the mask depends on places."""


def runs(visible: Sequence[bool], step: int, within: Range, most: int) -> Iterator[Range]:
    """The longest ranges of at most ``most`` places ``within`` which every ``step`` places are visible."""
    at = within[0]
    while at < within[1]:
        if not visible[at // step]:
            at = (at // step + 1) * step
            continue
        stop = min((at // step + 1) * step, within[1])
        while stop < within[1] and stop - at < most and visible[stop // step]:
            stop = min(stop + step, within[1])
        yield at, min(stop, at + most)
        at = min(stop, at + most)


class Visibility:
    """The mask of one call: bounds of ``k - q``, the key predicate, evaluated once at its own broadcast shape, and what depends on places otherwise."""

    def __init__(
        self,
        mask: MaskFacts | None,
        program: ScoreProgram,
        shape: Shape,
        captures: Sequence[Tensor],
        sizes: Sequence[int],
        device: torch.device,
        bias: int | None = None,
    ) -> None:
        self.mask, self.shape, self.device = mask, shape, device
        self.upper: int | None = None
        self.lower: int | None = None
        self.key: Tensor | None = None
        for term in mask.terms if mask is not None else ():
            if term.kind == "key":
                box = Coordinates((0, shape.batch), (0, shape.heads), (0, 1), (0, shape.lk))
                (key,) = evaluate(pruned(program, term.node), box, captures=captures, sizes=sizes, device=device)
                self.key = key if self.key is None else self.key & key
            elif term.bound is not None:
                bound = term.bound.value(sizes)
                if term.kind == "upper":
                    self.upper = bound if self.upper is None else min(self.upper, bound)
                else:
                    self.lower = bound if self.lower is None else max(self.lower, bound)
        self.program, self.captures, self.sizes = program, captures, sizes
        self.places = pruned(program, *mask.places) if mask is not None and mask.places else None
        self.bias = bias
        self._patterns: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}

    def key_blocks(self, step: int) -> tuple[list[list[bool]], list[list[bool]]] | None:
        """For each batch and each aligned block of ``step`` keys: does any head see some key of it, do all heads see all of it."""
        if self.key is None or self.shape.lk == 0:
            return None
        key = self.key.expand(self.shape.batch, -1, -1, self.shape.lk).squeeze(2)
        some = [key[..., a:b].any(-1).any(-1) for a, b in ranges(self.shape.lk, step)]
        every = [key[..., a:b].all(-1).all(-1) for a, b in ranges(self.shape.lk, step)]
        return torch.stack(some, 1).tolist(), torch.stack(every, 1).tolist()

    def tile_map(self, tiles: Tiles) -> Truth | None:
        """Where some, and where all elements are visible by what is no bound and no key predicate: (B or 1, H or 1, q tiles, ``FINE`` keys)."""
        shape = self.shape
        if (self.places is None and self.bias is None) or shape.lq == 0 or shape.lk == 0:
            return None
        tiling = Tiling(shape.batch, shape.heads, shape.lq, shape.lk, tiles.q, FINE, self.device)
        program = conditions(self.program, self.mask.places if self.mask is not None else (), self.bias, HIDDEN)
        return tile_map(program, program.results, tiling, self.captures, self.sizes)

    def key_range(self, rows: Range) -> Range:
        """The keys that some row of the tile can see by the bounds; empty ranges are (n, n)."""
        stop = self.shape.lk if self.upper is None else min(self.shape.lk, max(0, rows[1] + self.upper))
        start = 0 if self.lower is None else min(stop, max(0, rows[0] + self.lower))
        return start, stop

    def seen_by_all(self, rows: Range, keys: Range) -> Range:
        """The columns of the block that every row of the tile sees by the bounds."""
        start = keys[0] if self.lower is None else min(keys[1], max(keys[0], rows[1] - 1 + self.lower))
        stop = keys[1] if self.upper is None else max(start, min(keys[1], rows[0] + 1 + self.upper))
        return start, stop

    def bits(self, rows: Range, keys: Range, batches: Range | None, heads: Range | None) -> tuple[Tensor, ...]:
        """``(visible as -1/0, fill's bits where hidden, additive fill)`` on a box; without ``batches`` by the bounds alone, else by all that hides."""
        if batches is None:
            place = (keys[0] - rows[0], rows[1] - rows[0], keys[1] - keys[0])  # the pattern depends on the offset alone
            if place not in self._patterns:
                if len(self._patterns) > 64:
                    self._patterns.clear()
                self._patterns[place] = self._bits(self._by_bounds(rows, keys))
            return self._patterns[place]
        assert heads is not None
        conditions: list[Tensor] = []
        if self.key is not None:
            box = (slice(*batches), slice(*heads), slice(None), slice(*keys))
            conditions.append(self.key[tuple(part if n > 1 else slice(None) for part, n in zip(box, self.key.shape, strict=True))])
        if self.places is not None:
            conditions += evaluate(self.places, Coordinates(batches, heads, rows, keys), captures=self.captures, sizes=self.sizes, device=self.device)
        if self.seen_by_all(rows, keys) != keys:
            conditions.append(self._by_bounds(rows, keys))
        return self._bits(reduce(torch.logical_and, conditions, torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device)))

    def _by_bounds(self, rows: Range, keys: Range) -> Tensor:
        distance = torch.arange(*keys, device=self.device).view(1, 1, 1, -1) - torch.arange(*rows, device=self.device).view(1, 1, -1, 1)
        visible = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device)
        if self.upper is not None:
            visible = visible & (distance <= self.upper)
        if self.lower is not None:
            visible = visible & (distance >= self.lower)
        return visible

    def _bits(self, visible: Tensor) -> tuple[Tensor, ...]:
        assert self.mask is not None
        fill = torch.where(visible, 0.0, torch.tensor(self.mask.fill, device=self.device))
        return -visible.to(torch.int32), fill.view(torch.int32), fill
