"""Putting an updated view back into its base: ``base' = inverse(view, base, updated view)``.

    whole     reshape, permute, transpose, unsqueeze, squeeze   the opposite rearrangement
    part      select, slice, narrow, diagonal, an item of unbind        select_scatter, slice_scatter, diagonal_scatter

Views with repeated or reinterpreted elements (expand, as_strided, dtype views) and ``detach`` (which cuts the gradient) have none.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from .editor import Editor

aten = torch.ops.aten

_RESHAPES = frozenset(
    {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.view_as.default, aten.reshape_as.default, aten.flatten.using_ints}
    | {aten.unflatten.int, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
)
_TRANSPOSES = frozenset({aten.transpose.int, aten.swapaxes.default, aten.swapdims.default})
_FLIPS = frozenset({aten.t.default, aten.numpy_T.default, aten.mT.default})
_SCATTERS = {aten.select.int: aten.select_scatter.default, aten.slice.Tensor: aten.slice_scatter.default, aten.diagonal.default: aten.diagonal_scatter.default}


def invert(editor: Editor, before: fx.Node, view: fx.Node, base: fx.Node, updated: fx.Node) -> fx.Node | None:
    """Insert the nodes of ``base'`` and return the last; None where the view has no inverse."""
    target: Any = view.target

    def emit(target: Any, *args: Any) -> fx.Node:
        return editor.call(before, before, target, *args)

    if target in _SCATTERS:
        return emit(_SCATTERS[target], base, updated, *view.args[1:])
    if target is aten.narrow.default and all(isinstance(a, int) and a >= 0 for a in view.args[2:]):
        start, length = cast(tuple[int, int], view.args[2:])
        return emit(aten.slice_scatter.default, base, updated, view.args[1], start, start + length)
    if target in _RESHAPES:
        return emit(aten.reshape.default, updated, editor.sizes(before, base))
    if target in _TRANSPOSES:
        return emit(aten.transpose.int, updated, *view.args[1:])
    if target is aten.permute.default:
        return _unpermute(emit, view, updated)
    if target in _FLIPS:
        return emit(target, updated)
    if target is operator.getitem:
        return _into_unbind(emit, view, base, updated)
    return None


def _unpermute(emit: Callable[..., fx.Node], view: fx.Node, updated: fx.Node) -> fx.Node:
    order: list[int] = [int(d) % len(view.args[1]) for d in view.args[1]]  # type: ignore[arg-type, union-attr]
    return emit(aten.permute.default, updated, [order.index(i) for i in range(len(order))])


def _into_unbind(emit: Callable[..., fx.Node], item: fx.Node, base: fx.Node, updated: fx.Node) -> fx.Node | None:
    """``item`` is ``unbind(base, dim)[i]``; the list between them holds no memory of its own."""
    parts = item.args[0]
    if not isinstance(parts, fx.Node) or parts.target is not aten.unbind.int:
        return None
    dim = parts.args[1] if len(parts.args) > 1 else 0
    return emit(aten.select_scatter.default, base, updated, dim, item.args[1])
