"""The tiled kernel against the fp64 reference, at the default tiles and at tiles far smaller than the problems."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import CASES, FLOAT32_CASES, FORMS, RECTANGLE, TALL, Case, Dims, all_needs, check, compare, named, problem, run_eager, run_exact, run_kernel
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fa_inductor.facts import Affine, MaskFacts, MaskTerm
from fa_inductor.kernels import tiled
from fa_inductor.kernels.reference import KERNEL as REFERENCE
from fa_inductor.kernels.tiled import KERNEL
from fa_inductor.kernels.tiled.attention import Attention, compile_plan
from fa_inductor.kernels.tiled.dropout import Dropout
from fa_inductor.kernels.tiled.ops import tiled_backward, tiled_forward
from fa_inductor.kernels.tiled.schedule import Shape, Visibility, choose_tiles
from fa_inductor.request import Inputs, Needs


def _small_tiles(monkeypatch: pytest.MonkeyPatch, q: int = 16, k: int = 24, elements: int = 16 * 24 * 2) -> None:
    for name, value in (("Q_TILE", q), ("K_TILE", k), ("ELEMENTS", elements)):
        monkeypatch.setattr(tiled, name, value)


@pytest.mark.parametrize("name", list(CASES))
def test_two_reference_rule(name: str) -> None:
    check(KERNEL, name)


@pytest.mark.parametrize("name", FLOAT32_CASES)
def test_many_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _small_tiles(monkeypatch)
    check(KERNEL, name)


@pytest.mark.parametrize(
    "name", ["causal_inf-gqa", "padding_replace_min_hidden_rows", "swin_grad", "left_padding_causal_min", "alibi_grad-tall", "post_dense_grad"]
)
def test_one_head_and_one_row_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _small_tiles(monkeypatch, q=1, k=7, elements=1)
    check(KERNEL, name)


# -- partial gradients ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("which", ["q", "k", "v", "captures", "nothing else"])
def test_partial_gradients(which: str) -> None:
    full = all_needs(problem("bias_hqk_grad"))
    needs = Needs(which == "q", which == "k", which == "v", tuple(f and which == "captures" for f in full.captures))
    p = problem("bias_hqk_grad")
    _, result, gradients = run_kernel(KERNEL, p, needs)
    assert [g is not None for g in (gradients.q, gradients.k, gradients.v, *gradients.captures)] == [needs.q, needs.k, needs.v, *needs.captures]
    actual = named(result.out, result.lse, gradients)
    assert all(c.ok for c in compare(actual, run_exact(p, needs), run_eager(p), torch.float32, 65))


# -- dropout -------------------------------------------------------------------------------------------------------------
def _keep(seed: Tensor, p: float, dims: Dims) -> Tensor:
    shape = (dims.b, dims.hq, dims.lq, dims.lk)
    dropout = Dropout(seed, p, dims.hq, dims.lq)
    bits = dropout.keep_bits(
        (0, dims.b), (0, dims.hq), (0, dims.lq), (0, dims.lk), torch.empty(shape, dtype=torch.int32), torch.empty(shape, dtype=torch.int32)
    )
    return bits != 0


@pytest.mark.parametrize("form", ["causal_inf", "post_dense_grad", "padding_replace_min_hidden_rows"])
def test_dropout_is_the_reference_with_the_same_mask(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _small_tiles(monkeypatch)
    case = Case(form, form, Dims(b=2, hq=4, hkv=2, lq=40, lk=53, d=16, dv=16))
    p, seed, needs = problem(case), torch.tensor([12345, 6]), all_needs(problem(case))
    keep = _keep(seed, 0.3, case.dims)
    _, result, gradients = run_kernel(KERNEL, p, dropout_p=0.3, seed=seed)
    exact = p.to(torch.float64)
    reference = REFERENCE.plan(exact.request(0.3))
    inputs = exact.inputs(0.3, seed)
    wanted = REFERENCE.forward(reference, inputs, keep)
    wanted_gradients = REFERENCE.backward(reference, inputs, wanted, exact.grad_out, needs, keep=keep)
    for name, want in named(wanted.out, wanted.lse, wanted_gradients).tensors.items():
        got = named(result.out, result.lse, gradients).tensors[name].double()
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("p", [0.0001, 0.1, 0.5, 0.9])
def test_dropout_statistics(p: float) -> None:
    dims = Dims(b=2, hq=3, hkv=3, lq=128, lk=257)
    keep = _keep(torch.tensor([7, 9]), p, dims).double()
    deviation = math.sqrt(p * (1 - p))
    for axes in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (2, 3)):
        mean = keep.mean(axes)
        count = keep.numel() / mean.numel()
        assert float((mean - (1 - p)).abs().max()) < 5.5 * deviation / math.sqrt(count) + 3 / count
    # neighbours, heads and batches are uncorrelated
    centred = keep - (1 - p)
    for shift in ((0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 1, 1), (0, 0, 2, 1)):
        moved = torch.roll(centred, shift, (0, 1, 2, 3))
        assert abs(float((centred * moved).mean())) < 5.5 * deviation**2 / math.sqrt(keep.numel()) + 3 / keep.numel()


def test_dropout_depends_on_both_parts_of_the_seed_and_not_on_tiles() -> None:
    dims = Dims(lq=33, lk=65)
    base = _keep(torch.tensor([1, 2]), 0.5, dims)
    for other in ([2, 2], [1, 3], [2, 1], [1, -2]):
        agreement = (_keep(torch.tensor(other), 0.5, dims) == base).double().mean().item()
        assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(base.numel())
    dropout = Dropout(torch.tensor([1, 2]), 0.5, dims.hq, dims.lq)
    part = dropout.keep_bits((1, 2), (0, 2), (7, 20), (30, 61), *(torch.empty(1, 2, 13, 31, dtype=torch.int32) for _ in range(2)))
    assert ((part != 0) == base[1:2, :, 7:20, 30:61]).all()


def test_everything_dropped_is_zero() -> None:
    p = problem("plain")
    _, result, gradients = run_kernel(KERNEL, p, dropout_p=1.0, seed=torch.tensor([1, 2]))
    assert (result.out == 0).all() and all((g == 0).all() for g in (gradients.q, gradients.k, gradients.v) if g is not None)


# -- masks ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("upper", [None, -3, 0, 5, 100])
@pytest.mark.parametrize("lower", [None, -9, 0, 4])
@pytest.mark.parametrize("dims", [(13, 13), (7, 20), (20, 7)])
def test_skipped_and_unmasked_columns(upper: int | None, lower: int | None, dims: tuple[int, int]) -> None:
    """Brute force: no visible key outside the visited range, no hidden one in the columns left unmasked."""
    lq, lk = dims
    terms = [MaskTerm(kind, 0, Affine(bound)) for kind, bound in (("upper", upper), ("lower", lower)) if bound is not None]  # type: ignore[arg-type]
    mask = MaskFacts(-math.inf, "replace", tuple(terms), False, -math.inf)
    visibility = Visibility(mask, problem("plain").form.program, Shape(1, 1, 1, lq, lk, 8, 8), (), (), torch.device("cpu"))
    distance = torch.arange(lk)[None, :] - torch.arange(lq)[:, None]
    visible = (distance <= (upper if upper is not None else 1000)) & (distance >= (lower if lower is not None else -1000))
    for rows in ((0, 1), (0, 4), (3, 7), (lq - 2, lq), (0, lq)):
        start, stop = visibility.key_range(rows)
        assert 0 <= start <= stop <= lk
        assert not visible[rows[0] : rows[1], :start].any() and not visible[rows[0] : rows[1], stop:].any()
        for keys in ((0, lk), (start, stop), (2, 6)):
            if keys[0] < keys[1]:
                first, last = visibility.seen_by_all(rows, keys)
                assert keys[0] <= first <= last <= keys[1] and visible[rows[0] : rows[1], first:last].all()


def test_causal_visits_half_and_a_window_visits_a_band(monkeypatch: pytest.MonkeyPatch) -> None:
    _small_tiles(monkeypatch, q=16, k=16, elements=16 * 16)
    for form, most in (("plain", 1.0), ("causal_inf", 0.57), ("window_inf", 0.3), ("padding_replace_inf", 0.75)):
        p = problem(Case(form, form, Dims(lq=160, lk=160)))
        call = Attention(compile_plan(KERNEL.plan(p.request())), p.q, p.k, p.v, p.captures, p.form.sizes, 0.0, None)
        visited = sum(
            (keys[1] - keys[0]) * 16 for chunk in call.chunks() for row in range(0, 160, 16) for keys, _ in call.key_ranges(chunk, (row, row + 16), False)
        )
        assert 0 < visited <= most * 4 * 160 * 160, (form, visited / (4 * 160 * 160))


def test_nan_behind_a_replacing_mask_stays_hidden() -> None:
    p = problem("causal_inf")
    k = p.k.clone()
    k[:, :, 40:] = torch.nan
    _, clean, _ = run_kernel(KERNEL, p)
    _, dirty, _ = run_kernel(KERNEL, replace(p, k=k))
    torch.testing.assert_close(dirty.out[:, :, :40], clean.out[:, :, :40])
    assert dirty.out[:, :, 40:].isnan().all()


def test_infinite_scores_are_nan_as_in_eager() -> None:
    p = problem("plain")
    q = p.q.clone()
    q[0, 0, 3] = torch.inf
    _, result, _ = run_kernel(KERNEL, replace(p, q=q))
    assert result.out[0, 0, 3].isnan().all() and not result.out[0, 0, :3].isnan().any()


def test_two_part_lse_separates_scores_under_a_huge_added_fill() -> None:
    """x - 1e9 in every score of a row: fp32 rounds the scores (as eager does), but P must still sum to 1 in the backward pass."""
    p = problem("padding_add_1e9_hidden_rows")
    q, ones = p.q * 0, torch.ones_like(p.v)
    p = replace(p, q=q, v=ones, grad_out=torch.ones_like(p.grad_out))
    _, result, gradients = run_kernel(KERNEL, p)
    torch.testing.assert_close(result.out, torch.ones_like(result.out))
    assert gradients.v is not None
    torch.testing.assert_close(gradients.v.sum(2), torch.full_like(gradients.v.sum(2), p.q.shape[2]))


# -- memory, tracing, contract -------------------------------------------------------------------------------------------
class _Largest(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.mark.parametrize("form", ["alibi_grad", "padding_replace_min_hidden_rows", "softcap", "documents_inf", "buckets_grad"])
def test_memory_is_linear(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _small_tiles(monkeypatch, q=32, k=64, elements=1)
    length = 700
    p = problem(Case(form, form, Dims(b=2, hq=2, hkv=2, lq=length, lk=length, d=8, dv=8)))
    call = Attention(compile_plan(KERNEL.plan(p.request())), p.q, p.k, p.v, p.captures, p.form.sizes, 0.0, None)
    with torch.no_grad(), _Largest() as largest:
        out, hi, lo = call.forward()
        call.backward(out, hi, lo, p.grad_out, None, [True, True, True, *p.form.differentiable])
    assert largest.elements < length * length / 8


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("name", ["alibi_grad", "padding_replace_inf", "bottom_right_min"])
def test_operators_pass_opcheck(name: str, layout: str) -> None:
    p = problem(replace(CASES[name], layout=layout))
    plan = KERNEL.plan(p.request()).to_text()
    common = (p.q, p.k, p.v, list(p.captures), list(p.form.sizes), 0.0, None)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(tiled_forward, (*common, plan), test_utils=checks)
    out, lse, low = tiled_forward(*common, plan)
    torch.library.opcheck(tiled_backward, (*common, out, lse, low, p.grad_out, None, [True, False, True, *p.form.differentiable], plan), test_utils=checks)


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_traces_with_symbolic_lengths(layout: str) -> None:
    """One trace serves other lengths and batch sizes, without a guard on either."""
    p = problem(Case("trace", "bottom_right_min", Dims(b=2, hq=4, hkv=2, lq=20, lk=30), layout=layout))
    plan, needs = KERNEL.plan(p.request()), all_needs(p)

    def both(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> list[Tensor | None]:
        inputs = Inputs(q, k, v, (), (q.shape[2], k.shape[2]), 0.0, None)
        result = KERNEL.forward(plan, inputs)
        gradients = KERNEL.backward(plan, inputs, result, grad_out, needs)
        return [result.out, gradients.q, gradients.k, gradients.v]

    traced = make_fx(both, tracing_mode="symbolic")(p.q, p.k, p.v, p.grad_out)
    environment = traced.shape_env
    assert not [g for g in environment.guards if "Eq" in str(g.expr)], environment.guards
    other = problem(Case("other", "bottom_right_min", Dims(b=3, hq=4, hkv=2, lq=51, lk=41), layout=layout))
    for got, want in zip(traced(other.q, other.k, other.v, other.grad_out), both(other.q, other.k, other.v, other.grad_out), strict=True):
        assert got is not None and want is not None and got.stride() == want.stride()
        torch.testing.assert_close(got, want)


def test_autocast_does_not_reach_inside() -> None:
    p = problem("causal_inf")
    _, want, want_gradients = run_kernel(KERNEL, p)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, got, gradients = run_kernel(KERNEL, p)
    assert torch.equal(got.out, want.out) and torch.equal(gradients.q, want_gradients.q)  # type: ignore[arg-type]


def test_choose_tiles_keeps_the_block_small() -> None:
    for shape in (Shape(1, 8, 8, 2048, 2048, 64, 64), Shape(32, 12, 12, 128, 128, 64, 64), Shape(4, 32, 8, 1, 4096, 128, 128), Shape(1, 1, 1, 1, 1, 8, 8)):
        t = choose_tiles(shape, 128, 512, 1 << 18)
        block = t.q * t.k * t.batches * t.kv_heads * shape.group
        assert block <= 1 << 18 or (t.batches == t.kv_heads == 1), (shape, t)
        assert t.batches <= shape.batch and t.kv_heads <= shape.kv_heads and (t.batches == 1 or t.kv_heads == shape.kv_heads)


def test_refuses_other_dtypes() -> None:
    (refusal,) = KERNEL.why_not(problem("plain").to(torch.float64).request())
    assert refusal.code == "tiled_dtype" and "float64" in refusal.text
    assert not KERNEL.why_not(problem(Case("tall", "bottom_right_min", TALL)).request())
    assert not KERNEL.why_not(problem(Case("rectangle", "swin_grad", RECTANGLE)).request())


@pytest.mark.parametrize("form", ["plain", "causal_inf", "padding_replace_min"])
@pytest.mark.parametrize("dims", [Dims(lk=0), Dims(lq=0), Dims(b=0)])
def test_empty_tensors(form: str, dims: Dims) -> None:
    p = problem(Case("empty", form, dims))
    _, result, gradients = run_kernel(KERNEL, p)
    assert result.out.shape == p.grad_out.shape and (result.out == 0).all()
    for gradient, like in ((gradients.q, p.q), (gradients.k, p.k), (gradients.v, p.v)):
        assert gradient is not None and gradient.shape == like.shape and (gradient == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*FORMS, "causal_inf-gqa", "softcap_window_inf-bfloat16", "padding_replace_min-blhd"])
def test_on_a_gpu(name: str) -> None:
    check(KERNEL, name, "cuda")


@pytest.mark.gpu
def test_dropout_on_a_gpu_is_that_of_the_cpu() -> None:
    p, seed = problem("causal_inf"), torch.tensor([3, 4])
    _, cpu, _ = run_kernel(KERNEL, p, dropout_p=0.5, seed=seed)
    _, gpu, _ = run_kernel(KERNEL, problem("causal_inf", "cuda"), dropout_p=0.5, seed=seed.cuda())
    torch.testing.assert_close(gpu.out.cpu(), cpu.out, rtol=1e-4, atol=1e-5)


def test_cuda_graphs_leave_it_out() -> None:
    """Its loops read facts about the data from the device."""
    for op in (torch.ops.fa_inductor.tiled_forward.default, torch.ops.fa_inductor.tiled_backward.default):
        assert torch.Tag.cudagraph_unsafe in op.tags
