"""A dropout on the scores, which the program itself draws, in every kernel: its mask, and what comes of it, against the reference in fp64."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from kernel_cases import Case, Dims, all_needs, dropping, eager_attention, named, problem, run_kernel
from test_tiled import _Largest as Largest
from torch import Tensor
from triton_interpreted import Worker, small_tiles

from fa_inductor.kernels import tiled
from fa_inductor.kernels.reference import KERNEL as REFERENCE
from fa_inductor.kernels.reference import dropout_mask
from fa_inductor.kernels.tiled import KERNEL as TILED
from fa_inductor.kernels.tiled.attention import Attention, compile_plan
from fa_inductor.kernels.tiled.dropout import Dropout
from fa_inductor.kernels.torch_sdpa import KERNEL as SDPA
from fa_inductor.op import attention

SEED = torch.tensor([12345, 6])
P = 0.3
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


# -- reference -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("form", ["plain", "causal_inf", "bias_hqk_grad", "softcap"])
def test_reference_is_autograd_with_the_mask(form: str, outside: bool) -> None:
    p = dropping(problem(Case(form, form, Dims(b=2, hq=4, hkv=2, lq=9, lk=11, d=8, dv=6))).to(torch.float64), P, outside=outside and form != "causal_inf")
    dims = p.case.dims
    plan, inputs, needs = REFERENCE.plan(p.request()), p.inputs(0.0, SEED), all_needs(p)
    result = REFERENCE.forward(plan, inputs)
    gradients = REFERENCE.backward(plan, inputs, result, p.grad_out, needs)
    keep = dropout_mask(SEED, P, (dims.b, dims.hq, dims.lq, dims.lk), scores=True)
    q, k, v, *captures = (t.clone().requires_grad_(t.is_floating_point()) for t in (p.q, p.k, p.v, *p.captures))
    out, _ = eager_attention(p, q, k, v, captures, keep)
    torch.testing.assert_close(result.out, out)
    wanted = [t for t in (q, k, v, *captures) if t.requires_grad]
    for actual, want in zip((gradients.q, gradients.k, gradients.v, *gradients.captures), torch.autograd.grad(out, wanted, p.grad_out), strict=True):
        torch.testing.assert_close(actual, want)


def test_the_references_masks_are_two() -> None:
    shape = (4, 4, 64, 64)
    scores, probabilities = (dropout_mask(SEED, P, shape, scores=s) for s in (True, False))
    assert abs(scores.double().mean().item() - 0.7) < 5 * (0.21 / scores.numel()) ** 0.5
    assert abs((scores == probabilities).double().mean().item() - 0.58) < 0.01


# -- tiled ---------------------------------------------------------------------------------------------------------------
def _keep(dims: Dims, p: float, scores: bool) -> Tensor:
    box = [(0, n) for n in (dims.b, dims.hq, dims.lq, dims.lk)]
    buffers = [torch.empty([n for _, n in box], dtype=torch.int32) for _ in range(2)]
    return Dropout(SEED, p, dims.hq, dims.lq, scores).keep_bits(*box, *buffers) != 0


@pytest.mark.parametrize("after", [0.0, 0.4])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(
    "form", ["plain", "causal_inf", "causal_min", "padding_replace_min_hidden_rows", "bias_hqk_grad", "alibi_grad", "softcap", "swin_grad"]
)
def test_tiled(form: str, outside: bool, after: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("Q_TILE", 16), ("K_TILE", 24), ("ELEMENTS", 16 * 24 * 2)):
        monkeypatch.setattr(tiled, name, value)
    dims = Dims(b=2, hq=4, hkv=2, lq=40, lk=53, d=16, dv=16)
    p = dropping(problem(Case(form, form, dims)), P, outside)
    _, result, gradients = run_kernel(TILED, p, dropout_p=after, seed=SEED)
    exact = p.to(torch.float64)
    plan, inputs = REFERENCE.plan(exact.request(after)), exact.inputs(after, SEED)
    masks = {"score_keep": _keep(dims, P, True), "keep": _keep(dims, after, False) if after else None}
    wanted = REFERENCE.forward(plan, inputs, **masks)
    wanted_gradients = REFERENCE.backward(plan, inputs, wanted, exact.grad_out, all_needs(p), **masks)
    got = named(result.out, result.lse, gradients).tensors
    for name, want in named(wanted.out, wanted.lse, wanted_gradients).tensors.items():
        torch.testing.assert_close(got[name].double(), want, rtol=2e-5, atol=3e-5, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("p", [0.0001, 0.1, 0.5, 0.9])
def test_tiled_statistics(p: float) -> None:
    dims = Dims(b=2, hq=3, hkv=3, lq=128, lk=257)
    scores, other = (_keep(dims, p, s).double() - (1 - p) for s in (True, False))
    deviation = math.sqrt(p * (1 - p))
    assert abs(float(scores.mean())) < 5 * deviation / math.sqrt(scores.numel()) + 3 / scores.numel()
    for shift in ((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0)):
        assert abs(float((scores * torch.roll(other, shift, (0, 1, 2, 3))).mean())) < 5.5 * deviation**2 / math.sqrt(other.numel()) + 3 / other.numel()


def test_tiled_operators_pass_opcheck() -> None:
    p = dropping(problem(Case("bias", "bias_hqk_grad", Dims(lq=9, lk=11, d=8, dv=8))), P)
    plan = TILED.plan(p.request()).to_text()
    torch.library.opcheck(attention._opoverload, (p.q, p.k, p.v, list(p.captures), [], [], 0.0, SEED, plan))


def test_tiled_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("Q_TILE", 32), ("K_TILE", 64), ("ELEMENTS", 1)):
        monkeypatch.setattr(tiled, name, value)
    length = 700
    p = dropping(problem(Case("alibi", "alibi_grad", Dims(b=2, hq=2, hkv=2, lq=length, lk=length, d=8, dv=8))), P)
    call = Attention(compile_plan(TILED.plan(p.request())), p.q, p.k, p.v, p.captures, p.form.sizes, 0.0, SEED)
    with torch.no_grad(), Largest() as largest:
        out, hi, lo = call.forward()
        call.backward(out, hi, lo, p.grad_out, None, [True, True, True, *p.form.differentiable])
    assert largest.elements < length * length / 8


# -- torch_sdpa ----------------------------------------------------------------------------------------------------------
def test_pytorchs_kernels_refuse() -> None:
    request = dropping(problem("plain"), P).request()
    for device in ({}, {"device": "cuda", "capability": (9, 0), "q": replace(request.q, dtype=torch.bfloat16)}):
        assert "sdpa_score_dropout" in {r.code for r in SDPA.why_not(replace(request, **device))}


# -- triton_fa2 ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@needs_triton
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_triton_statistics(worker: Worker, p: float) -> None:
    worker.run("score_dropout_statistics", p=p)


@needs_triton
@pytest.mark.parametrize("config", [small_tiles(16), {"fwd_m": 64, "fwd_n": 32}, {"fwd_m": 32, "fwd_n": 128}])
def test_triton_mask_is_the_same_for_every_tile(worker: Worker, config: dict[str, int]) -> None:
    worker.run("score_dropout_tiles", config=config)


OTHER_TILES = {"rows_m": 64, "rows_n": 64, "columns_m": 16, "columns_n": 32, "dense_m": 16, "dense_n": 64}


@needs_triton
@pytest.mark.parametrize("config", [small_tiles(16), OTHER_TILES])
@pytest.mark.parametrize("form", ["plain", "causal_inf", "causal_min", "bias_hqk_grad", "alibi_grad", "bias_bk_grad", "swin_grad"])
def test_triton(worker: Worker, form: str, config: dict[str, int]) -> None:
    worker.run("score_dropout_gradients", form=form, config=config)


@needs_triton
@pytest.mark.parametrize("form", ["causal_min", "padding_replace_1e9_hidden_rows", "bias_hqk_grad", "softcap"])
def test_triton_with_masks_dropped_too(worker: Worker, form: str) -> None:
    worker.run("score_dropout_gradients", form=form, config=small_tiles(16), outside=True)


@needs_triton
def test_triton_rows_of_hidden_scores_that_are_all_kept(worker: Worker) -> None:
    """Their lse is about that of the fill, which alone would lose the logarithm of their number."""
    worker.run("score_dropout_gradients", form="padding_replace_1e9_hidden_rows", config=small_tiles(16), outside=True, keys=3)


@needs_triton
@pytest.mark.parametrize("form", ["plain", "causal_inf", "causal_min", "bias_hqk_grad", "swin_grad"])
def test_triton_windows(worker: Worker, form: str) -> None:
    worker.run("score_dropout_gradients", form=form, config={}, window=True)


@needs_triton
@pytest.mark.parametrize("window", [False, True])
def test_triton_with_a_dropout_after_the_softmax_too(worker: Worker, window: bool) -> None:
    worker.run("score_dropout_gradients", form="bias_hqk_grad", config={}, window=window, after=0.4)


@needs_triton
@pytest.mark.parametrize("after", [0.0, 0.1])
def test_triton_compiles(after: float) -> None:
    from triton_offline import compile_kernel, kernels, request_of

    from fa_inductor.kernels.triton_fa2 import KERNEL

    form = dropping(problem(Case("offline", "bias_hqk_grad", Dims(1, 2, 2, 16, 16, 64, 64), torch.bfloat16)), 0.1).form
    plan = KERNEL.plan(replace(request_of("bias_hqk_grad", 64, dropout=after), program=form.program, facts=form.facts))
    for name, function in kernels(plan):
        compile_kernel(function, plan, name, torch.bfloat16, (9, 0))
