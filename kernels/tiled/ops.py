"""The kernel as two opaque operators: its loops run in Python over the real sizes, which a trace with symbolic sizes cannot follow.

They ask the device for facts about the data (rows without a visible key), so Inductor must keep them out of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fa_inductor.kernel_support import empty_output, without_autocast
from fa_inductor.request import Plan

from .attention import Attention, Compiled, compile_plan


@lru_cache(maxsize=256)
def compiled(plan: str) -> Compiled:
    return compile_plan(Plan.from_text(plan))


@torch.library.custom_op("fa_inductor::tiled_forward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], sizes: Sequence[int], dropout_p: float, seed: Tensor | None, plan: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, high part of lse, low part of lse)."""
    with torch.no_grad(), without_autocast(q.device.type):
        return Attention(compiled(plan), q, k, v, captures, sizes, dropout_p, seed).forward()


@tiled_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], sizes: Sequence[int], dropout_p: float, seed: Tensor | None, plan: str
) -> tuple[Tensor, Tensor, Tensor]:
    out = empty_output(q, v.shape[3], str(Plan.from_text(plan).get("layout")))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("fa_inductor::tiled_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def tiled_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    dropout_p: float,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Sequence[bool],
    plan: str,
) -> list[Tensor]:
    """Gradients of q, k, v and the captures: empty tensors where ``needs`` says no."""
    with torch.no_grad(), without_autocast(q.device.type):
        return Attention(compiled(plan), q, k, v, captures, sizes, dropout_p, seed).backward(out, lse, lse_low, grad_out, grad_lse, needs)


@tiled_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    dropout_p: float,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Sequence[bool],
    plan: str,
) -> list[Tensor]:
    layout = str(Plan.from_text(plan).get("layout"))
    fused = [empty_output(t, t.shape[-1], layout) if need else t.new_empty(0) for t, need in zip((q, k, v), needs, strict=False)]
    rest = [torch.empty(c.shape, dtype=c.dtype, device=c.device) if need else c.new_empty(0) for c, need in zip(captures, needs[3:], strict=True)]
    return [*fused, *rest]
