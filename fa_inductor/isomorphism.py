"""Equal parts of a graph, as equal layers have: what is proved of one, of shapes and ops alone, holds for the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .graph import GraphContext
from .patterns.views import is_static, name_of


def correspondence(context: GraphContext, pairs: Iterable[tuple[fx.Node, fx.Node]], ends: Collection[fx.Node]) -> dict[fx.Node, fx.Node] | None:
    """Which node plays the part of which, from ``pairs`` down to ``ends`` (of the first of each pair), if both are made in the same way."""
    found: dict[fx.Node, fx.Node] = {}
    queue = list(pairs)
    while queue:
        one, other = queue.pop()
        if one in found:
            if found[one] is not other:
                return None
            continue
        if not _alike(context, one, other):
            return None
        found[one] = other
        if one in ends:
            continue
        (mine, spec), (theirs, other_spec) = (pytree.tree_flatten((n.args, n.kwargs)) for n in (one, other))
        if (one.target != other.target and one.op == "call_function") or spec != other_spec:
            return None
        for x, y in zip(mine, theirs, strict=True):
            if isinstance(x, fx.Node) and isinstance(y, fx.Node):
                queue.append((x, y))
            elif type(x) is not type(y) or x != y:
                return None
    return found


def _alike(context: GraphContext, one: fx.Node, other: fx.Node) -> bool:
    if not is_static(one) or not is_static(other):
        return False
    facts = [(n.op, n in context.needs_grad, context.is_written(n), context.grad_mode.get(n), _value(n), _given(n)) for n in (one, other)]
    return facts[0] == facts[1]


def _given(node: fx.Node) -> object:
    """What an input is: a parameter that trains is taken to be finite."""
    example = node.meta.get("example_value")
    return type(example), isinstance(example, torch.Tensor) and example.requires_grad


def depends_on_input(node: fx.Node) -> bool:
    seen, queue = {node}, [node]
    while queue:
        node = queue.pop()
        if node.op != "call_function":
            return True
        found = [n for n in node.all_input_nodes if n not in seen]
        seen.update(found)
        queue += found
    return False


def _value(node: fx.Node) -> object:
    """Shape, dtype and layout, as far as ops can tell."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, (int, float)) else type(value)
    strides = [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size != 1]
    offset = value.storage_offset() if any(name_of(user) == "as_strided" for user in node.users) else 0
    return tuple(value.shape), strides, offset, value.dtype, type(value)
