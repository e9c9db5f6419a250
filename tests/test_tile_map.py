"""Tiles that are called empty or full are so: against every element, for random conditions, tiles and tensors."""

from __future__ import annotations

import math
import os
import random

import pytest
import torch
from torch import Tensor

from fa_inductor.program import Coordinates, ProgramBuilder, ScoreProgram, evaluate
from fa_inductor.program.tile_map import Tiling, tile_map

CASES = int(os.environ.get("FA_INDUCTOR_TILE_CASES", "20000"))
PER_PROGRAM = 8
CPU = torch.device("cpu")


class Grammar:
    """Random conditions of positions and of tensors of every kind that masks are made of."""

    def __init__(self, seed: int) -> None:
        self.random, self.b = random.Random(seed), ProgramBuilder()
        b, q, k = (self.b.index(n) for n in "bqk")
        documents, lengths, padding, dense, bias = (self.b.capture(d, n) for d, n in (("int64", 2), ("int32", 1), ("bool", 2), ("bool", 2), ("float32", 2)))
        self.integers = [q, k, self.b.index("h"), self.b.size(0), self.b.size(1), self.b.load(documents, [b, q]), self.b.load(documents, [b, k])]
        self.integers += [self.b.load(lengths, [b])]
        self.booleans = [self.b.load(padding, [b, k]), self.b.load(padding, [b, q]), self.b.load(dense, [q, k])]
        self.floats = [self.b.load(bias, [q, k]), self.b.score()]

    def integer(self, depth: int) -> int:
        r = self.random
        if depth == 0 or r.random() < 0.3:
            return r.choice([*self.integers[:2], r.choice(self.integers), self.b.const(r.randint(-6, 12))])
        op = r.choice(["add", "sub", "sub", "mul", "floordiv", "mod", "min", "max", "neg", "abs", "where", "to_int"])
        if op in ("floordiv", "mod"):
            return self.b.emit(op, self.integer(depth - 1), self.b.const(r.randint(1, 6)))
        if op in ("neg", "abs"):
            return self.b.emit(op, self.integer(depth - 1))
        if op == "where":
            return self.b.emit(op, self.boolean(depth - 1), self.integer(depth - 1), self.integer(depth - 1))
        if op == "to_int":
            return self.b.convert(self.boolean(depth - 1), "int")
        return self.b.emit(op, self.integer(depth - 1), self.integer(depth - 1))

    def number(self, depth: int) -> int:
        r = self.random
        if depth == 0 or r.random() < 0.4:
            return r.choice([r.choice(self.floats), self.b.convert(self.integer(1), "float"), self.b.const(r.choice([0.0, -1.5, 0.1, -math.inf, math.inf]))])
        op = r.choice(["add", "sub", "mul", "div", "min", "max", "neg", "abs", "tanh"])
        arity = 1 if op in ("neg", "abs", "tanh") else 2
        return self.b.emit(op, *(self.number(depth - 1) for _ in range(arity)))

    def boolean(self, depth: int) -> int:
        r = self.random
        if depth == 0 or r.random() < 0.1:
            return r.choice(self.booleans)
        op = r.choice(["compare", "compare", "compare", "and", "or", "not", "where", "floats", "to_bool", "same"])
        if op == "compare":
            return self.b.emit(r.choice(["lt", "le", "gt", "ge", "eq", "ne"]), self.integer(depth - 1), self.integer(depth - 1))
        if op == "floats":
            return self.b.emit(r.choice(["lt", "le", "gt", "ge", "eq", "ne"]), self.number(depth - 1), self.number(depth - 1))
        if op == "to_bool":
            return self.b.convert(r.choice([self.integer, self.number])(depth - 1), "bool")
        if op == "same":
            return self.b.emit(r.choice(["eq", "ne"]), self.boolean(depth - 1), self.boolean(depth - 1))
        arity = {"not": 1, "where": 3}.get(op, 2)
        return self.b.emit(op, *(self.boolean(depth - 1) for _ in range(arity)))


def tensors(b: int, lq: int, lk: int, g: torch.Generator) -> list[Tensor]:
    longest = max(lq, lk)
    documents = (torch.rand(b, longest, generator=g) < 0.2).cumsum(-1)
    if torch.rand((), generator=g) < 0.3:
        documents = torch.randint(-3, 4, (b, longest), generator=g)
    bias = torch.randn(lq, lk, generator=g)
    bias[torch.rand(lq, lk, generator=g) < 0.2] = -math.inf
    if torch.rand((), generator=g) < 0.1:
        bias[0, 0] = math.nan
    blocks = torch.rand(lq // 4 + 1, lk // 4 + 1, generator=g).repeat_interleave(4, 0).repeat_interleave(4, 1)[:lq, :lk] < 0.4
    lengths = torch.randint(0, lk + 1, (b,), generator=g, dtype=torch.int32)
    return [documents, lengths, torch.rand(b, longest, generator=g) < 0.6, blocks, bias]


def blocks_of(held: Tensor, q: int, k: int, how: str, neutral: bool) -> Tensor:
    for dim, step in ((2, q), (3, k)):
        pad = list(held.shape)
        pad[dim] = -held.shape[dim] % step
        held = torch.cat([held, held.new_full(pad, neutral)], dim).unflatten(dim, (-1, step))
        held = held.any(dim + 1) if how == "any" else held.all(dim + 1)
    return held


@pytest.mark.parametrize("part", range(20))
def test_no_claim_about_a_tile_is_wrong(part: int) -> None:
    told = total = 0
    for seed in range(part, CASES // PER_PROGRAM, 20):
        grammar = Grammar(seed)
        condition = grammar.boolean(3)
        builder = grammar.b
        program: ScoreProgram = builder.finish(condition)
        g = torch.Generator().manual_seed(seed)
        for _ in range(PER_PROGRAM):
            b, h, lq, lk, q, k = (int(torch.randint(low, high, (), generator=g)) for low, high in ((1, 3), (1, 3), (1, 20), (1, 20), (1, 9), (1, 9)))
            captures, sizes = tensors(b, lq, lk, g), (lq, lk)
            score = torch.randn(b, h, lq, lk, generator=g) * 3
            (held,) = evaluate(program, Coordinates((0, b), (0, h), (0, lq), (0, lk)), score=score, captures=captures, sizes=sizes, device=CPU)
            held = held.expand(b, h, lq, lk)
            found = tile_map(program, [program.result], Tiling(b, h, lq, lk, q, k, CPU), captures, sizes)
            some, every = blocks_of(held, q, k, "any", False), blocks_of(held, q, k, "all", True)
            may, must = (x.expand(some.shape) for x in found)
            assert not (some & ~may).any(), f"a tile with a visible element is called empty, seed {seed}, tiles {q} x {k} of {lq} x {lk}\n{program}"
            assert not (must & ~every).any(), f"a tile with a hidden element is called full, seed {seed}, tiles {q} x {k} of {lq} x {lk}\n{program}"
            told += int((~may).sum() + must.sum())
            total += int((~some).sum() + every.sum())
    assert told > total / 2, f"only {told} of {total} empty and full tiles are told"
