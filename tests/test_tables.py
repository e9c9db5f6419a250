"""Learned biases that are read from a table by index in the kernel: what is lifted, what stays PyTorch's, and the table's gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from fusing import check, sites_of
from torch import Tensor

from fa_inductor import lift

B, H, L, D = 2, 3, 17, 8
DEVICE = "cpu"


@pytest.fixture(autouse=True)
def tables_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lift, "SMALL_BIAS", 0)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).requires_grad_()


def qkv() -> list[Any]:
    return [rand(B, H, L, D) for _ in range(3)]


def distance() -> Tensor:
    i = torch.arange(L, device=DEVICE)
    return i[None, :] - i[:, None]


def clipped_distance(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Shaw et al. 2018: whole-number arithmetic, done in the kernel."""
    bias = F.embedding(distance().clamp(-4, 4) + 4, table)
    return (q @ k.mT + bias.permute(2, 0, 1)).softmax(-1) @ v


def logarithmic_buckets(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """T5: whole numbers made from logarithms, whose last bit decides: computed by PyTorch, stored in a byte each."""
    far = distance().abs()
    large = 4 + (torch.log(far.float() / 4) / math.log(4) * 4).to(torch.long)
    bucket = (distance() > 0).long() * 8 + torch.where(far < 4, far, torch.min(large, torch.full_like(large, 7)))
    return (q @ k.mT + F.embedding(bucket, table).permute(2, 0, 1)).softmax(-1) @ v


def stored_index(q: Tensor, k: Tensor, v: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Swin, BEiT: the index is a buffer."""
    bias = table[index.view(-1)].view(L, L, H).permute(2, 0, 1)[None]
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


def heads_first(q: Tensor, k: Tensor, v: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """LeViT."""
    return (q @ k.mT * 0.3 + table[:, index]).softmax(-1) @ v


def two_tables(q: Tensor, k: Tensor, v: Tensor, table: Tensor, other: Tensor, index: Tensor) -> Tensor:
    bias = table[index].permute(2, 0, 1) + F.embedding(distance().clamp(-4, 4) + 4, other).permute(2, 0, 1)
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


def index() -> Tensor:
    return torch.randint(-40, 40, (L, L), device=DEVICE)


FORMS: dict[Callable[..., Tensor], Callable[[], list[Any]]] = {
    clipped_distance: lambda: [*qkv(), rand(9, H)],
    logarithmic_buckets: lambda: [*qkv(), rand(16, H)],
    stored_index: lambda: [*qkv(), rand(40, H), index()],
    heads_first: lambda: [*qkv(), rand(H, 40), index()],
    two_tables: lambda: [*qkv(), rand(80, H), rand(9, H), index() + 40],
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("function", FORMS)
def test_tables(function: Callable[..., Tensor], dynamic: bool) -> None:
    check(function, FORMS[function](), dynamic=dynamic)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("function", FORMS)
def test_tables_on_the_gpu(function: Callable[..., Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "DEVICE", "cuda")
    (site,) = check(function, [x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x for x in FORMS[function]()])
    assert site.kernel == "triton_fa2"


def test_programs() -> None:
    programs = [sites_of(f, *inputs())[1][0].program for f, inputs in FORMS.items()]
    assert_expected_inline(
        "\n".join(programs),
        """\
s + c0[min(max(k - q, -4), 4) + 4, h]
s + c1[c0[q, k], h]
0.3*s + c1[where(c0[q, k] < 0, c0[q, k] + 40, c0[q, k]), h]
0.3*s + c1[h, where(c0[q, k] < 0, c0[q, k] + 40, c0[q, k])]
0.3*s + c1[where(c0[q, k] < 0, c0[q, k] + 80, c0[q, k]), h] + c2[min(max(k - q, -4), 4) + 4, h]""",
    )


def test_only_the_table_trains() -> None:
    q, k, v = (x.detach() for x in qkv())
    check(stored_index, [q, k, v, rand(40, H), index()])


def test_a_small_bias_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (site,) = check(stored_index, FORMS[stored_index]())
    assert site.program == "0.3*s + c0[h, q, k]"


@pytest.mark.parametrize(
    "embedding",
    [
        lambda i, t: F.embedding(i, t, padding_idx=3),
        lambda i, t: F.embedding(i, t, scale_grad_by_freq=True),
    ],
)
def test_gradients_of_their_own_stay_pytorchs(embedding: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The bias is then read as a tensor, and the table's gradient is PyTorch's."""

    def function(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return (q @ k.mT + embedding(distance().clamp(-4, 4) + 4, table).permute(2, 0, 1)).softmax(-1) @ v

    (site,) = check(function, FORMS[clipped_distance]())
    assert "c0[q, k, h]" in site.program or "c0[h, q, k]" in site.program


@pytest.mark.parametrize(
    "condition",
    [
        lambda d: torch.sqrt(d.float() ** 2) <= 3.0,
        lambda d: (d.float() / 3).floor() == -1,
        lambda d: torch.log2(d.abs().float() + 1).long() % 2 == 0,
    ],
)
def test_conditions_on_rounded_numbers_stay_pytorchs(condition: Callable[[Tensor], Tensor]) -> None:
    """sqrt, log and division differ in the last bit between libraries: a condition that hangs on it is not recomputed in a kernel."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~condition(distance()), -1e4).softmax(-1) @ v

    (site,) = check(function, qkv())
    assert "c0" in site.program and not any(word in site.program for word in ("sqrt", "log", "/"))
