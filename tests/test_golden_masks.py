"""Golden score programs: padding, windows and documents."""

from __future__ import annotations

import math

import torch
from golden import B, Golden, L, qkv

LOW = torch.finfo(torch.float32).min


def padding() -> torch.Tensor:
    return torch.ones(B, L, dtype=torch.bool)


class Padding(Golden):
    def test_keys(self):
        def attention(q, k, v, keep):
            return (q @ k.mT).masked_fill(~keep[:, None, None, :], -1e9).softmax(-1) @ v

        self.golden(
            attention,
            [*qkv(), padding()],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
key padding
key; replace -1e+09; skip above -9.99999e+08
program(bool[2]; sizes=0)
  %0 = index b
  %1 = index k
  %2 = load 0 %0 %1
  %3 = const -1000000000.0
  %4 = score
  %5 = where %2 %4 %3
  return %5""",
        )

    def test_one_minus_the_mask(self):
        def attention(q, k, v, keep):
            return (q @ k.mT + (1.0 - keep[:, None, None].float()) * LOW).softmax(-1) @ v

        self.golden(
            attention,
            [*qkv(), padding()],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
key padding
key; add -3.40282e+38; skip above -1e+29
program(bool[2]; sizes=0)
  %0 = score
  %1 = index b
  %2 = index k
  %3 = load 0 %1 %2
  %4 = const -3.4028234663852886e+38
  %5 = const 0.0
  %6 = where %3 %5 %4
  %7 = add %0 %6
  return %7""",
        )

    def test_lengths(self):
        def attention(q, k, v, n):
            hidden = torch.arange(L) >= n[:, None]
            return (q @ k.mT).masked_fill(hidden[:, None, None], -math.inf).softmax(-1) @ v

        self.golden(
            attention,
            [*qkv(), torch.full((B,), L)],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
key padding
key; replace -inf; skip above -inf
program(int64[1]; sizes=0)
  %0 = index k
  %1 = index b
  %2 = load 0 %1
  %3 = const -inf
  %4 = score
  %5 = lt %0 %2
  %6 = where %5 %4 %3
  return %6""",
        )

    def test_with_a_causal_mask(self):
        def attention(q, k, v, keep):
            i = torch.arange(L)
            keep = (i[None] <= i[:, None]) & keep[:, None, None, :]
            return torch.where(keep, q @ k.mT, LOW).softmax(-1) @ v

        self.golden(
            attention,
            [*qkv(), padding()],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
causal, key padding
k-q <= 0; key; replace -3.40282e+38; skip above -1e+29
program(bool[2]; sizes=0)
  %0 = index k
  %1 = index q
  %2 = le %0 %1
  %3 = index b
  %4 = load 0 %3 %0
  %5 = and %2 %4
  %6 = score
  %7 = const -3.4028234663852886e+38
  %8 = where %5 %6 %7
  return %8""",
        )


class Windows(Golden):
    def test_sliding(self):
        def attention(q, k, v):
            distance = torch.arange(L)[:, None] - torch.arange(L)[None]
            return (q @ k.mT).masked_fill((distance < 0) | (distance >= 3), -math.inf).softmax(-1) @ v

        self.golden(
            attention,
            qkv(),
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
causal, window
k-q <= 0; k-q >= -2; rows see a key; replace -inf; skip above -inf
program(; sizes=0)
  %0 = index q
  %1 = index k
  %2 = sub %0 %1
  %3 = const 0
  %4 = const 3
  %5 = const -inf
  %6 = score
  %7 = ge %2 %3
  %8 = lt %2 %4
  %9 = and %7 %8
  %10 = where %9 %6 %5
  return %10""",
        )

    def test_on_both_sides(self):
        def attention(q, k, v):
            keep = torch.ones(L, L, dtype=torch.bool).tril(2) & torch.ones(L, L, dtype=torch.bool).triu(-2)
            return (q @ k.mT).masked_fill(~keep, LOW).softmax(-1) @ v

        self.golden(
            attention,
            qkv(),
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
window
k-q <= 2; k-q >= -2; rows see a key; replace -3.40282e+38; skip above -1e+29
program(; sizes=0)
  %0 = index k
  %1 = index q
  %2 = sub %0 %1
  %3 = const 2
  %4 = le %2 %3
  %5 = const -2
  %6 = ge %2 %5
  %7 = and %4 %6
  %8 = const -3.4028234663852886e+38
  %9 = score
  %10 = where %7 %9 %8
  return %10""",
        )

    def test_documents(self):
        def attention(q, k, v, document):
            other = document[:, None, :, None] != document[:, None, None, :]
            return (q @ k.mT).masked_fill(other, -math.inf).softmax(-1) @ v

        self.golden(
            attention,
            [*qkv(), torch.ones(B, L, dtype=torch.long)],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
documents
rest; rows see a key; replace -inf; skip above -inf
program(int64[2]; sizes=0)
  %0 = index b
  %1 = index q
  %2 = load 0 %0 %1
  %3 = index k
  %4 = load 0 %0 %3
  %5 = const -inf
  %6 = score
  %7 = eq %2 %4
  %8 = where %7 %6 %5
  return %8""",
        )
