"""What autograd sees of a fused function: which inputs get a gradient at all, and what may be done to its output before backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_inductor

B, H, L, D = 2, 2, 9, 8


def tensors(*shapes: tuple[int, ...], grad: bool = True) -> list[Tensor]:
    return [torch.randn(s).requires_grad_(grad) for s in shapes]


def compiled(function: Callable[..., Any], options: dict[str, Any] | None = None) -> Callable[..., Any]:
    torch._dynamo.reset()
    fa_inductor.reset()
    return torch.compile(function, backend="flashattn", options=options)


# -- the output is changed before backward -------------------------------------------------------------------------------
def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(q @ k.mT / 3).softmax(-1) @ v


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def heads_merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v).transpose(1, 2).reshape(B, L, H * D)


def beside_a_part_of_it(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = attend(q, k, v)
    return out[:, :1], out.exp()


def wipe(out: Tensor) -> None:
    out.data.zero_()


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "scaled": lambda out: out.mul_(2.0),
    "relu": lambda out: out.relu_(),
    "part_set": lambda out: out.__setitem__((slice(None), 0), 0.0),
    "behind_autograd": wipe,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kernel", ["auto", "tiled"])
@pytest.mark.parametrize("function", [attend, plain, heads_merged, beside_a_part_of_it])
def test_output_changed_in_place(function: Callable[..., Any], kernel: str, change: str) -> None:
    """Eager does not save the output for its backward pass: changing it is allowed, and changes no gradient but by autograd's rules."""
    inputs = tensors(*[(B, H, L, D)] * 3)

    def gradients(f: Callable[..., Any]) -> tuple[Tensor, ...]:
        outputs = f(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        CHANGES[change](outputs[0])
        return torch.autograd.grad(sum(o.sum() for o in outputs), inputs)  # type: ignore[arg-type]

    ours = gradients(compiled(function, {"kernel": kernel}))
    assert fa_inductor.counters()["rewritten"] == 1
    for a, b in zip(ours, gradients(function)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "einsum": lambda out: torch.einsum("bhnd->bnhd", out),
    "ravel": lambda out: out.ravel(),
    "unfold": lambda out: out.unfold(2, 3, 3),
    "diagonal": lambda out: out.diagonal(0, 2, 3),
    "as_strided": lambda out: out.as_strided((2, 2, 4, 8), (144, 72, 8, 1)),
    "tensor_split": lambda out: out.tensor_split(2, dim=2)[0],
    "broadcast_to": lambda out: torch.atleast_3d(out).broadcast_to(B, H, L, D),
    "dropout_in_evaluation": lambda out: torch.nn.functional.dropout(out, 0.5, training=False),
    "dropout_of_nothing": lambda out: torch.nn.functional.dropout(out, 0.0, training=True),
    "type_as": lambda out: out.type_as(torch.zeros(1)),
    "pad": lambda out: torch.nn.functional.pad(out, (0, 0)),
    "cat": lambda out: torch.cat([out]),
    "positive": lambda out: torch.positive(out),
    "clone": lambda out: out.clone(),
    "zero_added": lambda out: out + 0,
    "zeros_added": lambda out: out + torch.zeros_like(out),
    "times_one": lambda out: out * 1.0,
}


@pytest.mark.parametrize("kernel", ["auto", "tiled"])
@pytest.mark.parametrize("alias", ALIASES)
def test_what_may_share_the_outputs_memory_is_changed(alias: str, kernel: str) -> None:
    inputs = tensors(*[(B, H, L, D)] * 3)

    def gradients(f: Callable[..., Any]) -> tuple[Tensor, ...]:
        out = f(*inputs)
        out.data.mul_(0.5)
        return torch.autograd.grad(out.sum(), inputs)

    function = lambda q, k, v: ALIASES[alias](plain(q, k, v))  # noqa: E731
    for a, b in zip(gradients(compiled(function, {"kernel": kernel})), gradients(function)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# -- None or zeros -------------------------------------------------------------------------------------------------------
NO_GRADIENT: dict[str, Callable[..., Tensor]] = {
    "compared_scores": lambda q, k, v, t: ((q @ k.mT) > 0).float().softmax(-1) @ v,
    "chosen_by_the_scores": lambda q, k, v, t: torch.where(q @ k.mT > 0, 1.0, -1.0).softmax(-1) @ v,
    "bias_compared": lambda q, k, v, t: (q @ k.mT + (t > 0).float()).softmax(-1) @ v,
    "mask_compared": lambda q, k, v, t: (q @ k.mT).masked_fill(t > 0, -5.0).softmax(-1) @ v,
    "factor_compared": lambda q, k, v, t: ((q @ k.mT).softmax(-1) * (t > 0)) @ v,
    "threshold": lambda q, k, v, t: (lambda s: torch.where(s > t, s, -5.0).softmax(-1) @ v)(q @ k.mT),
    "sign": lambda q, k, v, t: torch.sign(q @ k.mT).softmax(-1) @ v,
    "zeros": lambda q, k, v, t: ((q @ k.mT) * 0 + t).softmax(-1) @ v,
    "all_filled": lambda q, k, v, t: (q @ k.mT).masked_fill(torch.ones(L, L) > 0, 1.0).softmax(-1) @ v,
}


@pytest.mark.parametrize("values_train", [False, True])
@pytest.mark.parametrize("name", NO_GRADIENT)
def test_gradients_that_eager_does_not_have(name: str, values_train: bool) -> None:
    """None through a comparison, zeros through sign(): an optimiser with weight decay or momentum tells them apart."""
    function = NO_GRADIENT[name]

    def grads(f: Callable[..., Tensor]) -> tuple[bool, list[Tensor | None]]:
        torch.manual_seed(0)
        inputs = tensors((B, H, L, D), (B, H, L, D), (B, H, L, D), (L, L))
        inputs[2].requires_grad_(values_train)
        out = f(*inputs)
        if out.requires_grad:
            out.square().sum().backward()
        return out.requires_grad, [x.grad for x in inputs]

    (ours_needs, ours), (eager_needs, eager) = grads(compiled(function)), grads(function)
    assert ours_needs == eager_needs
    assert [g is None for g in ours] == [g is None for g in eager]
    for a, b in zip(ours, eager):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
