"""The Triton kernels on a GPU: cases of every form, sizes, dropout, and compiled by Inductor."""

from __future__ import annotations

import re

import pytest
import tile_checks
import torch
from kernel_cases import CASES, Case, Dims, all_needs, check, problem, run_kernel
from rendered import compare

import fa_inductor.op  # noqa: F401  (registers the operators)
from fa_inductor.kernels.triton_fa2 import KERNEL
from fa_inductor.request import Inputs, Needs

pytestmark = pytest.mark.gpu

NAMES = [n for n in CASES if re.search(r"float16$|^(plain|causal_inf|softcap|bias_hqk_grad|padding_replace_min)$|-d\d", n)]


@pytest.mark.parametrize("name", NAMES)
def test_case(name: str) -> None:
    p = problem(name, "cuda")
    supported = not KERNEL.why_not(p.request())
    check(KERNEL, name, "cuda", needs=all_needs(p, capture_gradients=supported))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [64, 72, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("form", ["plain", "causal_min"])
def test_long(form: str, d: int, dtype: torch.dtype) -> None:
    check(KERNEL, Case(f"{form}-{d}", form, Dims(2, 4, 2, 515, 515, d, d), dtype), "cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dims", [Dims(2, 4, 2, 1000, 1000, 64, 64), Dims(1, 2, 2, 600, 1024, 128, 128), Dims(2, 2, 1, 1023, 769, 80, 40)])
@pytest.mark.parametrize("form", ["documents_inf", "blocks_inf_hidden_rows", "blocks_min_hidden_rows"])
def test_lists_of_tiles_are_walked(form: str, dims: Dims, dtype: torch.dtype) -> None:
    case = Case("listed", form, dims, dtype)
    assert KERNEL.plan(problem(case, "cuda").request()).get("lists")
    check(KERNEL, case, "cuda")


@pytest.mark.parametrize("first", [0, 1000, 2000])
def test_conditions_in_assembly(first: int) -> None:
    assert compare(first, 200, "cuda") > 60


@pytest.mark.parametrize("layout", ["dense", "words", "odd", "transposed"])
@pytest.mark.parametrize("dtype", ["bool", "float32", "bfloat16", "float16", "int64"])
def test_maps_and_lists(dtype: str, layout: str) -> None:
    tile_checks.map_of_numbers(dtype, layout, "cuda")
    tile_checks.map_claims(len(dtype) * 100 + len(layout), 10, "cuda")
    tile_checks.lists_of_tiles(70, 90, 32, 16, dtype == "bool", "cuda")


def test_many_small_windows() -> None:
    """More (b, h) than a grid's second dimension holds."""
    check(KERNEL, Case("windows", "bias_hqk_grad", Dims(24576, 3, 3, 49, 49, 32, 32), torch.float16), "cuda")


def test_dropout_mask_is_shared_by_forward_and_backward() -> None:
    """dV is the transposed mask times the gradient when scores are all equal; the mask is read off an identity V."""
    length, p = 256, 0.25
    seed = torch.tensor([9, 10], device="cuda")
    shape = Dims(1, 2, 2, length, length, 64, length)
    plan = KERNEL.plan(problem(Case("drop", "plain", shape, torch.float16), "cuda").request(p))
    zeros = torch.zeros(1, 2, length, 64, device="cuda", dtype=torch.float16)
    eye = torch.eye(length, device="cuda", dtype=torch.float16).expand(1, 2, length, length)
    inputs = Inputs(zeros, zeros, eye, (), (), p, seed)
    result = KERNEL.forward(plan, inputs)
    assert abs(float((result.out == 0).double().mean()) - p) < 0.01
    gradients = KERNEL.backward(plan, inputs, result, eye, Needs(True, True, True, ()))
    torch.testing.assert_close(gradients.v, result.out.mT)


def test_repeatable() -> None:
    """No atomics: two runs give the same bits."""
    p = problem(Case("repeat", "bias_hqk_grad", Dims(4, 4, 2, 300, 300, 64, 64), torch.bfloat16), "cuda")
    runs = [run_kernel(KERNEL, p)[2] for _ in range(2)]
    for a, b in zip((runs[0].q, runs[0].k, runs[0].v, *runs[0].captures), (runs[1].q, runs[1].k, runs[1].v, *runs[1].captures), strict=True):
        assert a is not None and b is not None and bool((a == b).all())


@pytest.mark.parametrize("form", ["causal_inf", "softcap", "bias_hqk_grad"])
def test_inductor_launches_the_same_kernels(form: str) -> None:
    p = problem(Case("inductor", form, Dims(2, 4, 2, 130, 130, 64, 64), torch.float16), "cuda")
    wanted, plan, sizes = all_needs(p), KERNEL.plan(p.request(0.1)).to_text(), list(p.form.sizes)
    needs = [wanted.q, wanted.k, wanted.v, *wanted.captures]
    seed = torch.tensor([3, 4], device="cuda")

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, captures: list[torch.Tensor]) -> list[torch.Tensor]:
        result = torch.ops.fa_inductor.attention(q, k, v, captures, [], sizes, 0.1, seed, plan)
        return [result[0], *torch.ops.fa_inductor.attention_backward(grad, None, q, k, v, captures, [], sizes, 0.1, seed, *result, needs, plan)]

    arguments = (p.q, p.k, p.v, p.grad_out, list(p.captures))
    for dynamic in (False, True):
        torch._dynamo.reset()
        for got, want in zip(torch.compile(step, dynamic=dynamic, fullgraph=True)(*arguments), step(*arguments), strict=True):
            # Inductor specialises the kernels' size arguments its own way, and ptxas contracts products and sums differently: a
            # probability near a rounding boundary of float16 may fall on the other side
            torch.testing.assert_close(got, want, rtol=1e-3, atol=2.0**-11 * float(want.abs().max()))
