"""Golden score programs: tensors that are added to the scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from golden import B, D, Golden, H, L, ones, qkv


class Tensors(Golden):
    def test_two_biases_scaled_with_the_scores(self):
        def attention(q, k, v, row, pair):
            return ((q @ k.mT + row + pair) * 0.5).softmax(-1) @ v

        self.golden(
            attention,
            [*qkv(), ones(B, 1, 1, L), ones(H, L, L)],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
score function
no mask
program(float32[4], float32[3]; sizes=0)
  %0 = score
  %1 = index b
  %2 = const 0
  %3 = index k
  %4 = load 0 %1 %2 %2 %3
  %5 = add %0 %4
  %6 = index h
  %7 = index q
  %8 = load 1 %6 %7 %3
  %9 = add %5 %8
  %10 = const 0.5
  %11 = mul %9 %10
  return %11""",
        )

    def test_windows_of_an_image(self):
        """Swin: a bias of each head, read from a table, and a mask of each window; the batch is images x windows."""

        def attention(q, k, v, table, place, mask):
            s = q @ k.mT + table[place.view(-1)].view(L, L, H).permute(2, 0, 1)
            s = (s.view(B, 2, H, L, L) + mask[None, :, None]).view(-1, H, L, L)
            return s.softmax(-1) @ v

        inputs = [ones(2 * B, H, L, D) for _ in range(3)]
        self.golden(
            attention,
            [*inputs, ones(9, H), torch.ones(L, L, dtype=torch.long), ones(2, L, L)],
            """\
b 4, heads 2 of 2, q 6, k 6, d 4, dv 4
bias, bias
no mask
program(float32[3], float32[3]; sizes=0)
  %0 = score
  %1 = index q
  %2 = index k
  %3 = index h
  %4 = load 0 %3 %1 %2
  %5 = add %0 %4
  %6 = index b
  %7 = const 2
  %8 = mod %6 %7
  %9 = load 1 %8 %1 %2
  %10 = add %5 %9
  return %10""",
        )

    def test_evoformer(self):
        """Five dimensions: a mask of each row and a bias of each pair."""

        def attention(q, k, v, keep, pair):
            q, k, v = (x.transpose(-2, -3) for x in (q * D**-0.5, k, v))
            s = q @ k.mT + 1e9 * (keep[:, :, None, None] - 1) + pair[:, None]
            return (s.softmax(-1) @ v).transpose(-2, -3)

        inputs = [ones(B, 3, L, H, D) for _ in range(3)]
        self.golden(
            attention,
            [*inputs, ones(B, 3, L), ones(B, H, L, L)],
            """\
b 6, heads 2 of 2, q 6, k 6, d 4, dv 4
bias, bias
no mask
program(float32[3], float32[4]; sizes=0)
  %0 = score
  %1 = index b
  %2 = const 3
  %3 = floordiv %1 %2
  %4 = mod %1 %2
  %5 = index k
  %6 = load 0 %3 %4 %5
  %7 = const 1.0
  %8 = sub %6 %7
  %9 = const 1000000000.0
  %10 = mul %8 %9
  %11 = add %0 %10
  %12 = index h
  %13 = index q
  %14 = load 1 %3 %12 %13 %5
  %15 = add %11 %14
  return %15""",
        )

    def test_library_call_with_a_mask(self):
        def attention(q, k, v, bias):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.5)

        self.golden(
            attention,
            [*qkv(), ones(H, L, L)],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
bias
no mask
program(float32[3]; sizes=0)
  %0 = score
  %1 = const 0.5
  %2 = mul %0 %1
  %3 = index h
  %4 = index q
  %5 = index k
  %6 = load 0 %3 %4 %5
  %7 = add %2 %6
  return %7""",
        )

    def test_library_call_with_a_choice(self):
        def attention(q, k, v, keep):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None])

        self.golden(
            attention,
            [*qkv(), torch.ones(B, L, dtype=torch.bool)],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
key padding
key; replace -inf; skip above -inf
program(bool[2]; sizes=0)
  %0 = index b
  %1 = index k
  %2 = load 0 %0 %1
  %3 = const -inf
  %4 = score
  %5 = const 0.5
  %6 = mul %4 %5
  %7 = where %2 %6 %3
  return %7""",
        )
