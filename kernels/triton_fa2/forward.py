"""Launch of the forward kernel."""

from __future__ import annotations

import torch

from fa_inductor.request import Forward, Inputs, Plan

from .codegen import forward_kernel, traits_of
from .launch import common_arguments, empty_like_order, launch, tensor_arguments, tiles
from .tile_lists import lists_for


def forward(plan: Plan, inputs: Inputs) -> Forward:
    traits = traits_of(plan)
    q, k, v = inputs.q, inputs.k, inputs.v
    batch, heads, length, _ = q.shape
    out = empty_like_order(q, (batch, heads, length, v.shape[3]))
    lse = torch.empty((batch, heads, length), dtype=torch.float32, device=q.device)
    low = torch.empty((batch, heads, length) if traits.split_lse else (0,), dtype=torch.float32, device=q.device)
    arguments = tensor_arguments({"Q": q, "K": k, "V": v, "O": out}) | {"LSE": lse}
    if traits.split_lse:
        arguments["LSE_LOW"] = low
    exact = empty_like_order(q, out.shape if traits.exact_delta else (0, 0, 0, 0), torch.float32)
    if traits.exact_delta:
        arguments |= tensor_arguments({"O32": exact})
    if traits.lists:
        arguments["WALK"] = lists_for(plan, inputs, ("fwd",))["fwd"]
    size = int(plan.get("fwd_m"))
    launch(
        forward_kernel(plan),
        tiles(length, size) * batch * heads,
        arguments | common_arguments(traits, inputs),
        BLOCK_M=size,
        BLOCK_N=plan.get("fwd_n"),
        num_warps=plan.get("fwd_warps"),
        num_stages=plan.get("fwd_stages"),
    )
    return Forward(out, lse, (low, exact))
