"""How much of the score matrix a mask leaves empty, in words for the report."""

from __future__ import annotations

from functools import lru_cache

import torch

from .facts import MaskFacts
from .index import Expr
from .program import ScoreProgram, dependencies
from .program.tile_map import Tiling, tile_map

TILE = 128
_MOST_TILES = 1 << 20


@lru_cache(maxsize=64)
def empty_tiles(program: ScoreProgram, mask: MaskFacts | None, lq: Expr, lk: Expr, sizes: tuple[Expr, ...]) -> str:
    """The share of tiles without a visible score by the positions alone; empty where lengths are symbols or there is no mask. Equal layers ask once."""
    if mask is None or not all(e.is_Integer and e > 0 for e in (lq, lk, *sizes)):
        return ""
    tile = TILE
    while int(lq) * int(lk) > _MOST_TILES * tile * tile:
        tile *= 2
    conditions = [*(t.node for t in mask.terms), *mask.places]
    tiling = Tiling(1, 1, int(lq), int(lk), tile, tile, torch.device("cpu"))
    may = tile_map(program, conditions, tiling, [None] * len(program.captures), [int(s) for s in sizes]).may
    share = 1 - float(may.double().mean())
    by_data = any("load" in dependencies(program.nodes)[c] for c in conditions)
    return f"{share:.0%} of {tile} x {tile} are empty by position" + (", and those that the tensors of the mask empty" if by_data else "")
