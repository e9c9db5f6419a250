"""Attention over tiles in plain ATen: any score program, any device, memory linear in the lengths (see ``attention``)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fa_inductor.kernel_support import output_layout, source_hash
from fa_inductor.refusal import Refusal, declare
from fa_inductor.request import AttentionRequest, Forward, Gradients, Inputs, Kernel, Needs, Plan

from .ops import tiled_backward, tiled_forward

DTYPE = declare("tiled_dtype", "The tiled kernel computes in fp32 and takes float32, bfloat16 and float16 inputs.")
DEVICE = declare("tiled_device", "The tiled kernel runs on any device but meta.")
Q_TILE, K_TILE, ELEMENTS = 128, 512, 1 << 18
"""On the CPU: a block of scores in the L2 cache."""
DEVICE_Q_TILE, DEVICE_K_TILE, DEVICE_ELEMENTS = 1024, 4096, 1 << 25
"""Elsewhere: few launches, each large enough to fill the device."""


class TiledKernel(Kernel):
    """Serves every program; chosen where no fused kernel can."""

    name = "tiled"

    def why_not(self, request: AttentionRequest) -> list[Refusal]:
        dtype = request.q.dtype
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return [Refusal(DTYPE, f"q, k and v are {str(dtype).removeprefix('torch.')}")]
        if request.device == "meta":
            return [Refusal(DEVICE, "the tensors have no data, and what the kernel does depends on it")]
        return []

    def plan(self, request: AttentionRequest) -> Plan:
        q_tile, k_tile, elements = (Q_TILE, K_TILE, ELEMENTS) if request.device == "cpu" else (DEVICE_Q_TILE, DEVICE_K_TILE, DEVICE_ELEMENTS)
        return Plan(
            kernel=self.name,
            program=request.program,
            facts=request.facts,
            post=request.post,
            config=(("by_bias", request.hides_by_bias), ("elements", elements), ("k_tile", k_tile), ("layout", output_layout(request.q)), ("q_tile", q_tile)),
            tf32=request.tf32,
            deterministic=request.deterministic,
            masked_rows=request.masked_rows,
            source_hash=source_hash(str(Path(__file__).parent)),
            reason=f"takes any score program in linear memory; {q_tile} x {k_tile} tiles",
        )

    def splits_lse(self, plan: Plan) -> bool:
        return True

    def forward(self, plan: Plan, inputs: Inputs) -> Forward:
        out, lse, low = tiled_forward(inputs.q, inputs.k, inputs.v, list(inputs.captures), list(inputs.sizes), inputs.dropout_p, inputs.seed, plan.to_text())
        return Forward(out, lse, (low, lse.new_empty(0)))

    def backward(self, plan: Plan, inputs: Inputs, result: Forward, grad_out: Tensor, needs: Needs, grad_lse: Tensor | None = None) -> Gradients:
        flags = [needs.q, needs.k, needs.v, *needs.captures]
        found = tiled_backward(
            inputs.q,
            inputs.k,
            inputs.v,
            list(inputs.captures),
            list(inputs.sizes),
            inputs.dropout_p,
            inputs.seed,
            result.out,
            result.lse,
            result.extra[0],
            grad_out,
            grad_lse,
            flags,
            plan.to_text(),
        )
        q, k, v, *captures = (t if need else None for t, need in zip(found, flags, strict=True))
        return Gradients(q, k, v, tuple(captures))


KERNEL = TiledKernel()
