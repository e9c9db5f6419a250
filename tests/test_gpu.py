"""On a GPU: every form through the Triton kernel and through what selection picks, in three dtypes; real models end to end."""

from __future__ import annotations

import pytest
import test_columns  # noqa: F401 (adds its forms to FORMS)
import test_deferred  # noqa: F401
import test_forms
import test_joined  # noqa: F401
import torch
from fusing import check
from model_zoo import MODELS
from test_forms import FORMS
from test_models import check_model
from torch import Tensor

from fa_inductor.options import Options

pytestmark = pytest.mark.gpu

TRITON_REFUSES = {"five_dimensional_two_biases", "groups_after_the_softmax"}
"""A learned bias that lacks part of the merged batch: its gradient is not a plain reduction. A factor on the probabilities that is trained."""

MIXED = {"padding_one_minus", "causal_additive_triu", "window_mask_per_image", "slopes_of_two_groups", "shifted_after_a_mask_of_the_least_number"}
"""A float32 mask makes float32 probabilities, which eager refuses to multiply with values of a lower precision. In float16, fills overflow
and tiny exponentials are 0."""
EAGER_REFUSES = {
    torch.bfloat16: MIXED,
    torch.float16: MIXED
    | {"merged_batch_and_heads_masked", "causal_inplace", "key_padding", "key_padding_of_everything", "plus_a_tiny_number_that_counts"}
    | {"three_pieces_in_two_products", "row_under_an_added_fill", "two_sinks_in_a_row_under_a_finite_fill"},
}


@pytest.fixture(autouse=True)
def on_the_gpu():
    test_forms.DEVICE = "cuda"
    torch.set_float32_matmul_precision("highest")
    yield
    test_forms.DEVICE = "cpu"


def cast(inputs: list[object], dtype: torch.dtype) -> list[object]:
    return [x.detach().to(dtype).requires_grad_(x.requires_grad) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", sorted(set(FORMS) - TRITON_REFUSES))
def test_triton(name: str, dtype: torch.dtype) -> None:
    if name in EAGER_REFUSES.get(dtype, ()):
        pytest.skip("eager itself fails in this dtype")
    torch.manual_seed(0)
    function, inputs = FORMS[name]
    (site, *_) = check(function, cast(inputs(), dtype), options=Options(kernel="triton_fa2"))
    assert site.kernel == "triton_fa2"


@pytest.mark.parametrize("name", sorted(set(FORMS) - TRITON_REFUSES - EAGER_REFUSES[torch.bfloat16]))
def test_selected(name: str) -> None:
    torch.manual_seed(0)
    function, inputs = FORMS[name]
    check(function, cast(inputs(), torch.bfloat16))


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
