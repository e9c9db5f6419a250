"""PyTorch's fused kernels: what is served is exact, and what would not be is refused with the right code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import CASES, FORMS, Case, Dims, all_needs, check, compare, eager_attention, named, poisoned_memory, problem, run_eager, run_exact, run_kernel
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fa_inductor.kernels.torch_sdpa import KERNEL
from fa_inductor.kernels.torch_sdpa.support import same_size
from fa_inductor.program import Coordinates, evaluate
from fa_inductor.program.affine import affine_form
from fa_inductor.request import AttentionRequest, Gradients, Inputs, Needs

_SERVED = {name: (not KERNEL.why_not(problem(name).request()), not KERNEL.why_not(problem(name).request(training=False))) for name in CASES}
TRAINING = [name for name, (training, _) in _SERVED.items() if training]
INFERENCE = [name for name, (_, inference) in _SERVED.items() if inference]
CUDA_CASES = [
    *("plain", "causal_inf", "causal_min", "plain-gqa", "causal_inf-gqa", "plain-rectangle", "causal_inf-blhd"),
    *("causal_inf-fused_qkv", "causal_inf-stride0", "causal_inf-d128-dv128", "plain-dv", "plain-long-bfloat16"),
]
NOTHING = Gradients(None, None, None, ())


def codes(request: AttentionRequest) -> set[str]:
    return {r.code for r in KERNEL.why_not(request)}


@pytest.mark.parametrize("name", TRAINING)
def test_two_reference_rule(name: str) -> None:
    check(KERNEL, name)


@pytest.mark.parametrize("name", INFERENCE)
def test_inference(name: str) -> None:
    p = problem(name)
    plan = KERNEL.plan(p.request(training=False))
    with torch.no_grad(), poisoned_memory():
        result = KERNEL.forward(plan, p.inputs())
    none = Needs(False, False, False, (False,) * len(p.captures))
    comparisons = compare(named(result.out, result.lse, NOTHING), run_exact(p, none), run_eager(p), p.q.dtype, p.k.shape[2])
    assert all(c.ok for c in comparisons), comparisons


def test_what_is_served() -> None:
    """The list that the README promises: a refusal too many would go unnoticed otherwise."""
    for name in (
        "plain",
        "causal_inf",
        "causal_min",
        "causal_1e4",
        "causal_inf-gqa",
        "causal_inf-rectangle",
        "causal_inf-tall",
        "causal_inf-bfloat16",
        "decode",
    ):
        assert name in TRAINING, name
    for name in ("padding_replace_inf", "padding_replace_min_hidden_rows", "padding_add_min", "bias_bhqk", "bias_bk_grad", "bias_hqk_grad-bfloat16"):
        assert name in INFERENCE and name not in TRAINING, name


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("softcap", "sdpa_program"),
        ("temperature_grad", "sdpa_program"),
        ("bottom_right_inf", "sdpa_mask"),
        ("window_inf", "sdpa_mask"),
        ("documents_inf", "sdpa_mask"),
        ("alibi_grad", "sdpa_mask"),
        ("swin_grad", "sdpa_mask"),
        ("buckets_grad", "sdpa_mask"),
        ("padding_replace_min", "sdpa_gradient"),
        ("bias_hqk_grad", "sdpa_gradient"),
        ("padding_replace_1e9", "sdpa_rows"),
        ("post_head_mask_grad", "sdpa_post"),
        ("plain-dv", "sdpa_head_size"),
    ],
)
def test_refusals(name: str, code: str) -> None:
    assert code in codes(problem(name).request())


def test_refuses_dropout_dtype_strides_and_devices() -> None:
    p = problem("causal_inf")
    assert codes(p.request(0.1)) == {"sdpa_dropout"}
    assert codes(p.to(torch.float64).request()) == {"sdpa_dtype"}
    assert codes(replace(p, k=p.k.transpose(-1, -2).contiguous().transpose(-1, -2)).request()) == {"sdpa_strides"}
    assert codes(problem(Case("empty", "plain", Dims(lk=0))).request()) == {"sdpa_lengths"}
    assert codes(replace(p.request(), device="mps")) == {"sdpa_device"}


def _cuda(name: str, dtype: torch.dtype = torch.bfloat16, **changes: object) -> AttentionRequest:
    return replace(problem(replace(CASES[name], dtype=dtype)).request(), **{"device": "cuda", "capability": (9, 0), **changes})  # type: ignore[arg-type]


def test_support_on_cuda() -> None:
    assert not KERNEL.why_not(_cuda("causal_inf")) and KERNEL.plan(_cuda("causal_inf")).get("backend") == "cudnn"
    assert KERNEL.plan(_cuda("causal_inf", deterministic=True)).get("backend") == "flash"
    assert KERNEL.plan(_cuda("causal_inf", dropout_p=0.1)).get("backend") in ("cudnn", "flash")
    assert not KERNEL.why_not(_cuda("plain-rectangle"))
    assert codes(_cuda("causal_inf-rectangle")) == {"sdpa_lengths"}
    assert codes(_cuda("causal_inf-d17-dv5")) == {"sdpa_head_size"}
    assert codes(_cuda("causal_inf", torch.float32)) == {"sdpa_dtype"}
    assert codes(_cuda("padding_add_inf")) == {"sdpa_mask"}
    assert codes(_cuda("causal_inf", capability=(7, 5))) == {"sdpa_device"}


def test_gradient_of_a_sum_has_strides_of_zero() -> None:
    p = replace(problem("causal_inf"), grad_out=torch.ones(()).expand(2, 2, 65, 32))
    _, result, gradients = run_kernel(KERNEL, p)
    assert all(c.ok for c in compare(named(result.out, result.lse, gradients), run_exact(p), run_eager(p), torch.float32, 65))


def test_partial_gradients() -> None:
    p = problem("causal_inf")
    _, _, gradients = run_kernel(KERNEL, p, Needs(False, True, False, ()))
    assert gradients.q is None and gradients.v is None and gradients.k is not None


@pytest.mark.parametrize("name", ["causal_inf", "padding_replace_min", "bias_bhqk"])
def test_traces_with_symbolic_lengths(name: str) -> None:
    def trace(p):  # type: ignore[no-untyped-def]
        plan = KERNEL.plan(p.request(training=name == "causal_inf"))

        def run(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, *captures: Tensor) -> list[Tensor | None]:
            inputs = Inputs(q, k, v, captures, (q.shape[2], k.shape[2]), 0.0, None)
            result = KERNEL.forward(plan, inputs)
            if name != "causal_inf":
                return [result.out, result.lse]
            gradients = KERNEL.backward(plan, inputs, result, grad_out, all_needs(p))
            return [result.out, result.lse, gradients.q, gradients.k, gradients.v]

        return run, (p.q, p.k, p.v, p.grad_out, *p.captures)

    run, arguments = trace(problem(Case(name, name, Dims(b=2, hq=4, hkv=4, lq=20, lk=30))))
    traced = make_fx(run, tracing_mode="symbolic")(*arguments)
    assert not [g for g in traced.shape_env.guards if "Eq(s" in str(g.expr) and "Ne" not in str(g.expr)], traced.shape_env.guards
    other, arguments = trace(problem(Case(name, name, Dims(b=3, hq=4, hkv=4, lq=51, lk=41))))
    for got, want in zip(traced(*arguments), other(*arguments), strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_affine_form_is_the_program(form: str) -> None:
    """Where a program is affine with fills that replace nothing, scale * score + offset is the program itself."""
    p = problem(Case(form, form, Dims(lq=9, lk=7, d=8))).to(torch.float64)
    found = affine_form(p.form.program)
    if found is None:
        assert form.startswith(("softcap", "groups_of_heads")) or "temperature" in form
        return
    box = Coordinates((0, 2), (0, 2), (0, 9), (0, 7))
    score = p.q @ p.k.transpose(-1, -2)

    def value(program: object, **leaves: Tensor) -> Tensor:
        return evaluate(program, box, captures=p.captures, sizes=p.form.sizes, device=score.device, dtype=torch.float64, **leaves)[0]  # type: ignore[arg-type]

    want = value(p.form.program, score=score)
    got = found.scale * score + (value(found.offset) if found.offset is not None else 0.0)
    for fill in found.replaced:
        assert ((want == fill) == (got <= fill / 2)).all()
        want, got = want.clamp(min=fill / 2), got.clamp(min=fill / 2)
    torch.testing.assert_close(got.expand_as(want), want)


def test_same_size() -> None:
    assert same_size(3, 3) and not same_size(3, 4)
    found: list[bool] = []

    def trace(x: Tensor, y: Tensor) -> Tensor:
        found.extend([same_size(x.shape[0], x.shape[0] + 0), same_size(x.shape[0], y.shape[0]), same_size(x.shape[0], 5)])
        return x + 1

    make_fx(trace, tracing_mode="symbolic")(torch.ones(5), torch.ones(6))
    assert found == [True, False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "causal_inf",
        "causal_min",
        "plain-gqa",
        "causal_inf-gqa",
        "plain-rectangle",
        "causal_inf-blhd",
        "causal_inf-fused_qkv",
        "causal_inf-d128-dv128",
        "plain-dv",
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_backends(name: str, backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from fa_inductor.kernels.torch_sdpa import support

    case = replace(CASES[name], dtype=dtype)
    reasons = support.BACKENDS[backend](problem(case, "cuda").request())
    if reasons:
        assert backend == "flash" and {r.code for r in reasons} == {"sdpa_head_size"}
        return
    monkeypatch.setattr(support, "BACKENDS", {backend: support.BACKENDS[backend]})
    check(KERNEL, case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_cuda_dropout(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With V the identity the output is the dropped probabilities; dV must use the same mask."""
    from fa_inductor.kernels.torch_sdpa import support

    monkeypatch.setattr(support, "BACKENDS", {backend: support.BACKENDS[backend]})
    case = Case("dropout", "plain", Dims(b=2, hq=2, hkv=2, lq=64, lk=64, d=64, dv=64), torch.float16)
    p = problem(case, "cuda")
    identity = torch.eye(64, dtype=torch.float16, device="cuda").expand(2, 2, 64, 64).contiguous()
    p = replace(p, v=identity, grad_out=identity)
    _, result, gradients = run_kernel(KERNEL, p, dropout_p=0.25, seed=torch.tensor([1, 2], device="cuda"))
    probabilities, _ = eager_attention(p, p.q, p.k, p.v, ())
    kept = result.out != 0
    assert abs(kept.double().mean().item() - 0.75) < 0.03
    torch.testing.assert_close(result.out, probabilities * kept / 0.75, rtol=1e-2, atol=1e-3)
    assert gradients.v is not None
    torch.testing.assert_close(gradients.v.transpose(-1, -2), result.out, rtol=1e-2, atol=1e-3)
