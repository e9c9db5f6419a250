"""Calls of ``scaled_dot_product_attention`` with a mask, written out so that they are lifted like code by hand.

    out = dropout(safe_softmax(scale Q K^T + mask)) V          safe_softmax: 0 where a row is -inf alone

With a mask PyTorch leaves its fast kernels: the mask is read from memory, and on the CPU a mask that is trained, or dropout, costs
every score. What is written out stands in for the call until it is fused; where it is not, the call is put back as it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from . import log
from .patterns.views import argument, name_of
from .refusal import declare
from .request import AttentionRequest, Plan
from .writer import Writer

LIBRARY = declare(
    "library_call",
    "nothing to do: PyTorch's own fused attention serves this call at least as well (seen in dumps alone: it is no softmax of the model's)",
)
aten = torch.ops.aten


@dataclass
class LibraryCall:
    """One call, which stays in the graph without users; ``output`` stands in for it."""

    call: fx.Node
    output: fx.Node
    softmax: fx.Node
    mask_trains: bool
    writer: Writer

    def gains(self, request: AttentionRequest, plan: Plan) -> bool:
        """Is ``plan`` better than the call? On the CPU PyTorch's kernel takes a mask, but neither its gradient nor dropout."""
        without_mask = plan.kernel == "torch_sdpa" and not plan.get("offset")
        if request.device == "cpu":
            return without_mask or (self.mask_trains and request.needs_grad) or request.dropout_p > 0
        return without_mask or plan.kernel == "triton_fa2"

    def settle(self, fused: bool) -> None:
        """Drop the call, or put it back and drop what stood in for it."""
        if fused:
            self.call.graph.erase_node(self.call)
            return
        self.output.replace_all_uses_with(self.call)
        self.writer.erase()


def write_out(gm: fx.GraphModule) -> dict[fx.Node, LibraryCall]:
    """Replace the calls that have a mask; by the softmax that stands for each."""
    calls = [n for n in gm.graph.nodes if name_of(n) == "scaled_dot_product_attention" and isinstance(argument(n, 3, "attn_mask"), fx.Node)]
    return {written.softmax: written for written in map(_guarded, calls) if written is not None}


def _guarded(call: fx.Node) -> LibraryCall | None:
    """A call that cannot be written out stays as it is."""
    writer = Writer(call)
    try:
        return _write_out(call, writer)
    except Exception as error:
        log.get().warning("a call of scaled_dot_product_attention stays as it is: %s", error, exc_info=True)
        writer.erase()
        return None


def _write_out(call: fx.Node, writer: Writer) -> LibraryCall | None:
    """``output`` keeps the call's own fake value: its dtype and strides are what the model sees. None where groups of heads are symbolic."""
    q, k, v = cast(tuple[fx.Node, fx.Node, fx.Node], call.args[:3])
    mask, p = argument(call, 3, "attn_mask"), argument(call, 4, "dropout_p", 0.0)
    scale, grouped = argument(call, 6, "scale"), argument(call, 7, "enable_gqa", False)
    if mask.meta["val"].dim() > q.meta["val"].dim():
        return None  # eager refuses it, and Inductor finds a meaning
    q, k, v = (writer.cast(x) for x in (q, k, v))
    if grouped:
        heads = q.meta["val"].shape[-3]
        groups = [heads // x.meta["val"].shape[-3] for x in (k, v)]
        if not all(isinstance(g, int) for g in groups):
            return None
        k, v = (writer.emit(aten.repeat_interleave.self_int, x, g, x.meta["val"].dim() - 3) for x, g in zip((k, v), groups))
    width = q.meta["val"].shape[-1]
    scores = writer.emit(aten.matmul.default, q, writer.emit(aten.transpose.int, k, -2, -1))
    scores = writer.emit(aten.mul.Tensor, scores, 1 / math.sqrt(width) if scale is None else scale)
    if mask.meta["val"].dtype == torch.bool:
        scores = writer.emit(aten.masked_fill.Scalar, scores, writer.emit(aten.logical_not.default, mask), -math.inf)
    else:
        scores = writer.emit(aten.add.Tensor, scores, writer.cast(mask))
    softmax = writer.emit(aten._safe_softmax.default, scores, -1)
    dropped = writer.emit(aten.dropout.default, softmax, p, True) if p > 0 else softmax
    output = writer.emit(aten.matmul.default, dropped, v)
    output.meta["val"] = call.meta["val"]
    trains = bool(mask.meta.get("requires_grad"))
    call.replace_all_uses_with(output)
    return LibraryCall(call, output, softmax, trains, writer)
