"""Golden score programs: scales and causal masks."""

from __future__ import annotations

import math

import torch
from golden import D, Golden, H, L, ones, qkv

LOW = torch.finfo(torch.float32).min


class Scales(Golden):
    def test_plain(self):
        def attention(q, k, v):
            return (q @ k.transpose(-2, -1) / math.sqrt(D)).softmax(-1) @ v

        self.golden(
            attention,
            qkv(),
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
plain
no mask
program(; sizes=0)
  %0 = score
  %1 = const 0.5
  %2 = mul %0 %1
  return %2""",
        )

    def test_scale_on_both_operands(self):
        def attention(q, k, v):
            return torch.einsum("bhid,bhjd->bhij", q * D**-0.25, k * D**-0.25).softmax(-1) @ v

        self.golden(
            attention,
            qkv(),
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
plain
no mask
program(; sizes=0)
  %0 = score
  return %0""",
        )

    def test_learned_scale_of_each_head(self):
        def attention(q, k, v, t):
            return (q @ k.mT * t.view(H, 1, 1).exp()).softmax(-1) @ v

        self.golden(
            attention,
            [*qkv(), ones(H)],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
score function
no mask
program(float32[3]; sizes=0)
  %0 = score
  %1 = index h
  %2 = const 0
  %3 = load 0 %1 %2 %2
  %4 = mul %0 %3
  return %4""",
        )


class Causal(Golden):
    def test_slice_of_a_tril_buffer(self):
        def attention(q, k, v, tri):
            return (q @ k.mT).masked_fill(tri[:, :, :L, :L] == 0, -math.inf).softmax(-1) @ v

        self.golden(
            attention,
            [*qkv(), torch.ones(1, 1, 16, 16).tril()],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
mask
rest; replace -inf; skip above -inf
program(bool[4]; sizes=0)
  %0 = const 0
  %1 = index q
  %2 = index k
  %3 = load 0 %0 %0 %1 %2
  %4 = const -inf
  %5 = score
  %6 = not %3
  %7 = where %6 %5 %4
  return %7""",
        )

    def test_tril_made_in_place(self):
        def attention(q, k, v):
            tri = torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16)[:, :, :L, :L]
            return (q @ k.mT).masked_fill(tri == 0, -math.inf).softmax(-1) @ v

        self.golden(
            attention,
            qkv(),
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
causal
k-q <= 0; rows see a key; replace -inf; skip above -inf
program(; sizes=0)
  %0 = index k
  %1 = index q
  %2 = sub %0 %1
  %3 = const 0
  %4 = le %2 %3
  %5 = const -inf
  %6 = score
  %7 = where %4 %6 %5
  return %7""",
        )

    def test_comparison_of_positions(self):
        def attention(q, k, v):
            i = torch.arange(L)
            return (q @ k.mT).masked_fill(i[:, None] < i[None], -math.inf).softmax(-1) @ v

        self.golden(
            attention,
            qkv(),
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
causal
k-q <= 0; rows see a key; replace -inf; skip above -inf
program(; sizes=0)
  %0 = index q
  %1 = index k
  %2 = const -inf
  %3 = score
  %4 = ge %0 %1
  %5 = where %4 %3 %2
  return %5""",
        )

    def test_triu_of_minus_infinity_added(self):
        def attention(q, k, v):
            return (q @ k.mT + torch.full((L, L), -math.inf).triu(1)).softmax(-1) @ v

        self.golden(
            attention,
            qkv(),
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
causal
k-q <= 0; rows see a key; add -inf; skip above -inf
program(; sizes=0)
  %0 = score
  %1 = index k
  %2 = index q
  %3 = sub %1 %2
  %4 = const 1
  %5 = const -inf
  %6 = const 0.0
  %7 = lt %3 %4
  %8 = where %7 %6 %5
  %9 = add %0 %8
  return %9""",
        )

    def test_where(self):
        def attention(q, k, v):
            keep = torch.ones(L, L, dtype=torch.bool).tril()
            return torch.where(keep, q @ k.mT, torch.tensor(LOW)).softmax(-1) @ v

        self.golden(
            attention,
            qkv(),
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
causal
k-q <= 0; rows see a key; replace -3.40282e+38; skip above -1e+29
program(; sizes=0)
  %0 = index k
  %1 = index q
  %2 = sub %0 %1
  %3 = const 0
  %4 = le %2 %3
  %5 = score
  %6 = const -3.4028234663852886e+38
  %7 = where %4 %5 %6
  return %7""",
        )

    def test_fewer_queries_than_keys(self):
        def attention(q, k, v):
            i, j = torch.arange(3)[:, None] + L - 3, torch.arange(L)[None]
            return (q @ k.mT).masked_fill(j > i, -math.inf).softmax(-1) @ v

        self.golden(
            attention,
            qkv(3),
            """\
b 2, heads 2 of 2, q 3, k 6, d 4, dv 4
causal
k-q <= 3; rows see a key; replace -inf; skip above -inf
program(; sizes=0)
  %0 = index k
  %1 = index q
  %2 = const 6
  %3 = add %1 %2
  %4 = const 3
  %5 = sub %3 %4
  %6 = const -inf
  %7 = score
  %8 = le %0 %5
  %9 = where %8 %7 %6
  return %9""",
        )
