"""Golden score programs: what follows the softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from golden import B, Golden, H, L, ones, qkv


class Afterwards(Golden):
    def test_head_mask(self):
        def attention(q, k, v, mask):
            return ((q @ k.mT).softmax(-1) * mask[None, :, None, None]) @ v

        self.golden(
            attention,
            [*qkv(), ones(H)],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
plain
no mask
program(float32[1]; sizes=0)
  %0 = score
  return %0
after the softmax: program(float32[1]; sizes=0)
  %0 = index h
  %1 = load 0 %0
  return %1""",
        )

    def test_choice(self):
        def attention(q, k, v, hidden):
            return (q @ k.mT).softmax(-1).masked_fill(hidden[:, None, None], 0.0) @ v

        self.golden(
            attention,
            [*qkv(), torch.ones(B, L, dtype=torch.bool)],
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
plain
no mask
program(bool[2]; sizes=0)
  %0 = score
  return %0
after the softmax: program(bool[2]; sizes=0)
  %0 = const 0.0
  %1 = const 1.0
  %2 = index b
  %3 = index k
  %4 = load 0 %2 %3
  %5 = not %4
  %6 = where %5 %1 %0
  return %6""",
        )

    def test_dropout(self):
        def attention(q, k, v):
            return F.dropout((q @ k.mT).softmax(-1), 0.25, training=True) @ v

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
dropout 0.25""",
        )

    def test_probabilities_that_are_returned(self):
        def attention(q, k, v):
            p = (q @ k.mT).softmax(-1)
            return p @ v, p

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
the probabilities escape""",
        )
