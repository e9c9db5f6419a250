"""Calls of scaled_dot_product_attention with a mask: fused where that gains something, put back exactly where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusing import check, sites_of
from torch import Tensor

import fa_inductor
from fa_inductor import rewrite
from fa_inductor.options import Options

B, H, L, D = 2, 4, 17, 8
sdpa = F.scaled_dot_product_attention


def rand(*shape: int, grad: bool = True, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, device=device).requires_grad_(grad)


def qkv(device: str = "cpu") -> list[Any]:
    return [rand(B, H, L, D, device=device) for _ in range(3)]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[2], device=q.device)
    return sdpa(q, k, v, attn_mask=i[:, None] >= i, scale=0.3)


def causal_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, torch.full((L, L), float("-inf"), device=q.device, dtype=q.dtype).triu(1))


def bias(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return sdpa(q, k, v, attn_mask=b)


def grouped(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return sdpa(q, k[:, :2], v[:, :2], attn_mask=b, enable_gqa=True)


def heads_merged(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    out = sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=b)
    return out.transpose(1, 2).reshape(B, H, L * D)


def three_dimensional(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return sdpa(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), attn_mask=b)


def row_without_a_key(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """0, not NaN: the call's own rule."""
    i = torch.arange(L, device=q.device)
    return sdpa(q, k, v, attn_mask=torch.where(i[:, None] > i, b, float("-inf")))


def padding(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return sdpa(q, k, v, attn_mask=keep)


GAINS: dict[Callable[..., Tensor], Callable[[str], list[Any]]] = {
    causal: qkv,
    causal_added: qkv,
    bias: lambda d: [*qkv(d), rand(H, L, L, device=d)],
    grouped: lambda d: [*qkv(d), rand(H, L, L, device=d)],
    heads_merged: lambda d: [rand(B, L, H, D, device=d), rand(B, L, H, D, device=d), rand(B, L, H, D, device=d), rand(L, L, device=d)],
    three_dimensional: lambda d: [*qkv(d), rand(B * H, 1, L, device=d)],
    row_without_a_key: lambda d: [*qkv(d), rand(L, L, device=d)],
}


@pytest.mark.parametrize("function", GAINS)
def test_fused(function: Callable[..., Tensor]) -> None:
    check(function, GAINS[function]("cpu"))


@pytest.mark.parametrize("function", [bias, heads_merged, row_without_a_key])
def test_fused_with_symbolic_sizes(function: Callable[..., Tensor]) -> None:
    check(function, GAINS[function]("cpu"), dynamic=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("function", [*GAINS, padding])
def test_fused_on_the_gpu(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    inputs = [*qkv("cuda"), torch.rand(B, 1, 1, L, device="cuda") > 0.3] if function is padding else GAINS[function]("cuda")
    check(function, [x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x for x in inputs])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("function", GAINS)
def test_through_inductor(function: Callable[..., Tensor], autocast: bool) -> None:
    """The result, its dtype and its strides; under autocast the mask is rounded too."""
    inputs = GAINS[function]("cpu")
    torch._dynamo.reset()
    with torch.no_grad() if function is causal else torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, eager = torch.compile(function, backend="flashattn")(*inputs), function(*inputs)
    assert fa_inductor.counters()["rewritten"] == 1
    assert ours.dtype == eager.dtype and ours.shape == eager.shape and ours.stride() == eager.stride()
    torch.testing.assert_close(ours, eager, rtol=2e-2 if autocast else 1e-4, atol=2e-2 if autocast else 1e-5)


def test_dropout_next_to_a_mask() -> None:
    """PyTorch's CPU kernel has no dropout. With V the identity the output is the probabilities."""
    q, k, v = rand(1, 1, 64, D, grad=False), rand(1, 1, 64, D, grad=False), torch.eye(64)[None, None]
    b = rand(64, 64, grad=False)
    ours, (site,) = sites_of(lambda q, k, v, b: sdpa(q, k, v, attn_mask=b, dropout_p=0.5), q, k, v, b)
    exact, kept = sdpa(q, k, v, attn_mask=b), ours != 0
    assert site.fused and abs(kept.double().mean().item() - 0.5) < 0.04
    torch.testing.assert_close(ours[kept], 2 * exact[kept], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"strict": True}, {"kernel": "tiled"}])
def test_left_alone(options: dict[str, Any]) -> None:
    """A mask that is not trained is PyTorch's own kernel's on the CPU: no site, no refusal, the call as it was."""
    inputs = [*qkv(), torch.rand(B, 1, 1, L) > 0.3]
    ours, sites = sites_of(padding, *inputs, options=Options(**options))
    assert sites == []
    assert torch.equal(ours, padding(*inputs))


def test_left_alone_next_to_a_site() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return padding(padding(q, k, v, keep), k, (q @ k.mT).softmax(-1) @ v, keep)

    inputs = [*qkv(), torch.rand(B, 1, 1, L) > 0.3]
    _, (site,) = sites_of(function, *inputs)
    assert site.fused
    torch._dynamo.reset()
    ours, eager = torch.compile(function, backend="flashattn")(*inputs), function(*inputs)
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    for a, b in zip(torch.autograd.grad(ours.sum(), inputs[:3]), torch.autograd.grad(eager.sum(), inputs[:3])):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [True, False])
def test_encoder_layer(mask: bool) -> None:
    """nn.TransformerEncoderLayer calls it with a padding mask made into floats."""
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x, padded = torch.randn(2, 9, 32), torch.arange(9) >= torch.tensor([[9], [5]])
    torch._dynamo.reset()
    run = torch.compile(layer, backend="flashattn")
    keywords = {"src_key_padding_mask": padded} if mask else {}
    torch.testing.assert_close(run(x, **keywords), layer(x, **keywords), rtol=1e-4, atol=1e-5)


def test_a_failed_rewrite_costs_the_site_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("half way")

    monkeypatch.setattr(rewrite.SiteEmitter, "layout", fail)
    inputs = GAINS[bias]("cpu")
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(bias, backend="flashattn")(*inputs), bias(*inputs))
    assert fa_inductor.counters()["rewritten"] == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v, m: sdpa(q, k, v, attn_mask=m, dropout_p=-0.1),
        lambda q, k, v, m: sdpa(q, k, v, attn_mask=m, scale=0.0),
        lambda q, k, v, m: sdpa(q, k, v, attn_mask=m[None, None], scale=-1.0),
    ],
)
def test_odd_arguments(call: Callable[..., Tensor]) -> None:
    inputs = GAINS[bias]("cpu")
    inputs[3] = rand(L, L)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(call, backend="flashattn")(*inputs), call(*inputs), rtol=1e-4, atol=1e-5)
