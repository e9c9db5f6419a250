"""Elements followed down one by one: against what the ops really do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fa_inductor.constants import Constants
from fa_inductor.graph import GraphContext
from fa_inductor.index import ZERO
from fa_inductor.patterns import overwrites
from fa_inductor.provenance import Place, Tracer, Views, grid

Op = Callable[[Tensor], Tensor]


def rows_of_another_length(x: Tensor) -> Tensor:
    return F.pad(x, (0, 1)).view(x.shape[0], x.shape[2] + 1, x.shape[1])


def overlapping(x: Tensor) -> Tensor:
    x = x.contiguous()
    chunks = x.as_strided((x.shape[0], x.shape[1] - 1, 2 * x.shape[2]), (x.stride(0), x.stride(1), x.stride(2)))
    return chunks.clone(memory_format=torch.contiguous_format)


def strided_columns(x: Tensor) -> Tensor:
    x = x.mT.contiguous().mT
    return x.as_strided(x.shape, x.stride()).mT


def part_of_memory(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.as_strided((x.shape[0] - 1, *x.shape[1:]), x.stride(), x.storage_offset() + x.stride(0))


def written_over(x: Tensor) -> Tensor:
    """As in-place writes arrive."""
    part = torch.slice_scatter(x[:, 1:], x[:, :-1, 1:], 2, 0, -1)
    x = torch.slice_scatter(x, part, 1, 1)
    return torch.select_scatter(x, torch.full_like(x[:, 0], -1.0), 1, 0)


def chosen(x: Tensor) -> Tensor:
    keep = torch.ones(x.shape[1:], dtype=torch.bool).tril().flip(0)
    return torch.where(keep, x, torch.full_like(x, -2.0))


def hidden(x: Tensor) -> Tensor:
    return x.masked_fill(torch.arange(x.shape[2]) >= 2, -3.0)


OPS: list[Op] = [
    rows_of_another_length,
    overlapping,
    strided_columns,
    part_of_memory,
    written_over,
    chosen,
    hidden,
    lambda x: x.mT,
    lambda x: x.reshape(1, x.shape[0], -1).reshape(x.shape[0], -1, 1).reshape(x.shape),
    lambda x: torch.cat([x[:, :-1], x[:, 1:]], 2),
    lambda x: F.pad(x, (1, 0, 0, 2), value=-4.0),
    lambda x: x[:, -2:, 1:],
    lambda x: torch.stack([x[:, :1], x[:, 1:2]], 1).flatten(1, 2),
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(OPS), min_size=1, max_size=6), st.tuples(*[st.integers(2, 5)] * 3))
def test_every_element_is_found(ops: list[Op], shape: tuple[int, int, int]) -> None:
    source = torch.arange(1.0, 1 + shape[0] * shape[1] * shape[2]).view(shape)

    def function(x: Tensor) -> Tensor:
        for op in ops:
            if x.dim() != 3 or min(x.shape) < 2 or x.numel() > 4000:
                break
            x = op(x)
        return x

    expected = function(source)
    gm = make_fx(torch.func.functionalize(function), tracing_mode="fake")(source)
    context = GraphContext(gm, grad_enabled=False)
    output = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    places = grid(*expected.shape)
    ids = torch.arange(expected.numel())
    found = torch.full((expected.numel(),), torch.nan)
    times = torch.zeros(expected.numel(), dtype=torch.long)
    for f in Tracer(context, Constants(context), Views(), {}).trace(output, tuple(Place(ZERO, p) for p in places), ids):
        times[f.ids] += 1
        if f.node is None:
            found[f.ids] = f.value
        else:
            assert f.node.op == "placeholder", f.node.format_node()
            found[f.ids] = source[tuple(p.listed(f.ids) for p in f.index)]
    assert (times == 1).all()
    assert torch.equal(found.view(expected.shape), expected)


def test_writes_to_overlapping_memory_are_not_followed() -> None:
    """PyTorch copies the tensor with its strides: what is written to the first row shows in the second."""

    def function(x: Tensor) -> Tensor:
        return torch.select_scatter(x.as_strided((2, 4), (2, 1)), torch.full_like(x[:4], -1.0), 0, 0)

    source = torch.arange(6.0)
    assert function(source)[1, 0] == -1.0
    gm = make_fx(torch.func.functionalize(function), tracing_mode="fake")(source)
    (scatter,) = (n for n in gm.graph.nodes if n.op == "call_function" and "select_scatter" in str(n.target))
    assert not overwrites.accepts(scatter)
    context = GraphContext(gm, grad_enabled=False)
    (fragment,) = Tracer(context, Constants(context), Views(), {}).trace(scatter, tuple(Place(ZERO, p) for p in grid(2, 4)), torch.arange(8))
    assert fragment.node is scatter


@pytest.mark.parametrize("op", OPS)
def test_each_op_is_followed(op: Op) -> None:
    test_every_element_is_found.hypothesis.inner_test([op], (3, 4, 5))  # type: ignore[attr-defined]
