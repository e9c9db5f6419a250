"""Dropout without a stored mask: whether a probability, or a score, is kept is a hash of (seed, b, h, q, k).

A position's 32 random bits are ``mix(row_key + column_key)`` (mod 2^32), where the keys are 64-bit mixes of the seed with the row
number and with the column number, and ``mix`` is two rounds of xor-shift and odd multiplication. The mask is a function of the
position alone, so forward and backward may tile differently. Mixing: splitmix64's finaliser (Steele, Lea, Flood, 2014) for the
keys; multipliers for 32 bits found by C. Wellons' hash prospector.
"""

from __future__ import annotations

import torch
from torch import Tensor

Range = tuple[int, int]


def _signed(value: int, bits: int) -> int:
    """The two's-complement reading of ``value`` modulo 2^bits."""
    value %= 2**bits
    return value - 2**bits if value >= 2 ** (bits - 1) else value


_A, _B, _STEP = _signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64), _signed(0x9E3779B97F4A7C15, 64)
_C, _D = 0x7FEB352D, _signed(0x846CA68B, 32)


def _mix64(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 (logical shifts)."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _A
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _B
    return x ^ ((x >> 31) & (2**33 - 1))


class Dropout:
    """A mask of one call, which has ``heads`` and ``lq``. That of the ``scores`` is independent of the probabilities' for the same seed."""

    def __init__(self, seed: Tensor, p: float, heads: int, lq: int, scores: bool = False) -> None:
        first, second = seed.tolist()
        self.device = seed.device
        self.heads, self.lq, self.p = heads, lq, p
        self.scale = 1 / (1 - p) if p < 1 else 0.0
        base = torch.tensor([first, second], dtype=torch.int64, device=self.device)
        mixed = _mix64(base * _STEP + torch.tensor([3, 4] if scores else [1, 2], device=self.device))
        self.row_seed, self.column_seed = _mix64(mixed[0] ^ (mixed[1] * _A)), _mix64(mixed[1] + mixed[0] * _B)
        # kept where the bits, read as a signed number, are at least this: probability 1 - p to 2^-32
        self.threshold = min(round(p * 2**32), 2**32) - 2**31

    def keep_bits(self, batches: Range, heads: Range, rows: Range, keys: Range, out: Tensor, scratch: Tensor) -> Tensor:
        """-1 where kept and 0 where dropped, as int32 (batches, heads, rows, keys) in ``out``; overwrites ``scratch``."""
        b, h, q = (torch.arange(*r, device=self.device) for r in (batches, heads, rows))
        number = (b.view(-1, 1, 1, 1) * self.heads + h.view(1, -1, 1, 1)) * self.lq + q.view(1, 1, -1, 1)
        row_key = _mix64(number * _STEP + self.row_seed).to(torch.int32)
        column_key = _mix64(torch.arange(*keys, device=self.device) * _STEP + self.column_seed).to(torch.int32)
        if self.threshold >= 2**31:
            return out.zero_()
        torch.add(row_key, column_key, out=out)
        for shift, factor in ((16, _C), (15, _D)):
            torch.bitwise_right_shift(out, shift, out=scratch)
            out.bitwise_xor_(scratch.bitwise_and_(2 ** (32 - shift) - 1)).mul_(factor)
        return out.ge_(self.threshold).neg_()
