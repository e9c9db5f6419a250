"""Golden score programs: functions of the score, other spellings and longer sums of the softmax."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from golden import B, Golden, H, L, ones, qkv


class Functions(Golden):
    def test_cosine_with_a_temperature(self):
        """Swin v2: at most 100."""

        def attention(q, k, v, t):
            s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
            return (s * t.clamp(max=math.log(100)).exp()).softmax(-1) @ v

        self.golden(
            attention,
            [*qkv(), ones(H, 1, 1)],
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

    def test_soft_cap(self):
        """Gemma 2."""

        def attention(q, k, v):
            return (50.0 * torch.tanh(q @ k.mT * 0.5 / 50.0)).softmax(-1) @ v

        self.golden(
            attention,
            qkv(),
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
soft-cap 50
no mask
program(; sizes=0)
  %0 = const 50.0
  %1 = score
  %2 = const 0.5
  %3 = mul %1 %2
  %4 = div %3 %0
  %5 = tanh %4
  %6 = mul %5 %0
  return %6""",
        )

    def test_clamp(self):
        def attention(q, k, v):
            return (q @ k.mT).clamp(-50, 50).softmax(-1) @ v

        self.golden(
            attention,
            qkv(),
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
score function
no mask
program(; sizes=0)
  %0 = score
  %1 = const -50.0
  %2 = max first %0 %1
  %3 = const 50.0
  %4 = min first %2 %3
  return %4""",
        )

    def test_nan_to_num(self):
        def attention(q, k, v):
            return torch.nan_to_num(q @ k.mT).softmax(-1) @ v

        self.golden(
            attention,
            qkv(),
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
score function
no mask
program(; sizes=0)
  %0 = score
  %1 = const -inf
  %2 = eq %0 %1
  %3 = const -3.4028234663852886e+38
  %4 = not %2
  %5 = where %4 %0 %3
  %6 = const inf
  %7 = eq %0 %6
  %8 = const 3.4028234663852886e+38
  %9 = not %7
  %10 = where %9 %5 %8
  %11 = ne %0 %0
  %12 = const 0.0
  %13 = not %11
  %14 = where %13 %10 %12
  return %14""",
        )

    def test_rounded_to_half_precision(self):
        def attention(q, k, v):
            return (q @ k.mT).float().softmax(-1).to(q.dtype) @ v

        self.golden(
            attention,
            [x.bfloat16() for x in qkv()],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
plain
no mask
program(; sizes=0)
  %0 = score
  return %0""",
        )


class Softmaxes(Golden):
    def test_by_hand(self):
        def attention(q, k, v):
            s = q @ k.mT
            e = torch.exp(s - s.amax(-1, keepdim=True))
            return (e / e.sum(-1, keepdim=True)) @ v

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

    def test_powers_of_two(self):
        def attention(q, k, v):
            e = torch.exp2(q @ k.mT)
            return (e / e.sum(-1, keepdim=True)) @ v

        self.golden(
            attention,
            qkv(),
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
plain
no mask
program(; sizes=0)
  %0 = score
  %1 = const 0.6931471805599453
  %2 = mul %0 %1
  return %2""",
        )

    def test_sinks(self):
        """gpt-oss: one learned column of each head is joined to the scores and cut off."""

        def attention(q, k, v, sinks):
            s = torch.cat([q @ k.mT * 0.5, sinks.view(1, H, 1, 1).expand(B, H, L, 1)], -1)
            return s.softmax(-1)[..., :-1] @ v

        self.golden(
            attention,
            [*qkv(), ones(H)],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
plain
no mask
program(; sizes=0)
  %0 = score
  %1 = const 0.5
  %2 = mul %0 %1
  return %2
1 more columns: program(float32[1]; sizes=0)
  %0 = index h
  %1 = load 0 %0
  return %1""",
        )

    def test_softmax_plus_one(self):
        def attention(q, k, v):
            e = torch.exp(q @ k.mT)
            return (e / (1 + e.sum(-1, keepdim=True))) @ v

        self.golden(
            attention,
            qkv(),
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
plain
no mask
program(; sizes=0)
  %0 = score
  return %0
1 more columns: program(; sizes=0)
  %0 = const 0.0
  return %0""",
        )

    def test_difference_of_two(self):
        """Differential attention: one of two maps that share the values is subtracted; both are heads of one softmax."""

        def attention(q, k, v, weight):
            p = (q @ k.mT).softmax(-1).view(B, H // 2, 2, L, L)
            return (p[:, :, 0] - weight * p[:, :, 1]) @ v[:, : H // 2]

        self.golden(
            attention,
            [*qkv(), ones(1)],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
plain
no mask
program(; sizes=0)
  %0 = score
  return %0""",
        )

    def test_difference_of_two_products(self):
        def attention(q, k, v, weight):
            (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
            return (q1 @ k1.mT).softmax(-1) @ v - weight * ((q2 @ k2.mT).softmax(-1) @ v)

        self.golden(
            attention,
            [*qkv(), ones(1)],
            """\
b 2, heads 2 of 2, q 6, k 6, d 2, dv 4
plain
no mask
program(; sizes=0)
  %0 = score
  return %0

b 2, heads 2 of 2, q 6, k 6, d 2, dv 4
plain
no mask
program(; sizes=0)
  %0 = score
  return %0""",
        )
