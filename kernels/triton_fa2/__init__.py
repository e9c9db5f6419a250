"""FlashAttention-2 in Triton for any score program: see README.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fa_inductor.kernel_support import source_hash
from fa_inductor.refusal import Refusal
from fa_inductor.request import AttentionRequest, Forward, Gradients, Inputs, Kernel, Needs, Plan, Size, TileLists

from . import support
from .config import choose
from .traits import Traits


class TritonFA2(Kernel):
    """See ``request.Kernel``."""

    name = "triton_fa2"

    def why_not(self, request: AttentionRequest) -> list[Refusal]:
        return support.why_not(request)

    def plan(self, request: AttentionRequest) -> Plan:
        config = choose(request)
        tile = dict(config)
        return Plan(
            kernel=self.name,
            program=request.program,
            facts=request.facts,
            post=request.post,
            config=config,
            tf32=request.tf32,
            deterministic=request.deterministic,
            masked_rows=request.masked_rows,
            source_hash=source_hash(str(Path(__file__).parent)),
            reason=f"Triton renders any score program; tiles of {tile['fwd_m']} x {tile['fwd_n']}, {tile['fwd_warps']} warps",
        )

    def tile_lists(self, plan: Plan, backward: bool) -> TileLists | None:
        from .tile_lists import asked

        return asked(plan, backward) if plan.get("lists") else None

    def find_tiles(self, text: str, captures: Sequence[Tensor], sizes: Sequence[Size], shape: Sequence[Size], device: torch.device) -> list[Tensor]:
        from .tile_lists import answer

        return answer(text, captures, sizes, shape, device)

    def splits_lse(self, plan: Plan) -> bool:
        return Traits(plan).split_lse

    def forward(self, plan: Plan, inputs: Inputs) -> Forward:
        from .forward import forward

        return forward(plan, inputs)

    def backward(self, plan: Plan, inputs: Inputs, result: Forward, grad_out: Tensor, needs: Needs, grad_lse: Tensor | None = None) -> Gradients:
        from .backward import backward

        return backward(plan, inputs, result, grad_out, grad_lse, needs)


KERNEL = TritonFA2()
