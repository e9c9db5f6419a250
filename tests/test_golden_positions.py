"""Golden score programs: relative positions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from golden import B, D, Golden, H, L, ones, qkv


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Column j of row i moves to L - 1 - i + j: padded by a column, cut up anew, its first row dropped."""
    b, h, q, k = x.shape
    return F.pad(x, (1, 0)).view(b, h, k + 1, q)[:, :, 1:].reshape(b, h, q, k)


class Positions(Golden):
    def test_alibi(self):
        def attention(q, k, v, slopes):
            i = torch.arange(L)
            return (q @ k.mT - slopes[:, None, None] * (i[:, None] - i[None]).abs()).softmax(-1) @ v

        self.golden(
            attention,
            [*qkv(), ones(H)],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
score function
no mask
program(float32[1]; sizes=0)
  %0 = score
  %1 = index h
  %2 = load 0 %1
  %3 = index q
  %4 = index k
  %5 = sub %3 %4
  %6 = abs %5
  %7 = to_float %6
  %8 = mul %2 %7
  %9 = sub %0 %8
  return %9""",
        )

    def test_table_of_distances(self):
        def attention(q, k, v, table):
            i = torch.arange(L)
            return (q @ k.mT + table[i[:, None] - i[None] + L - 1].permute(2, 0, 1)).softmax(-1) @ v

        self.golden(
            attention,
            [*qkv(), ones(2 * L - 1, H)],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
bias
no mask
program(float32[3]; sizes=0)
  %0 = score
  %1 = index q
  %2 = index k
  %3 = index h
  %4 = load 0 %3 %1 %2
  %5 = add %0 %4
  return %5""",
        )

    def test_table_of_distances_that_is_large_enough_to_be_read_in_the_kernel(self):
        def attention(q, k, v, table):
            i = torch.arange(q.shape[2])
            distance = (i[None] - i[:, None]).clamp(-16, 16) + 16
            return (q @ k.mT + F.embedding(distance, table).permute(2, 0, 1)).softmax(-1) @ v

        self.golden(
            attention,
            [ones(1, 4, 512, D), ones(1, 4, 512, D), ones(1, 4, 512, D), ones(33, 4)],
            """\
b 1, heads 4 of 4, q 512, k 512, d 4, dv 4
bias
no mask
program(float32[2]; sizes=0)
  %0 = score
  %1 = index k
  %2 = index q
  %3 = sub %1 %2
  %4 = const -16
  %5 = max first %3 %4
  %6 = const 16
  %7 = min first %5 %6
  %8 = add %7 %6
  %9 = index h
  %10 = load 0 %8 %9
  %11 = add %0 %10
  return %11""",
        )

    def test_logarithmic_buckets(self):
        """T5: near distances have a bucket each, far ones share one by the logarithm, which is not recomputed in a kernel."""

        def attention(q, k, v, table):
            i = torch.arange(q.shape[2])
            back = (i[:, None] - i[None]).clamp(min=0)
            far = 8 + (torch.log(back.clamp(min=1) / 8) / math.log(16) * 8).long()
            bucket = torch.where(back < 8, back, far.clamp(max=15))
            return (q @ k.mT + table[bucket].permute(2, 0, 1)).softmax(-1) @ v

        self.golden(
            attention,
            [ones(1, 4, 512, D), ones(1, 4, 512, D), ones(1, 4, 512, D), ones(16, 4)],
            """\
b 1, heads 4 of 4, q 512, k 512, d 4, dv 4
bias
no mask
program(int8[2], float32[2]; sizes=0)
  %0 = score
  %1 = index q
  %2 = index k
  %3 = load 0 %1 %2
  %4 = const 16
  %5 = add %3 %4
  %6 = const 0
  %7 = lt %3 %6
  %8 = where %7 %5 %3
  %9 = index h
  %10 = load 1 %8 %9
  %11 = add %0 %10
  return %11""",
        )


class Products(Golden):
    """Scores of the positions that are products themselves stay in memory; they are read at the score's place."""

    def test_relative_shift(self):
        """Transformer-XL, XLNet: content and position have biases of their own."""

        def attention(q, k, v, r, u, w):
            content = (q + u[:, None]) @ k.mT
            return ((content + shifted((q + w[:, None]) @ r.mT)) / math.sqrt(D)).softmax(-1) @ v

        self.golden(
            attention,
            [*qkv(), ones(H, L, D), ones(H, D), ones(H, D)],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
score function
no mask
program(float32[4]; sizes=0)
  %0 = score
  %1 = index b
  %2 = index h
  %3 = const 6
  %4 = index q
  %5 = mul %4 %3
  %6 = index k
  %7 = add %5 %3
  %8 = add %7 %6
  %9 = const 7
  %10 = floordiv %8 %9
  %11 = mod %8 %9
  %12 = load 0 %1 %2 %10 %11
  %13 = add %0 %12
  %14 = const 0.5
  %15 = mul %13 %14
  return %15""",
        )

    def test_decomposed_positions_of_an_image(self):
        """SAM: keys are at (row, column), and each has a product of the query with a table."""

        def attention(q, k, v, rows, columns):
            image = q.view(B, 2, 3, D)
            by_row = torch.einsum("bhwc,hkc->bhwk", image, rows)
            by_column = torch.einsum("bhwc,wkc->bhwk", image, columns)
            s = (q * 0.5) @ k.transpose(-2, -1)
            s = (s.view(B, 2, 3, 2, 3) + by_row[..., None] + by_column[..., None, :]).view(B, 6, 6)
            return s.softmax(-1) @ v

        self.golden(
            attention,
            [*(ones(B, 6, D) for _ in range(3)), ones(2, 2, D), ones(3, 3, D)],
            """\
b 1, heads 2 of 2, q 6, k 6, d 4, dv 4
bias, bias
no mask
program(float32[4], float32[4]; sizes=0)
  %0 = score
  %1 = index h
  %2 = index q
  %3 = const 3
  %4 = floordiv %2 %3
  %5 = mod %2 %3
  %6 = index k
  %7 = floordiv %6 %3
  %8 = load 0 %1 %4 %5 %7
  %9 = add %0 %8
  %10 = mod %6 %3
  %11 = load 1 %1 %4 %5 %10
  %12 = add %9 %11
  return %12""",
        )

    def test_disentangled(self):
        """DeBERTa: content to position and position to content, both gathered by distance."""

        def attention(q, k, v, position_key, position_query):
            i = torch.arange(L)
            place = (i[:, None] - i[None] + L).clamp(0, 2 * L - 1).expand(B, H, L, L)
            c2p = torch.gather(q @ position_key.mT, -1, place)
            p2c = torch.gather(k @ position_query.mT, -1, place).mT
            return ((q @ k.mT + c2p + p2c) / math.sqrt(3 * D)).softmax(-1) @ v

        self.golden(
            attention,
            [*qkv(), ones(H, 2 * L, D), ones(H, 2 * L, D)],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
score function
no mask
program(float32[4], float32[4]; sizes=0)
  %0 = const 3.4641016151377544
  %1 = score
  %2 = index b
  %3 = index h
  %4 = index q
  %5 = index k
  %6 = load 0 %2 %3 %4 %5
  %7 = add %1 %6
  %8 = load 1 %2 %3 %5 %4
  %9 = add %7 %8
  %10 = div %9 %0
  return %10""",
        )
