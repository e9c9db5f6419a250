"""PyTorch's fused attention kernels, called as the backend operators themselves, where they express the program exactly.

``O = softmax(scale Q K^T + M) V`` with M causal, or (on the CPU, forward only) a small additive mask. The operators return
the logsumexp and have explicit backward operators, so AOTAutograd traces both directions as ordinary ATen calls.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fa_inductor.kernel_support import output_layout, source_hash, without_autocast
from fa_inductor.program import Coordinates, ScoreProgram, evaluate
from fa_inductor.program.affine import affine_form
from fa_inductor.refusal import Refusal
from fa_inductor.request import AttentionRequest, Forward, Gradients, Inputs, Kernel, Needs, Plan

from .support import choose, express, minus_infinity_possible

aten = torch.ops.aten


class TorchSdpaKernel(Kernel):
    """CPU flash attention, cuDNN and FlashAttention-2 as PyTorch ships them."""

    name = "torch_sdpa"

    def why_not(self, request: AttentionRequest) -> list[Refusal]:
        return choose(request)[1]

    def plan(self, request: AttentionRequest) -> Plan:
        backend, _ = choose(request)
        form = express(request)
        assert backend and not isinstance(form, Refusal), "plan() is for requests without a refusal"
        return Plan(
            kernel=self.name,
            program=request.program,
            facts=request.facts,
            config=(
                ("backend", backend),
                ("causal", form.causal),
                ("layout", output_layout(request.q)),
                ("offset", form.offset is not None),
                ("scale", repr(form.scale)),
            ),
            deterministic=request.deterministic,
            masked_rows=request.masked_rows,
            source_hash=source_hash(str(Path(__file__).parent)),
            reason=f"PyTorch's {backend} attention expresses this program exactly",
        )

    def splits_lse(self, plan: Plan) -> bool:
        return False

    def forward(self, plan: Plan, inputs: Inputs) -> Forward:
        with without_autocast(inputs.q.device.type):
            return _FORWARD[str(plan.get("backend"))](plan, inputs, float(str(plan.get("scale"))), bool(plan.get("causal")))

    def backward(self, plan: Plan, inputs: Inputs, result: Forward, grad_out: Tensor, needs: Needs, grad_lse: Tensor | None = None) -> Gradients:
        assert grad_lse is None, "sites whose lse is used are not served"
        assert not plan.get("offset"), "sites with a mask or bias are served without gradients only"
        # the operators take a gradient with a last stride of 1; cuDNN's gave wrong gradients where its layout was not the output's (H200, torch 2.11)
        grad_out = grad_out.transpose(1, 2).contiguous().transpose(1, 2) if plan.get("layout") == "blhd" else grad_out.contiguous()
        with without_autocast(inputs.q.device.type):
            found = _BACKWARD[str(plan.get("backend"))](inputs, result, grad_out, float(str(plan.get("scale"))), bool(plan.get("causal")))
        q, k, v = (t if need else None for t, need in zip(found, (needs.q, needs.k, needs.v), strict=True))
        return Gradients(q, k, v, (None,) * len(inputs.captures))


def _offset_program(plan: Plan) -> ScoreProgram:
    form = affine_form(plan.program)
    assert form is not None and form.offset is not None
    return form.offset


def _offset(plan: Plan, inputs: Inputs) -> Tensor | None:
    """The additive mask at its own broadcast shape, (B or 1, H or 1, Lq or 1, Lk or 1); a stored tensor is used as it is."""
    if not plan.get("offset"):
        return None
    program = _offset_program(plan)
    q, k = inputs.q, inputs.k
    box = Coordinates((0, q.shape[0]), (0, q.shape[1]), (0, q.shape[2]), (0, k.shape[2]))
    node = program.nodes[program.result]
    # the operator takes masks in fp32 and in q's dtype
    stored = node.op == "load" and inputs.captures[int(node.value)].dtype == q.dtype  # type: ignore[arg-type]
    (offset,) = evaluate(program, box, captures=inputs.captures, sizes=inputs.sizes, device=q.device, dtype=q.dtype if stored else torch.float32)
    return offset


def _forward_cpu(plan: Plan, inputs: Inputs, scale: float, causal: bool) -> Forward:
    offset = _offset(plan, inputs)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(inputs.q, inputs.k, inputs.v, 0.0, causal, attn_mask=offset, scale=scale)
    if offset is not None and plan.masked_rows == "eager" and minus_infinity_possible(_offset_program(plan)):
        # the operator gives 0 for a row that is all -inf; eager gives NaN
        hidden = (offset == -torch.inf).all(-1, keepdim=True)
        out, lse = torch.where(hidden, torch.nan, out), torch.where(hidden.squeeze(-1), -torch.inf, lse)
    return Forward(out, lse, (lse.new_empty(0), lse.new_empty(0)))


def _backward_cpu(inputs: Inputs, result: Forward, grad_out: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, inputs.q, inputs.k, inputs.v, result.out, result.lse, 0.0, causal, attn_mask=None, scale=scale
    )


def _forward_flash(plan: Plan, inputs: Inputs, scale: float, causal: bool) -> Forward:
    found = aten._scaled_dot_product_flash_attention(inputs.q, inputs.k, inputs.v, inputs.dropout_p, causal, False, scale=scale)
    return Forward(found[0], found[1], (found[6], found[7]))


def _backward_flash(inputs: Inputs, result: Forward, grad_out: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, state = inputs.q, inputs.k, inputs.v, result.extra
    return aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, result.out, result.lse, None, None, q.shape[2], k.shape[2], inputs.dropout_p, causal, state[0], state[1], scale=scale
    )


def _forward_cudnn(plan: Plan, inputs: Inputs, scale: float, causal: bool) -> Forward:
    found = aten._scaled_dot_product_cudnn_attention(inputs.q, inputs.k, inputs.v, None, True, inputs.dropout_p, causal, False, scale=scale)
    return Forward(found[0], found[1].squeeze(-1), (found[6], found[7]))  # cuDNN's lse is (B, H, Lq, 1)


def _backward_cudnn(inputs: Inputs, result: Forward, grad_out: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, state = inputs.q, inputs.k, inputs.v, result.extra
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad_out,
        q,
        k,
        v,
        result.out,
        result.lse.unsqueeze(-1),
        state[0],
        state[1],
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        inputs.dropout_p,
        causal,
        scale=scale,
    )


_FORWARD = {"cpu": _forward_cpu, "flash": _forward_flash, "cudnn": _forward_cudnn}
_BACKWARD = {"cpu": _backward_cpu, "flash": _backward_flash, "cudnn": _backward_cudnn}

KERNEL = TorchSdpaKernel()
