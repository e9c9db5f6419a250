"""Through the real Inductor: what is refused stays eager's function, although Inductor's own attention patterns would change it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass

import fa_inductor


def qkv(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, 4, 16, 16, dtype=dtype) for _ in range(3)]


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * 0.25).softmax(-2) @ v


def over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * 0.25).softmax(1) @ v


def over_queries_behind_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a = (q @ k.transpose(-1, -2) * 0.25).softmax(-1) @ v
    return over_queries(a, k, v)


def vector_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.where(torch.arange(16) > 4, 0.0, -1e9)
    return (q @ k.transpose(-1, -2) / 4.0 + mask).softmax(-1) @ v


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("function", "dtype", "fused"),
    [
        (over_queries, torch.float32, 0),
        (over_heads, torch.float32, 0),
        (over_queries_behind_attention, torch.float32, 1),
        (over_queries, torch.float64, 0),
        (vector_mask, torch.float64, 0),
        (vector_mask, torch.float32, 1),
    ],
)
def test_a_refused_softmax_is_eagers(function: Callable[..., Tensor], dtype: torch.dtype, fused: int, train: bool) -> None:
    mine = [x.requires_grad_(train) for x in qkv(dtype)]
    theirs = [x.detach().clone().requires_grad_(train) for x in mine]
    if not train:
        torch._dynamo.reset()  # plain Inductor first: its cached graphs must not be taken for ours
        if function in (over_queries, over_heads):
            torch.compile(function, backend="inductor")(*mine)
        torch._dynamo.reset()
    ours, eager = torch.compile(function, backend="flashattn")(*mine), function(*theirs)
    assert fa_inductor.counters()["rewritten"] == fused
    torch.testing.assert_close(ours, eager)
    if train:
        for a, b in zip(torch.autograd.grad(ours.sin().sum(), mine), torch.autograd.grad(eager.sin().sum(), theirs)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def stridden(o: Tensor) -> Tensor:
    return o.as_strided((2, 3, 8, 4), (96, 32, 4, 1))


@pytest.mark.parametrize(
    "after",
    [
        lambda o: stridden(o) @ torch.eye(4),
        lambda o: F.layer_norm(stridden(o), (4,)),
        lambda o: o.contiguous().as_strided((2, 7, 2, 3, 4), (96, 12, 12, 4, 1)).sum(-2),
    ],
    ids=["matmul", "layer_norm", "overlapping"],
)
def test_a_fused_output_read_by_its_place_in_memory(after: Callable[[Tensor], Tensor]) -> None:
    """It must be where eager would have put it."""
    torch._dynamo.reset()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return after((q @ k.mT).softmax(-1) @ v)

    inputs = [torch.randn(2, 8, 3, 4) for _ in range(3)]
    before = fa_inductor.counters()["rewritten"]
    torch.testing.assert_close(torch.compile(function, backend="flashattn")(*inputs), function(*inputs))
    assert fa_inductor.counters()["rewritten"] == before + 1


def test_a_softmax_by_hand_in_a_branch_is_reported_and_eagers() -> None:
    def branch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.transpose(-1, -2) * 0.25
        e = (s - s.amax(-2, keepdim=True)).exp()
        return (e / e.sum(-2, keepdim=True)) @ v

    def function(q: Tensor, k: Tensor, v: Tensor, flag: Tensor) -> Tensor:
        out = (q @ k.transpose(-1, -2) * 0.25).softmax(-1) @ v
        return out + torch.cond(flag, branch, lambda q, k, v: q * 1.0, (q, k, v))

    inputs = [*qkv(), torch.tensor(True)]
    torch.testing.assert_close(torch.compile(function, backend="flashattn")(*inputs), function(*inputs))
    assert fa_inductor.counters()["rewritten"] == 1 and fa_inductor.counters()["refusals"] == {"operator_body": 1}


class Seen(CustomGraphPass):
    """A user's own pass."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.times += 1

    def uuid(self) -> str:
        return "seen"


def test_a_users_own_passes_still_run_and_nothing_is_left_in_the_graph() -> None:
    before, after, graphs = Seen(), Seen(), []

    class Look(Seen):
        def __call__(self, graph: torch.fx.Graph) -> None:
            graphs.append(str(graph))

    options: dict[str, Any] = {
        "joint_custom_pre_pass": before,
        "joint_custom_post_pass": after,
        "post_grad_custom_post_pass": Look(),
        "fx_graph_cache": False,
    }
    torch.compile(over_queries, backend="flashattn", options=options)(*qkv())
    assert (before.times, after.times) == (1, 1)
    assert graphs and not any("abs.default](args = (%exp" in g for g in graphs)


def test_tensors_without_data_are_refused_and_the_model_runs() -> None:
    q, k, v = (x.to("meta") for x in qkv())
    out = torch.compile(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, backend="flashattn")(q, k, v)
    assert out.shape == q.shape and out.device.type == "meta"
    assert fa_inductor.counters()["refusals"] == {"no_kernel": 1}


@pytest.mark.parametrize(
    ("options", "dtype", "word"),
    [({}, torch.float64, "float64"), ({"kernel": "triton"}, torch.float32, "triton_fa2")],
)
def test_what_was_surely_meant_to_be_fused_is_not_left_in_silence(options: dict[str, Any], dtype: torch.dtype, word: str, caplog: Any) -> None:
    q, k, v = qkv(dtype)
    with caplog.at_level(logging.WARNING, logger="fa_inductor"):
        torch.compile(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, backend="flashattn", options=options)(q, k, v)
    (said,) = [r.getMessage() for r in caplog.records if r.name == "fa_inductor"]
    assert "test_inductor.py:" in said and "stays unfused" in said and word in said


@pytest.mark.parametrize("train", [False, True])
def test_cpp_wrapper(train: bool) -> None:
    """The plan is a string argument in generated C++, where Inductor escapes nothing."""
    q, k, v = (torch.randn(2, 2, 9, 8).requires_grad_(train) for _ in range(3))

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (torch.tanh(q @ k.mT / 3) * torch.arange(9)).softmax(-1) @ v

    torch._dynamo.reset()
    fa_inductor.reset()
    result = torch.compile(function, backend="flashattn", options={"cpp_wrapper": True})(q, k, v)
    assert fa_inductor.counters()["rewritten"] == 1
    torch.testing.assert_close(result, function(q, k, v))
    if train:
        ours, eager = (torch.autograd.grad(out.sum(), (q, k, v)) for out in (result, function(q, k, v)))
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
