"""On a GPU: every form through the Triton kernel and through what selection picks, in three dtypes; real models end to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_band  # noqa: F401 (adds its forms to FORMS)
import test_columns  # noqa: F401
import test_deferred  # noqa: F401
import test_forms
import test_joined  # noqa: F401
import test_masks  # noqa: F401
import test_overwrites  # noqa: F401
import torch
import torch.nn.functional as F
from fusing import assert_close, check
from model_zoo import MODELS
from test_forms import FORMS
from test_models import check_model
from torch import Tensor

from fa_inductor.options import Options

pytestmark = pytest.mark.gpu

TRITON_REFUSES = {"five_dimensional_two_biases", "groups_after_the_softmax"}
"""A learned bias that lacks part of the merged batch: its gradient is not a plain reduction. A factor on the probabilities that is trained."""

OVERFLOW_IN_FLOAT16 = {"merged_batch_and_heads_masked", "plus_a_tiny_number_that_counts", "corner_fifth_power"}
"""A fill and scores that are infinite and a number that is 0 there, so that eager computes something else."""


@pytest.fixture(autouse=True)
def on_the_gpu():
    test_forms.DEVICE = "cuda"
    torch.set_float32_matmul_precision("highest")
    yield
    test_forms.DEVICE = "cpu"


def cast(inputs: list[object], dtype: torch.dtype) -> list[object]:
    """Floats in ``dtype``; a parameter stays one."""

    def one(x: object) -> object:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        found = x.detach().to(dtype)
        return torch.nn.Parameter(found, x.requires_grad) if isinstance(x, torch.nn.Parameter) else found.requires_grad_(x.requires_grad)

    return [one(x) for x in inputs]


def form(name: str, dtype: torch.dtype) -> tuple[Callable[..., Any], list[object]]:
    """The function and its inputs in a dtype. Some that mix dtypes or fill with -1e9 eager itself refuses in half precision."""
    torch.manual_seed(0)
    function, inputs = FORMS[name]
    arguments = cast(inputs(), dtype)
    if dtype is not torch.float32:
        try:
            function(*arguments)
        except RuntimeError as error:
            pytest.skip(f"eager itself fails: {error}")
    return function, arguments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", sorted(set(FORMS) - TRITON_REFUSES))
def test_triton(name: str, dtype: torch.dtype) -> None:
    if dtype is torch.float16 and name in OVERFLOW_IN_FLOAT16:
        pytest.skip("numbers beyond float16")
    (site, *_) = check(*form(name, dtype), options=Options(kernel="triton_fa2"))
    assert site.kernel == "triton_fa2"


@pytest.mark.parametrize("name", sorted(set(FORMS) - TRITON_REFUSES))
def test_selected(name: str) -> None:
    check(*form(name, torch.bfloat16))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernel", [None, "triton_fa2"], ids=["selected", "triton"])
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, kernel: str | None, autocast: torch.dtype | None) -> None:
    check_model(name, Options(kernel=kernel), device="cuda", autocast=autocast)


@pytest.mark.parametrize("kernel", ["auto", "triton_fa2", "tiled"])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_cuda_graphs(kernel: str, train: bool) -> None:
    """mode="reduce-overhead": recorded once, replayed on other data. The finite fill leaves a row without a visible key to be found at run time."""

    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return (q @ k.mT * 0.125).masked_fill(~keep[:, None, None], -1e4).softmax(-1) @ v

    fused = torch.compile(function, backend="flashattn", options={"mode": "reduce-overhead", "kernel": kernel})
    for step in range(5):
        q, k, v = (torch.randn(2, 4, 200, 64, device="cuda").requires_grad_(train) for _ in range(3))
        keep = torch.arange(200, device="cuda") < torch.tensor([[200 - step], [0]], device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        ours, eager = fused(q, k, v, keep), function(q, k, v, keep)
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
        if train:
            mine, theirs = (torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (ours, eager))
            for a, b in zip(mine, theirs):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("length", [32, 200])
def test_dropout_of_the_scores(length: int, dtype: torch.dtype) -> None:
    """The mask is read off equal scores and values of the identity; then scores are dropped by it, forward and backward."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(q @ k.mT * 0.25, 0.3).softmax(-1) @ v

    def call(*inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        torch.manual_seed(5)
        out = fused(*inputs)
        return out.detach(), torch.autograd.grad((out * weights).sum(), inputs)

    torch._dynamo.reset()
    fused = torch.compile(function, backend="flashattn", options={"kernel": "triton", "strict": True})
    weights = torch.randn(2, 3, length, length, device="cuda", dtype=dtype)
    ones = [torch.ones(2, 3, length, 32, device="cuda", dtype=dtype).requires_grad_() for _ in range(2)]
    eye = torch.eye(length, device="cuda", dtype=dtype).expand(2, 3, length, length).clone().requires_grad_()
    p, _ = call(*ones, eye)
    keep = p > 0.5 * p.amax(-1, keepdim=True)  # e^0 beside e^(8 / 0.7)
    assert 0.68 < float(keep.float().mean()) < 0.72
    inputs = [torch.randn_like(x).requires_grad_() for x in (*ones, eye)]
    ours, gradients = call(*inputs)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    results = []
    for q, k, v in (inputs, exact_inputs):
        out = (torch.where(keep, q @ k.mT * 0.25 / 0.7, 0.0).softmax(-1)) @ v
        results.append([out, *torch.autograd.grad((out * weights.to(out.dtype)).sum(), (q, k, v))])
    for mine, eager, exact in zip((ours, *gradients), *results):
        assert_close(mine, eager, exact)
