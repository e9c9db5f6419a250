"""The oracle itself: its explicit backward against autograd of the equations, its masked rows, its dropout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from kernel_cases import CASES, FORMS, Case, Dims, all_needs, check, eager_attention, named, problem, run_eager, run_kernel
from torch import Tensor

from fa_inductor.kernels.reference import KERNEL, dropout_mask
from fa_inductor.request import Forward, Gradients, Inputs, Needs, Plan

SMALL = Dims(b=2, hq=4, hkv=2, lq=7, lk=9, d=5, dv=3)


@pytest.mark.parametrize("form", FORMS)
def test_backward_is_autograd_of_the_equations(form: str) -> None:
    p = problem(Case(form, form, SMALL)).to(torch.float64)
    _, result, gradients = run_kernel(KERNEL, p)
    actual, wanted = named(result.out, result.lse, gradients), run_eager(p)
    assert actual.tensors.keys() == wanted.tensors.keys()
    for name, want in wanted.tensors.items():
        torch.testing.assert_close(actual.tensors[name], want, rtol=1e-11, atol=1e-11, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", list(CASES))
def test_two_reference_rule(name: str) -> None:
    check(KERNEL, name)


def test_float64_inputs_keep_float64() -> None:
    p = problem("causal_inf").to(torch.float64)
    _, result, gradients = run_kernel(KERNEL, p)
    assert {t.dtype for t in (result.out, result.lse, gradients.q, gradients.k, gradients.v) if t is not None} == {torch.float64}


def test_rows_without_a_visible_key() -> None:
    p = problem(Case("nothing", "padding_replace_inf_hidden_rows", SMALL))
    _, eager, _ = run_kernel(KERNEL, p)
    assert eager.out[-1].isnan().all() and not eager.out[0].isnan().any()
    zero = replace(p, case=replace(p.case, masked_rows="zero"))
    _, result, gradients = run_kernel(KERNEL, zero)
    assert (result.out[-1] == 0).all() and (result.lse[-1] == -torch.inf).all()
    assert gradients.q is not None and gradients.v is not None and (gradients.q[-1] == 0).all() and (gradients.v[-1] == 0).all()


def test_finite_fill_gives_uniform_rows() -> None:
    p = problem(Case("uniform", "padding_replace_min_hidden_rows", SMALL))
    _, result, _ = run_kernel(KERNEL, p)
    mean = p.v[-1].mean(-2, keepdim=True).repeat_interleave(2, dim=0).expand_as(result.out[-1])
    torch.testing.assert_close(result.out[-1], mean)


@pytest.mark.parametrize("form", ["causal_inf", "post_dense_grad"])
def test_dropout_with_a_given_mask(form: str) -> None:
    p = problem(Case(form, form, SMALL)).to(torch.float64)
    keep = torch.rand((SMALL.b, SMALL.hq, SMALL.lq, SMALL.lk), generator=torch.Generator().manual_seed(1)) >= 0.25
    plan, inputs, needs = KERNEL.plan(p.request(0.25)), p.inputs(0.25, torch.tensor([1, 2])), all_needs(p)
    result = KERNEL.forward(plan, inputs, keep)
    gradients = KERNEL.backward(plan, inputs, result, p.grad_out, needs, keep=keep)
    # the same function, with the factor folded into the post-softmax factor of the eager form
    q, k, v, *captures = (t.clone().requires_grad_(t.is_floating_point()) for t in (p.q, p.k, p.v, *p.captures))
    ones = torch.eye(SMALL.lk, dtype=torch.float64).expand(SMALL.b, SMALL.hkv, SMALL.lk, SMALL.lk)
    probabilities, _ = eager_attention(p, q, k, ones, captures)
    out = (probabilities * keep / 0.75) @ v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(result.out, out)
    wanted = [t for t in (q, k, v, *captures) if t.requires_grad]
    for actual, want in zip((gradients.q, gradients.k, gradients.v, *gradients.captures), torch.autograd.grad(out, wanted, p.grad_out), strict=True):
        torch.testing.assert_close(actual, want)


def test_dropout_from_the_seed() -> None:
    shape = (4, 4, 64, 64)
    keep = dropout_mask(torch.tensor([3, 5]), 0.3, shape)
    assert abs(keep.double().mean().item() - 0.7) < 5 * (0.21 / keep.numel()) ** 0.5
    assert (keep == dropout_mask(torch.tensor([3, 5]), 0.3, shape)).all()
    assert (keep != dropout_mask(torch.tensor([3, 6]), 0.3, shape)).any() and (keep != dropout_mask(torch.tensor([4, 5]), 0.3, shape)).any()


@dataclass
class _Wrong:
    """The reference with one small error."""

    what: str
    name: str = "wrong"
    why_not = staticmethod(KERNEL.why_not)
    plan = staticmethod(KERNEL.plan)

    def forward(self, plan: Plan, inputs: Inputs) -> Forward:
        result = KERNEL.forward(plan, replace(inputs, q=inputs.q * 1.001) if self.what == "scale" else inputs)
        if self.what == "unwritten":
            result.out[:, :, -1, -1] = torch.nan
        return replace(result, lse=result.lse + 1e-4) if self.what == "lse" else result

    def backward(self, plan: Plan, inputs: Inputs, result: Forward, grad_out: Tensor, needs: Needs, grad_lse: Tensor | None = None) -> Gradients:
        gradients = KERNEL.backward(plan, inputs, result, grad_out, needs, grad_lse)
        (capture,) = gradients.captures
        assert gradients.k is not None and capture is not None
        if self.what == "dk":
            gradients.k[0, 0, 0] *= 1.001
        return replace(gradients, captures=(capture * 1.001,)) if self.what == "dcapture" else gradients


@pytest.mark.parametrize("what", ["scale", "unwritten", "lse", "dk", "dcapture"])
def test_the_check_notices(what: str) -> None:
    with pytest.raises(AssertionError, match="error"):
        check(_Wrong(what), "bias_hqk_grad")  # type: ignore[arg-type]


def test_never_chosen() -> None:
    (refusal,) = KERNEL.why_not(problem("plain").request())
    assert refusal.code == "oracle_only"


def test_output_layout_follows_q() -> None:
    for layout in ("bhld", "blhd"):
        p = problem(Case(layout, "plain", layout=layout))
        plan, result, _ = run_kernel(KERNEL, p)
        assert plan.get("layout") == layout and Plan.from_text(plan.to_text()) == plan
        assert (result.out.transpose(1, 2) if layout == "blhd" else result.out).is_contiguous()
