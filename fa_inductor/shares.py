"""Which share of each row's probability the parts of a softmax have, given the log of the sum of each part's exponentials.

    share_i = exp(lse_i) / sum_j exp(lse_j)        O = sum_i share_i O_i

Each lse comes in two parts, ``high + low``: under a fill of -1e9 or finfo.min the first alone would lose the log of the number of keys, and
a row whose keys are all hidden by such a fill is an average over all of them. A part that is hidden by -inf has no share; a row where all
are is NaN, as it is without parts. Gradients reach ``high`` alone; they keep their digits where a share is small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def shares(high: Sequence[Tensor], low: Sequence[Tensor | None], scores: Sequence[Tensor], zero_rows: bool = False) -> Tensor:
    """(parts + columns, …): the shares of parts with these lse, then of single scores.

    Args:
        high, low: of each part's lse, fp32, one for each row; None for zeros.
        scores: (columns, …) or broadcastable to it.
        zero_rows: no part of a row that is hidden by -inf alone has a share, without NaN.
    """
    rows = high[0].shape
    singles = [s.expand(s.shape[0], *rows) for s in scores]
    parts = torch.cat([*(h.unsqueeze(0) for h in high), *singles])
    top = parts.amax(0).clamp(min=torch.finfo(torch.float32).min).detach()
    rest = [torch.zeros_like(high[0]) if x is None else x for x in low]
    above = parts - top
    if any(x is not None for x in low):
        above = above + torch.cat([*(r.unsqueeze(0) for r in rest), *(torch.zeros_like(s) for s in singles)])
    if not zero_rows:
        return above.softmax(0)
    hidden = (parts == -math.inf).all(0)
    return torch.where(hidden, 0.0, torch.where(hidden, 0.0, above).softmax(0))


def weighted(out: Tensor, found: Tensor, part: int) -> Tensor:
    """``out``, (…, D), times the share of one part; fp32."""
    return out * found[part].unsqueeze(-1)
