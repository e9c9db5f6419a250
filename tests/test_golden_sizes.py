"""Golden score programs: heads, sizes and orders of dimensions; and what is not the attention of one query over keys."""

from __future__ import annotations

import math

import torch
from golden import B, D, Golden, H, L, ones, qkv


class Heads(Golden):
    def test_grouped_queries(self):
        """Llama: two key heads are repeated for six query heads."""

        def attention(q, k, v):
            k, v = (x[:, :, None].expand(B, 2, 3, L, D).reshape(B, 6, L, D) for x in (k, v))
            return (q @ k.mT * 0.5).softmax(-1) @ v

        self.golden(
            attention,
            [ones(B, 6, L, D), ones(B, 2, L, D), ones(B, 2, L, D)],
            """\
b 2, heads 6 of 2, q 6, k 6, d 4, dv 4
plain
no mask
program(; sizes=0)
  %0 = score
  %1 = const 0.5
  %2 = mul %0 %1
  return %2""",
        )

    def test_one_key_head_in_einsum(self):
        def attention(q, k, v):
            return torch.einsum("bhij,bjd->bihd", torch.einsum("bihd,bjd->bhij", q, k).softmax(-1), v)

        self.golden(
            attention,
            [ones(B, L, H, D), ones(B, L, D), ones(B, L, D)],
            """\
b 2, heads 2 of 1, q 6, k 6, d 4, dv 4
plain
no mask
program(; sizes=0)
  %0 = score
  return %0""",
        )

    def test_latent_keys_with_narrower_values(self):
        """DeepSeek's MLA: keys are a part of each head and a rotated part that heads share; values are narrower."""

        def attention(q, k, shared, v):
            k = torch.cat([k, shared.expand(-1, H, -1, -1)], -1)
            return (q @ k.mT * 6**-0.5).softmax(-1) @ v

        self.golden(
            attention,
            [ones(B, H, L, 6), ones(B, H, L, 4), ones(B, 1, L, 2), ones(B, H, L, 3)],
            """\
b 2, heads 2 of 2, q 6, k 6, d 6, dv 3
plain
no mask
program(; sizes=0)
  %0 = score
  %1 = const 0.408248290463863
  %2 = mul %0 %1
  return %2""",
        )

    def test_packed(self):
        def attention(x):
            q, k, v = x.view(B, L, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
            return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(B, L, H * D)

        self.golden(
            attention,
            [ones(B, L, 3 * H * D)],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
plain
no mask
program(; sizes=0)
  %0 = score
  return %0""",
        )

    def test_batch_and_heads_in_one_dimension(self):
        def attention(q, k, v, mask):
            s = torch.bmm(q, k.transpose(1, 2)).view(B, H, L, L) + mask
            return torch.bmm(s.view(B * H, L, L).softmax(-1), v)

        self.golden(
            attention,
            [*(ones(B * H, L, D) for _ in range(3)), ones(B, 1, 1, L)],
            """\
b 1, heads 4 of 4, q 6, k 6, d 4, dv 4
bias
no mask
program(float32[4]; sizes=0)
  %0 = score
  %1 = index h
  %2 = const 2
  %3 = floordiv %1 %2
  %4 = const 0
  %5 = index k
  %6 = load 0 %3 %4 %4 %5
  %7 = add %0 %6
  return %7""",
        )


class Lengths(Golden):
    def test_one_query(self):
        """A step of decoding over a cache that is not full."""

        def attention(q, k, v, position):
            hidden = torch.arange(L) > position
            return (q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1) @ v

        self.golden(
            attention,
            [ones(B, H, 1, D), ones(B, H, L, D), ones(B, H, L, D), torch.tensor(3)],
            """\
b 2, heads 2 of 2, q 1, k 6, d 4, dv 4
key padding
key; replace -inf; skip above -inf
program(int64[0]; sizes=0)
  %0 = index k
  %1 = load 0
  %2 = const -inf
  %3 = score
  %4 = le %0 %1
  %5 = where %4 %3 %2
  return %5""",
        )

    def test_without_a_query_dimension(self):
        def attention(q, k, v):
            return torch.einsum("bhk,bhkd->bhd", torch.einsum("bhd,bhkd->bhk", q, k).softmax(-1), v)

        self.golden(
            attention,
            [ones(B, H, D), ones(B, H, L, D), ones(B, H, L, D)],
            """\
b 2, heads 2 of 2, q 1, k 6, d 4, dv 4
plain
no mask
program(; sizes=0)
  %0 = score
  return %0""",
        )

    def test_two_dimensions(self):
        def attention(q, k, v):
            return (q @ k.T).softmax(-1) @ v

        self.golden(
            attention,
            [ones(5, D), ones(L, D), ones(L, D)],
            """\
b 1, heads 1 of 1, q 5, k 6, d 4, dv 4
plain
no mask
program(; sizes=0)
  %0 = score
  return %0""",
        )


class Axes(Golden):
    def test_keys_first(self):
        """The softmax runs over the rows of K Q^T, which are the keys."""

        def attention(q, k, v):
            return (k @ q.mT).softmax(-2).mT @ v

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

    def test_over_queries_is_refused(self):
        def attention(q, k, v):
            return (q @ k.mT).softmax(-2) @ v

        self.golden(attention, qkv(), """refused: softmax_axis: the softmax runs over dimension 2 of (2, 2, 6, 6), the matmul sums over another""")

    def test_over_heads_is_refused(self):
        def attention(q, k, v):
            return (q @ k.mT).softmax(1) @ v

        self.golden(attention, qkv(), """refused: softmax_axis: the softmax runs over dimension 1 of (2, 2, 6, 6), the matmul sums over another""")

    def test_talking_heads_are_refused(self):
        def attention(q, k, v, before, after):
            s = torch.einsum("bhij,hg->bgij", q @ k.mT, before)
            return torch.einsum("bhij,hg->bgij", s.softmax(-1), after) @ v

        self.golden(
            attention,
            [*qkv(), ones(H, H), ones(H, H)],
            """refused: softmax_axis: the softmax runs over dimension 3 of (2, 2, 6, 6), the matmul sums over another""",
        )

    def test_talking_heads_before_the_softmax_are_refused(self):
        def attention(q, k, v, before):
            return torch.einsum("bhij,hg->bgij", q @ k.mT, before).softmax(-1) @ v

        self.golden(
            attention,
            [*qkv(), ones(H, H)],
            """refused: not_query_times_key: the keys of the score matmul depend on the query's position (scores mixed across heads?)""",
        )
