"""Fake tensors to trace with: copies that share storages with the graph's own but may be updated freely."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree


class _NonLeaf(torch.autograd.Function):
    """A tensor that is the result of an operation for autograd, so that in-place updates of it are allowed."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.data

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


def find_fake_mode(values: Any) -> FakeTensorMode | None:
    return next((v.fake_mode for v in pytree.tree_leaves(values) if isinstance(v, FakeTensor)), None)


def fresh_copies(values: Any, mode: FakeTensorMode) -> Any:
    """Fake tensors on the same storages with their own version, metadata and autograd state: tracing may update them freely."""

    def copy(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        leaf = not value.requires_grad or value.is_leaf
        copied: Any = value.data.requires_grad_(value.requires_grad) if leaf else _NonLeaf.apply(anchor, value)  # type: ignore[no-untyped-call]
        if value.item_memo is not None:  # a Python number that Dynamo made an input
            copied.item_memo = value.item_memo
        return copied

    with torch.enable_grad(), mode:
        anchor = torch.zeros((), requires_grad=True)
        return pytree.tree_map(copy, values)
