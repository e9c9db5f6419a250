"""Checks of the kernels that list tiles (``template_tiles``), on a GPU or in Triton's interpreter."""

from __future__ import annotations

import itertools
import math

import torch
from test_tile_map import Grammar, blocks_of, tensors

from fa_inductor.kernels.triton_fa2.intervals import letters
from fa_inductor.kernels.triton_fa2.template_tiles import Walk
from fa_inductor.kernels.triton_fa2.tile_lists import find_lists, find_map
from fa_inductor.program import Coordinates, ProgramBuilder, evaluate
from fa_inductor.program.tile_map import Tiling, tile_map


def map_claims(first: int, programs: int, device: str) -> None:
    """Random conditions: no tile that the map calls empty or full is not, and it tells about as many as interval arithmetic in PyTorch."""
    cpu, told, known = torch.device("cpu"), 0, 0
    for seed in range(first, first + programs):
        grammar = Grammar(seed)
        program = grammar.b.finish(grammar.boolean(3))
        g = torch.Generator().manual_seed(seed)
        b, h, lq, lk = (int(torch.randint(low, high, (), generator=g)) for low, high in ((1, 3), (1, 3), (1, 40), (1, 80)))
        q, k = (1 << int(torch.randint(0, 4, (), generator=g)), 4 << int(torch.randint(0, 3, (), generator=g)))
        captures, sizes = tensors(b, lq, lk, g), (lq, lk)
        score = torch.randn(b, h, lq, lk, generator=g) * 3
        box = Coordinates((0, b), (0, h), (0, lq), (0, lk))
        held = evaluate(program, box, score=score, captures=captures, sizes=sizes, device=cpu)[0].expand(b, h, lq, lk)
        state = find_map(program, q, k, [c.to(device) for c in captures], sizes, (b, h, lq, lk), torch.device(device)).cpu()
        own = letters(program)
        state = state.view(b if "b" in own else 1, h if "h" in own else 1, -(-lq // q), -(-lk // k))
        may, must = (state & 1 > 0), (state & 2 > 0)
        some, every = blocks_of(held, q, k, "any", False), blocks_of(held, q, k, "all", True)
        what = f"seed {seed}, tiles {q} x {k} of {lq} x {lk}\n{program}"
        assert not (some & ~may).any(), f"a tile with a visible element is called empty, {what}"
        assert not (must & ~every).any(), f"a tile with a hidden element is called full, {what}"
        other = tile_map(program, [program.result], Tiling(b, h, lq, lk, q, k, cpu), captures, sizes)
        told += int((~may).expand(some.shape).sum() + must.expand(some.shape).sum())
        known += int((~other.may).expand(some.shape).sum() + (other.must & other.may).expand(some.shape).sum())
    assert told >= known * 0.98, f"{told} tiles are told, interval arithmetic in PyTorch tells {known}"


def map_of_numbers(dtype: str, layout: str, device: str) -> None:
    """One tensor of a number for each score: the map is exact, in tiles away from the edges and at them, whatever the strides."""
    lq, lk, tile_q, tile_k = 35, 150, 8, 16
    kind, b = getattr(torch, dtype), ProgramBuilder()
    held = b.load(b.capture(dtype, 3), [b.index("h"), b.index("q"), b.index("k")])
    least = 0 if dtype.startswith("int") else 0.5
    program = b.finish(held if dtype == "bool" else b.emit("gt", held, b.const(least)))
    g = torch.Generator().manual_seed(len(dtype))
    level = torch.randint(-1, 2, (2, 5, 10), generator=g).repeat_interleave(tile_q, 1).repeat_interleave(tile_k, 2)[:, :lq, :lk]
    mixed = torch.rand(2, lq, lk, generator=g) < 1 / 64
    numbers = torch.where(mixed, -3 * level.sign(), 3 * level).to(kind) if dtype != "bool" else (level > 0) ^ mixed
    if dtype.startswith(("float", "bfloat")):
        numbers[0, 3, 5], numbers[1, 20, 40], numbers[1, 0, 33] = math.nan, math.inf, -math.inf
    if layout == "transposed":
        place = torch.empty(2, lk, lq, dtype=kind, device=device).mT
    else:
        room = torch.zeros(2, lq + 3, 164, dtype=kind, device=device)  # rows of whole words
        place = {"dense": torch.empty(2, lq, lk, dtype=kind, device=device), "words": room[:, 1:-2, 4:154], "odd": room[:, 1:-2, 3:153]}[layout]
    place.copy_(numbers)
    state = find_map(program, tile_q, tile_k, [place], (), (1, 2, lq, lk), torch.device(device)).view(2, 5, 10)
    for h, i, j in itertools.product(range(2), range(5), range(10)):
        tile = numbers[h, i * tile_q : (i + 1) * tile_q, j * tile_k : (j + 1) * tile_k]
        visible = tile if dtype == "bool" else tile > least
        unknown = bool((tile != tile).any())
        expected = (1 if unknown or bool(visible.any()) else 0) + (2 if not unknown and bool(visible.all()) else 0)
        assert int(state[h, i, j]) == expected, f"tile {h, i, j} of {dtype}, {layout}: {int(state[h, i, j])}, expected {expected}"


def lists_of_tiles(lq: int, lk: int, own: int, listed: int, columns: bool, device: str) -> None:
    """Each list against the map: full, partly visible and empty tiles, each in order."""
    builder = ProgramBuilder()
    program = builder.finish(builder.load(builder.capture("bool", 3), [builder.index("h"), builder.index("q"), builder.index("k")]))
    g = torch.Generator().manual_seed(lq + lk)
    step = 8
    blocks = torch.randint(0, 3, (2, -(-lq // step), -(-lk // step)), generator=g).repeat_interleave(step, 1).repeat_interleave(step, 2)[:, :lq, :lk]
    visible = (blocks == 2) | ((blocks == 1) & (torch.rand(2, lq, lk, generator=g) < 0.5))
    fine = Walk(16, 16, False)
    _, found = find_lists(program, (fine, Walk(own, listed, columns)), [visible.to(device)], (), (3, 2, lq, lk), torch.device(device))
    found = found.cpu()
    mine = visible.mT if columns else visible
    length, others = mine.shape[1:]
    rows = [mine[h, i : i + own] for h in range(2) for i in range(0, length, own)]
    width = -(-others // listed)
    assert found.shape == (len(rows), width + 6)
    for i, (row, got) in enumerate(zip(rows, found.tolist(), strict=True)):
        tiles = [row[:, j : j + listed] for j in range(0, others, listed)]
        whole = [bool(t.all()) and t.shape[1] == listed and not (columns and t.shape[0] < own) for t in tiles]
        seen = [bool(t.any()) for t in tiles]
        kinds = [[t for t, _ in enumerate(tiles) if (whole[t], seen[t]) == kind] for kind in ((True, True), (False, True), (False, False))]
        assert got[:-4] == [len(kinds[0]), len(kinds[0]) + len(kinds[1]), *kinds[0], *kinds[1], *kinds[2]], (i, got, kinds)
    for part in found.chunk(2):  # of each head
        count = part[:, 1].tolist()
        order = sorted(range(len(count)), key=lambda i: (-count[i], i))
        assert part[:, -4:].tolist() == [[i, *part[i, :3].tolist()] for i in order]
