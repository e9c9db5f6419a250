"""Attention by its equations, in plain ATen, materialising the scores: the specification that every other kernel is held to.

With ``score = Q K^T`` (query head h reads key head h // (Hq // Hkv)) and natural logarithms::

    S = program(score, keep')         P = softmax_k(S)             lse = logsumexp_k(S)
    P_eff = P * post * keep / (1-p)   O = P_eff V

    dV = P_eff^T dO                          dP_eff = dO V^T              dP = dP_eff * post * keep / (1-p)
    dS = P * (dP - rowsum(dO * O) + dlse)    dscore = program'(score) dS  dQ = dscore K, dK = dscore^T Q

A row whose S is all -inf has P = NaN, as in eager PyTorch, or 0 under ``masked_rows="zero"``; its lse is -inf in both.
Arithmetic is float64 for float64 inputs and float32 otherwise.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fa_inductor.kernel_support import empty_output, output_layout, source_hash, without_autocast
from fa_inductor.program import Coordinates, ScoreProgram, evaluate
from fa_inductor.program.scatter import gradient_program, scatter_loads
from fa_inductor.refusal import Refusal, declare
from fa_inductor.request import AttentionRequest, Forward, Gradients, Inputs, Kernel, Needs, Plan

ORACLE_ONLY = declare("oracle_only", "The reference kernel holds every score in memory; it is the test oracle and is only used when asked for by name.")


class ReferenceKernel(Kernel):
    """The oracle; ``keep`` and ``score_keep`` let a test impose the masks of a dropout after and before the softmax, (B, Hq, Lq, Lk) bool tensors."""

    name = "reference"

    def why_not(self, request: AttentionRequest) -> list[Refusal]:
        """Always one refusal: selection never takes the oracle by itself."""
        return [Refusal(ORACLE_ONLY, "the reference kernel is never chosen by cost")]

    def plan(self, request: AttentionRequest) -> Plan:
        return Plan(
            kernel=self.name,
            program=request.program,
            facts=request.facts,
            post=request.post,
            config=(("layout", output_layout(request.q)),),
            deterministic=request.deterministic,
            masked_rows=request.masked_rows,
            source_hash=source_hash(str(Path(__file__).parent)),
            reason="asked for by name: the test oracle",
        )

    def splits_lse(self, plan: Plan) -> bool:
        return False

    def forward(self, plan: Plan, inputs: Inputs, keep: Tensor | None = None, score_keep: Tensor | None = None) -> Forward:
        with without_autocast(inputs.q.device.type):
            out, lse = _Attention(plan, inputs, keep, score_keep).forward()
            result = empty_output(inputs.q, inputs.v.shape[-1], str(plan.get("layout"))).copy_(out)
        return Forward(result, lse, (lse.new_empty(0), lse.new_empty(0)))

    def backward(
        self,
        plan: Plan,
        inputs: Inputs,
        result: Forward,
        grad_out: Tensor,
        needs: Needs,
        grad_lse: Tensor | None = None,
        keep: Tensor | None = None,
        score_keep: Tensor | None = None,
    ) -> Gradients:
        with without_autocast(inputs.q.device.type):
            return _Attention(plan, inputs, keep, score_keep).backward(grad_out, grad_lse, needs)


def dropout_mask(seed: Tensor, p: float, shape: tuple[int, ...], scores: bool = False) -> Tensor:
    """True where a probability, or a score, is kept: drawn from a generator seeded by the two elements of ``seed``. Not traceable: it reads them."""
    first, second = seed.tolist()
    generator = torch.Generator(seed.device).manual_seed((first * 0x9E3779B97F4A7C15 + second + scores * 0x632BE59BD9B4E019) % 2**63)
    return torch.rand(shape, generator=generator, device=seed.device) >= p


class _Attention:
    """The tensors of one call, in the working precision, with the scores and probabilities of the module's equations."""

    def __init__(self, plan: Plan, inputs: Inputs, keep: Tensor | None, score_keep: Tensor | None) -> None:
        self.plan, self.inputs = plan, inputs
        self.dtype = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
        self.q, self.k, self.v = (t.to(self.dtype) for t in (inputs.q, inputs.k, inputs.v))
        batch, heads, length, _ = inputs.q.shape
        self.shape = (batch, heads, length, inputs.k.shape[2])
        self.group = heads // inputs.k.shape[1]
        self.coordinates = Coordinates((0, batch), (0, heads), (0, length), (0, inputs.k.shape[2]))
        self.score = self.q @ self._heads(self.k).transpose(-1, -2)
        p = plan.program.drop_p
        if score_keep is None and p is not None:
            assert inputs.seed is not None, "dropout needs a seed"
            score_keep = dropout_mask(inputs.seed, p, self.shape, scores=True)
        self.score_keep = score_keep
        self.s = self._evaluate(plan.program)[0].expand(self.shape)
        self.p = torch.softmax(self.s, dim=-1)
        if plan.masked_rows == "zero":
            self.p = torch.where((self.s == -torch.inf).all(-1, keepdim=True), 0.0, self.p)
        self.factor = self._factor(keep)
        self.p_eff = self.p if self.factor is None else self.p * self.factor

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.p_eff @ self._heads(self.v), torch.logsumexp(self.s, dim=-1)

    def backward(self, grad_out: Tensor, grad_lse: Tensor | None, needs: Needs) -> Gradients:
        d_o = grad_out.to(self.dtype)
        out, _ = self.forward()
        dp_eff = d_o @ self._heads(self.v).transpose(-1, -2)
        dp = dp_eff if self.factor is None else dp_eff * self.factor
        delta = (d_o * out).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta = delta - grad_lse.to(self.dtype).unsqueeze(-1)
        ds = self.p * (dp - delta)
        wanted = [i for i, need in enumerate(needs.captures) if need]
        gradient = gradient_program(self.plan.program, wanted)
        values = self._evaluate(gradient.program, grad=ds)
        dscore = values[1].expand(self.shape)
        targets = [
            torch.zeros(c.shape, dtype=self.dtype, device=c.device) if need else None for c, need in zip(self.inputs.captures, needs.captures, strict=True)
        ]
        scatter_loads(gradient, values, self.coordinates, targets)
        self._scatter_post(wanted, dp_eff, targets)
        return Gradients(
            q=(dscore @ self._heads(self.k)).to(self.inputs.q.dtype) if needs.q else None,
            k=self._sum_heads(dscore.transpose(-1, -2) @ self.q).to(self.inputs.k.dtype) if needs.k else None,
            v=self._sum_heads(self.p_eff.transpose(-1, -2) @ d_o).to(self.inputs.v.dtype) if needs.v else None,
            captures=tuple(t if t is None else t.to(c.dtype) for t, c in zip(targets, self.inputs.captures, strict=True)),
        )

    def _scatter_post(self, wanted: list[int], dp_eff: Tensor, targets: list[Tensor | None]) -> None:
        if self.plan.post is None or not wanted:
            return
        gradient = gradient_program(self.plan.post, wanted)
        kept = self.p if self.kept is None else self.p * self.kept
        scatter_loads(gradient, self._evaluate(gradient.program, grad=dp_eff * kept), self.coordinates, targets)

    def _factor(self, keep: Tensor | None) -> Tensor | None:
        """What multiplies the probabilities: post factor times kept / (1 - p)."""
        inputs, p = self.inputs, self.inputs.dropout_p
        if keep is None and p > 0:
            assert inputs.seed is not None, "dropout needs a seed"
            keep = dropout_mask(inputs.seed, p, self.shape)
        # dropping everything (p = 1) leaves zeros, not 0/0
        self.kept = None if keep is None else keep.to(self.dtype) * (1 / (1 - p) if p < 1 else 0.0)
        if self.plan.post is None:
            return self.kept
        factor = self._evaluate(self.plan.post)[0]
        return factor if self.kept is None else factor * self.kept

    def _evaluate(self, program: ScoreProgram, grad: Tensor | None = None) -> list[Tensor]:
        inputs = self.inputs
        return evaluate(
            program,
            self.coordinates,
            score=self.score,
            grad=grad,
            keep=self.score_keep,
            captures=inputs.captures,
            sizes=inputs.sizes,
            device=inputs.q.device,
            dtype=self.dtype,
        )

    def _heads(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.group, dim=1)

    def _sum_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (x.shape[1] // self.group, self.group)).sum(2)


KERNEL = ReferenceKernel()
