"""Writes, aliases, grad modes and memory layouts around an attention: the rewritten graph computes what eager computes.

Each program was once computed wrongly, or crashed, where eager and Inductor are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusing import sites_of
from torch import Tensor

import fa_inductor
from fa_inductor.options import Options

B, H, L, D = 2, 4, 8, 4


def rand(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def qkv() -> list[Any]:
    return [rand(B, H, L, D) for _ in range(3)]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def cache_copied_and_updated(q, cache, new, positions, v):
    keys = cache.clone()
    keys.transpose(1, 2).index_copy_(1, positions, new.transpose(1, 2))
    return attend(q, keys, v)


def mask_written_through_its_transpose(q, k, v):
    m = torch.ones(L, L)
    m[:, 0] = 0
    n = m.t()
    m[2] = 0
    return (q @ k.mT).masked_fill(n == 0, -1e9).softmax(-1) @ v, m, n


def keys_copied_and_cut(q, k, v):
    kk = k.clone()
    kk[:, :, 0].fill_(0.0)
    return attend(q, kk, v), kk, kk[0]


def generated_mask_written(q, k, v):
    m = torch.zeros(L, L)
    m[:, 4:].fill_(-1e9)
    return (q @ k.mT + m).softmax(-1) @ v, m, m[0]


def values_copied_without_gradient(q, k, v):
    with torch.no_grad():
        vv = v.contiguous().clone()
    return attend(q, k, vv)


def mask_source_written_afterwards(q, k, v, n):
    out = (q @ k.mT).masked_fill(torch.arange(L) >= n[:, None, None, None], -1e9).softmax(-1) @ v
    n.add_(1)
    return out


def output_written(q, k, v):
    out = attend(q, k, v)
    out[:, :, 0] = 1.0
    out.mul_(2.0)
    return out


def output_viewed(x, w):
    q, k, v = (y.view(2, 8, 4, 4).transpose(1, 2) for y in (x @ w).split(16, 2))
    return attend(q, k, v).view(8, 8, 4)


def output_strided(q, k, v):
    return torch.as_strided(attend(q, k, v), (4, 4), (16, 1))


def chain(q, k, v):
    return (q @ k.mT).softmax(-1) @ ((k @ q.mT).softmax(-1) @ v)


def negative_places(q, k, v):
    i = torch.arange(L)
    return (q @ k.mT + torch.arange(16)[i[:, None] - i[None]] * 0.1).softmax(-1) @ v


def narrowed_documents(q, k, v, ids):
    return (q @ k.mT).masked_fill(ids[:, None] != ids[None].to(torch.int32), -1e9).softmax(-1) @ v


def int32_overflow(q, k, v, i):
    return (q @ k.mT + ((i * 2**30) * 4)[None]).softmax(-1) @ v


def fill_beyond_fp32(q, k, v, m):
    return (q @ k.mT + (1 - m.float()) * torch.finfo(torch.float32).min * 10).softmax(-1) @ v


def float_positions(q, k, v):
    return (q @ k.mT + torch.arange(0, 1, 1 / L)).softmax(-1) @ v


def one_key_head_more_value_heads(q, k, v):
    return attend(q, k, v)


def unequal_groups(q, k, v):
    return attend(q, k.repeat_interleave(4, 1), v.repeat_interleave(2, 1))


def scores_shared_by_heads(q, k, v):
    return (q[:, :1] @ k[:, :1].mT).expand(B, H, L, L).softmax(-1) @ v


def softmin(q, k, v):
    return torch.nn.functional.softmin(q @ k.mT, -1) @ v


def no_heads(q, k, v):
    return attend(q, k, v)


def transposed() -> list[Any]:
    return [torch.randn(B, L, H, D).transpose(1, 2).requires_grad_(), rand(B, H, L, D), rand(B, H, L, D)]


FUSED: list[tuple[Callable[..., Any], Callable[[], list[Any]]]] = [
    (cache_copied_and_updated, lambda: [rand(B, H, L, D), torch.randn(B, H, 16, D), torch.randn(B, H, 8, D), torch.arange(3, 11), rand(B, H, 16, D)]),
    (mask_written_through_its_transpose, qkv),
    (keys_copied_and_cut, qkv),
    (generated_mask_written, qkv),
    (values_copied_without_gradient, qkv),
    (mask_source_written_afterwards, lambda: [*qkv(), torch.tensor([3, 5])]),
    (output_written, qkv),
    (output_viewed, lambda: [rand(2, 8, 16), rand(16, 48)]),
    (output_strided, transposed),
    (attend, transposed),
    (chain, qkv),
    (negative_places, qkv),
    (narrowed_documents, lambda: [*qkv(), torch.tensor([2**32 * 3 + i // 2 for i in range(L)])]),
    (int32_overflow, lambda: [*qkv(), torch.arange(L, dtype=torch.int32)]),
    (fill_beyond_fp32, lambda: [*qkv(), torch.ones(L, L).tril() > 0]),
    (float_positions, qkv),
    (one_key_head_more_value_heads, lambda: [rand(B, H, L, D), rand(B, 1, L, D), rand(B, H, L, D)]),
    (unequal_groups, lambda: [rand(B, H, L, D), rand(B, 1, L, D), rand(B, 2, L, D)]),
    (scores_shared_by_heads, qkv),
    (softmin, qkv),
]


def tensors(x: Any) -> list[Tensor]:
    return list(x) if isinstance(x, tuple) else [x]


def gradients(outputs: list[Tensor], inputs: list[Any]) -> list[Tensor | None]:
    leaves = [x for x in inputs if x.requires_grad]
    total = sum((o * torch.arange(o.numel()).view(o.shape)).sum() for o in outputs if o.requires_grad)
    return list(torch.autograd.grad(total, leaves, allow_unused=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(("function", "inputs"), FUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_same_as_eager(function: Callable[..., Any], inputs: Callable[[], list[Any]]) -> None:
    torch.manual_seed(0)
    mine = inputs()
    theirs = [x.detach().clone().requires_grad_(x.requires_grad) for x in mine]
    result, sites = sites_of(function, *mine)
    expected = tensors(function(*theirs))
    assert all(s.fused for s in sites) and sites, "\n".join(map(str, sites))
    for a, b in zip(tensors(result), expected):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert a.stride() == b.stride()
    for a, b in zip(gradients(tensors(result), mine), gradients(expected, theirs)):
        assert (a is None) == (b is None), "a gradient that eager does not have, or the other way round"
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b)  # inputs are written to alike


REFUSED: list[tuple[str, Callable[..., Any]]] = [
    ("output_addend", lambda q, k, v: torch.baddbmm(q[0], (q[0] @ k[0].mT).softmax(-1), v[0], beta=0.7, alpha=0.5)),
    ("output_addend", lambda q, k, v: torch.addmm(q[0, 0], (q[0, 0] @ k[0, 0].mT).softmax(-1), v[0, 0])),
    ("post_softmax_op", lambda q, k, v: torch.nan_to_num((q @ k.mT).softmax(-1), nan=0.5) @ v),
    ("blocked_probabilities", lambda q, k, v: (q @ k.mT).softmax(-1).flip(-1) @ v),
    ("whole_numbers", lambda q, k, v: ((q.detach() @ k.detach().mT * 40).to(torch.int8).float()).softmax(-1) @ v),
]


@pytest.mark.parametrize(("code", "function"), REFUSED)
def test_refused_with_its_reason(code: str, function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    inputs = qkv()
    result, sites = sites_of(function, *inputs)
    assert [s.refusal and s.refusal.code for s in sites] == [code], "\n".join(map(str, sites))
    torch.testing.assert_close(result, function(*inputs))


def test_no_elements() -> None:
    q = torch.randn(2, 0, 8, 4)
    result, sites = sites_of(attend, q, q, q)
    assert result.shape == q.shape and [s.refusal and s.refusal.code for s in sites] == ["empty"]


def test_a_contiguous_copy_that_eager_does_not_need_is_kept() -> None:
    """In inference Inductor makes the cat a clone, which is not contiguous as eager's cat is: without the copy the view fails."""

    def function(x: Tensor, nothing: Tensor) -> Tensor:
        x = torch.cat((x.transpose(1, 2), nothing.transpose(1, 2)), -1).contiguous().view(B * H, L, D)
        return attend(x, x, x)

    x, nothing = torch.randn(B, L, H, D), torch.randn(B, L, H, 0)
    torch._dynamo.reset()
    fa_inductor.reset()
    result = torch.compile(function, backend="flashattn", dynamic=False)(x, nothing)
    assert fa_inductor.counters()["rewritten"] == 1
    torch.testing.assert_close(result, function(x, nothing))


def test_a_product_written_to_an_input_arrives_there() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        torch.matmul((q @ k.mT).softmax(-1), v, out=out)
        return out * 2

    q, k, v = (torch.randn(B, H, L, D) for _ in range(3))
    mine, theirs = torch.zeros(B, H, L, D), torch.zeros(B, H, L, D)
    result, sites = sites_of(function, q, k, v, mine)
    assert [s.refusal and s.refusal.code for s in sites] == ["unsupported_product"]
    torch.testing.assert_close(result, function(q, k, v, theirs))
    torch.testing.assert_close(mine, theirs)


def test_a_checkpointed_attention_reads_what_is_written_to_after_it() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        out = torch.utils.checkpoint.checkpoint(lambda q, k, v: (q @ k.mT + m).softmax(-1) @ v, q, k, v, use_reentrant=False)
        m.add_(1.0)
        return out

    mine = qkv()
    theirs = [x.detach().clone().requires_grad_() for x in mine]
    m, copy = torch.zeros(L, L), torch.zeros(L, L)
    torch._dynamo.reset()
    fa_inductor.reset()
    result = torch.compile(function, backend="flashattn")(*mine, m)
    expected = function(*theirs, copy)
    assert fa_inductor.counters()["rewritten"] == 1
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(m, copy)
    for a, b in zip(torch.autograd.grad(result.sum(), mine), torch.autograd.grad(expected.sum(), theirs)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", [None, "tiled"])
def test_a_bias_that_never_matters_has_a_gradient_of_zeros(kernel: str | None) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        return (q @ k.mT + torch.where(torch.zeros(L, L, dtype=torch.bool), b, 0.0)).softmax(-1) @ v

    inputs = [*qkv(), rand(L, L)]
    result, sites = sites_of(function, *inputs, options=Options(kernel=kernel))
    assert [s.fused for s in sites] == [True]
    grads = torch.autograd.grad(result.sum(), inputs)
    assert torch.equal(grads[3], torch.zeros(L, L))


def test_an_infinite_gradient_at_the_corner_of_abs_is_nan_as_in_eager() -> None:
    q, k, v = qkv()
    with torch.no_grad():
        q[:, :, 2] = 0.0

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).abs().sqrt().softmax(-1) @ v

    result, sites = sites_of(function, q, k, v)
    assert [s.fused for s in sites] == [True]
    ours, eager = (torch.autograd.grad(out.sum(), (q, k)) for out in (result, function(q, k, v)))
    for a, b in zip(ours, eager):
        assert torch.equal(a.isnan(), b.isnan()) and b.isnan().any()


def test_a_checkpoint_that_trains_nothing_runs() -> None:
    """PyTorch's CPU kernel counts as random, which Inductor refuses to run again in such a checkpoint."""
    q, k, v = (x.detach() for x in qkv())
    function = lambda q, k, v: torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False)  # noqa: E731
    torch._dynamo.reset()
    fa_inductor.reset()
    torch.testing.assert_close(torch.compile(function, backend="flashattn")(q, k, v), attend(q, k, v))
    assert fa_inductor.counters()["rewritten"] == 1


def test_a_division_by_zero_costs_no_model() -> None:
    q, k, v = (torch.randn(B, H, L, D) for _ in range(3))
    result, _ = sites_of(lambda q, k, v: ((q @ k.mT) / 0.0 + torch.zeros(L, L)).softmax(-1) @ v, q, k, v)
    assert result.isnan().all()


@pytest.mark.parametrize(("fill", "shift"), [(-9000.0, 10000.0), (-1e9, 2e9)])
@pytest.mark.parametrize("kernel", [None, "tiled"])
def test_visible_scores_below_a_finite_fill(fill: float, shift: float, kernel: str | None) -> None:
    """Then the hidden keys win, as in eager: no tile of them may be skipped."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        return (q @ k.mT).masked_fill(torch.ones(length, length).triu(1).bool(), fill).softmax(-1) @ v

    q, k, v = -torch.ones(1, 1, 700, 4), torch.full((1, 1, 700, 4), shift / 4), torch.randn(1, 1, 700, 4)
    result, sites = sites_of(function, q, k, v, options=Options(kernel=kernel))
    assert [s.fused for s in sites] == [True]
    torch.testing.assert_close(result, function(q, k, v))


@pytest.mark.parametrize(
    "scale",
    [lambda q: math.sqrt(q.shape[2]), lambda q: q.shape[2] ** 0.5, lambda q: q.shape[2]],
    ids=["sqrt", "power", "integer"],
)
def test_a_scale_from_the_length_does_not_recompile(scale: Callable[[Tensor], Any]) -> None:
    """dynamic=True: the scale is a symbolic number, read by the kernel as a tensor."""
    compilations = torch._dynamo.testing.CompileCounterWithBackend("flashattn")
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: (q @ k.mT / scale(q)).softmax(-1) @ v, backend=compilations, dynamic=True)
    for batch, length in [(2, 8), (3, 8), (2, 11), (4, 20)]:
        q, k, v = (torch.randn(batch, H, length, D) for _ in range(3))
        torch.testing.assert_close(compiled(q, k, v), (q @ k.mT / scale(q)).softmax(-1) @ v, rtol=1e-4, atol=1e-5)
    assert compilations.frame_count == 1


class Annealed(torch.nn.Module):
    """A bias that is changed after it was used."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.randn(H, L, L))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = (q @ k.mT + self.bias).softmax(-1) @ v
        self.bias.mul_(0.5)
        return out


class Counted(torch.nn.Module):
    """A mask that depends on a number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = (q @ k.mT).masked_fill(torch.arange(L) > self.seen, -1e9).softmax(-1) @ v
        self.seen += 2
        return out


@pytest.mark.parametrize("module", [Annealed, Counted])
@pytest.mark.parametrize("kernel", ["auto", "tiled"])
def test_what_is_written_after_its_use_is_kept_for_the_gradient(module: type[torch.nn.Module], kernel: str) -> None:
    """With all of Inductor, which takes plain copies away."""
    found = []
    inputs = qkv()
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = module()
        call = torch.compile(model, backend="flashattn", options={"kernel": kernel, "strict": True}) if compiled else model
        found.append(torch.autograd.grad(call(*inputs).square().sum(), inputs))
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def _in_a_checkpoint(write: Callable[[Tensor], Any], x: Tensor, other: Tensor) -> Tensor:
    """``x`` is written to in a checkpoint's body, which returns the double of ``other``."""
    return torch.utils.checkpoint.checkpoint(lambda other, x: (write(x), other * 2)[1], other, x, use_reentrant=False)


def mask_written_in_a_checkpoint(q, k, v):
    m = torch.ones(L, L, dtype=torch.bool, device=q.device).tril().clone()
    q = _in_a_checkpoint(lambda m: m.fill_(True), m, q)
    return (q @ k.mT).masked_fill(~m, -math.inf).softmax(-1) @ v


def given_mask_copied_and_written_in_a_checkpoint(q, k, v, m):
    m = m.clone()
    q = _in_a_checkpoint(lambda m: m.fill_(True), m, q)
    return (q @ k.mT).masked_fill(~m, -math.inf).softmax(-1) @ v


def keys_copied_and_written_in_a_checkpoint(q, k, v):
    keys = k.clone()
    v = _in_a_checkpoint(lambda x: x.mul_(2), keys, v)
    return attend(q, keys, v)


def zeros_written_in_a_checkpoint(q, k, v):
    bias = torch.zeros(L, L, device=q.device)
    q = _in_a_checkpoint(lambda x: x.add_(torch.arange(L)), bias, q)
    return (q @ k.mT + bias).softmax(-1) @ v


def contiguous_queries_written_in_a_checkpoint(q, k, v):
    queries = q.transpose(1, 2).contiguous().transpose(1, 2)
    v = _in_a_checkpoint(lambda x: x.mul_(3), queries, v)
    return attend(queries, k, v)


CHECKPOINTED = [
    mask_written_in_a_checkpoint,
    given_mask_copied_and_written_in_a_checkpoint,
    keys_copied_and_written_in_a_checkpoint,
    zeros_written_in_a_checkpoint,
    contiguous_queries_written_in_a_checkpoint,
]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("function", CHECKPOINTED, ids=lambda f: f.__name__)
def test_what_a_checkpoint_writes_is_read(function: Callable[..., Tensor], train: bool) -> None:
    """A copy that a higher-order node writes to does not hold what it was made from."""
    inputs = [x.detach().requires_grad_(train) for x in qkv()]
    given = [torch.ones(L, L, dtype=torch.bool).tril()] if "given" in function.__name__ else []
    torch._dynamo.reset()
    result, expected = (f(*inputs, *given) for f in (torch.compile(function, backend="flashattn"), function))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    if train:
        for a, b in zip(*(torch.autograd.grad(o.square().sum(), inputs) for o in (result, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_what_a_triton_kernel_of_the_users_writes() -> None:
    """Its node in Dynamo's graph is a higher-order one: all that it is given counts as written."""
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    from fa_inductor.normalize.aliases import CLEAN, writes

    with torch._subclasses.FakeTensorMode():
        value = torch.empty(4)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = value
    launch = graph.call_function(triton_kernel_wrapper_mutation, (), {"kernel_idx": 0, "grid": [(1, 1, 1)], "kwargs": {"X": x}})
    assert writes(launch) == [x]
    launch.meta[CLEAN] = True
    assert writes(launch) == []
