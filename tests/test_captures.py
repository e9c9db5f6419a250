"""What is read from memory: where lifting stops, and in which order a captured tensor lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusing import check
from torch import Tensor

from fa_inductor import lift
from fa_inductor.backend import Compilation
from fa_inductor.options import Options
from fa_inductor.request import Plan

SIDE, WINDOW, H, D = 6, 3, 2, 8
L = WINDOW * WINDOW


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def shifted_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Swin's mask: windows of a shifted image see only what was together before the shift."""
    row, column = torch.arange(SIDE), torch.arange(SIDE)
    down = (row >= SIDE - WINDOW).long() + (row >= SIDE - 1).long()
    right = (column >= SIDE - WINDOW).long() + (column >= SIDE - 1).long()
    regions = (down[:, None] * 3 + right[None, :]).float()
    n = SIDE // WINDOW
    windows = regions.view(n, WINDOW, n, WINDOW).transpose(1, 2).reshape(n * n, L)
    difference = windows[:, None] - windows[:, :, None]
    mask = difference.masked_fill(difference != 0, -100.0).masked_fill(difference == 0, 0.0)
    scores = (q @ k.mT).view(-1, n * n, H, L, L) + mask[None, :, None]
    return scores.view(-1, H, L, L).softmax(-1) @ v


def causal_and_padding(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    i = torch.arange(L)
    seen = (i[None, :] <= i[:, None]) & (i[None, :] > i[:, None] - 5)
    seen = seen[None, None] & (i[None, None, None, :] < lengths[:, None, None, None])
    return (q @ k.mT).masked_fill(~seen, torch.finfo(q.dtype).min).softmax(-1) @ v


def fused_call(function: Any, *inputs: Any) -> tuple[Plan, list[Tensor]]:
    """The plan of the only site, and the captured tensors (fake) that its call is given."""
    calls: list[torch.fx.Node] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        graph = Compilation(gm, Options()).run()
        calls.extend(n for n in graph.graph.nodes if "fa_inductor.attention" in str(n.target))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    (call,) = calls
    return Plan.from_text(call.args[-1]), [n.meta["val"] for n in call.args[3]]  # type: ignore[arg-type, union-attr]


def test_a_small_mask_that_takes_much_arithmetic_is_stored() -> None:
    inputs = [rand(8, H, L, D) for _ in range(3)]
    check(shifted_windows, inputs)
    plan, captures = fused_call(shifted_windows, *inputs)
    assert [tuple(c.shape) for c in captures] == [(4, L, L)]
    assert "floordiv" not in {n.op for n in plan.program.nodes}


def test_a_large_one_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lift, "SMALL_BIAS", 0)
    inputs = [rand(8, H, L, D) for _ in range(3)]
    check(shifted_windows, inputs)
    assert fused_call(shifted_windows, *inputs)[1] == []


def test_masks_of_ranges_stay_visible() -> None:
    inputs = [*(rand(2, H, L, D) for _ in range(3)), torch.tensor([9, 4])]
    check(causal_and_padding, inputs)
    mask = fused_call(causal_and_padding, *inputs)[0].facts.mask
    assert mask is not None and {t.kind for t in mask.terms} == {"upper", "lower", "key"}


def heads_last(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """A bias made for each pair of positions, with the heads fastest in memory."""
    bias = (table * 2).tanh()
    return (q @ k.mT + bias.permute(2, 0, 1)).softmax(-1) @ v


def merged_positions(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """As Swin's, whose rows are (query, key) in one."""
    bias = table[torch.arange(L * L) % 5].view(L, L, H)
    return (q @ k.mT + bias.permute(2, 0, 1)).softmax(-1) @ v


def key_bias(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    return (q @ k.mT + (table * 2).tanh()[:, None]).softmax(-1) @ v


@pytest.mark.parametrize(("function", "table"), [(heads_last, (L, L, H)), (merged_positions, (5, H))])
def test_neighbouring_keys_are_neighbours_in_memory(function: Any, table: tuple[int, ...]) -> None:
    inputs = [*(rand(2, H, L, D) for _ in range(3)), rand(*table)]
    check(function, inputs)
    _, (bias,) = fused_call(function, *inputs)
    assert bias.shape == (H, L, L) and bias.is_contiguous()


def test_inputs_of_the_graph_are_not_copied() -> None:
    def as_given(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return (q @ k.mT + bias.permute(2, 0, 1)).softmax(-1) @ v

    inputs = [*(rand(2, H, L, D) for _ in range(3)), rand(L, L, H)]
    check(as_given, inputs)
    assert fused_call(as_given, *inputs)[1][0].shape == (L, L, H)


def test_products_are_not_copied() -> None:
    """A copy of what a library's kernel has written would be a pass over memory of its own."""

    def relative(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
        return (q @ k.mT + torch.einsum("bhqd,hkd->bkhq", q, keys).permute(0, 2, 3, 1)).softmax(-1) @ v

    inputs = [*(rand(2, H, L, D) for _ in range(3)), rand(H, L, D)]
    check(relative, inputs)
    _, (bias,) = fused_call(relative, *inputs)
    assert bias.stride()[-1] != 1


def test_what_no_key_or_no_query_indexes_is_not_copied() -> None:
    inputs = [*(rand(2, H, L, D) for _ in range(3)), rand(H, L)]
    check(key_bias, inputs)
    assert fused_call(key_bias, *inputs)[1][0].shape == (H, L)
