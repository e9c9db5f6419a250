"""Tensors that depend on no input: what they hold, computed where the graph is compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .graph import GraphContext
from .patterns.generators import reads
from .patterns.views import is_static, name_of

MOST_ELEMENTS = 1 << 24


class Constants:
    """Of the nodes of one graph; to be asked where no dispatch mode is active."""

    def __init__(self, context: GraphContext) -> None:
        self.context = context
        self.known: dict[fx.Node, Tensor | None] = {}

    def of(self, node: fx.Node) -> Tensor | None:
        """What ``node`` holds, on the CPU; None where it depends on an input or on chance, is written to, or is large."""
        if node not in self.known:
            self.known[node] = self._compute(node)
        return self.known[node]

    def _compute(self, node: fx.Node) -> Tensor | None:
        value, target = node.meta.get("val"), node.target
        if not isinstance(value, Tensor) or not isinstance(target, torch._ops.OpOverload) or not name_of(node):
            return None
        if target._schema.is_mutable or self.context.is_written(node) or any(isinstance(x, torch.device) for x in node.args):
            return None
        sizes = (*value.shape, *value.stride())
        if torch.Tag.nondeterministic_seeded in target.tags or not all(isinstance(n, int) for n in sizes) or _extent(value) > MOST_ELEMENTS:
            return None
        given: dict[fx.Node, Tensor] = {}
        for source in node.all_input_nodes:
            found = self.of(source) if source in reads(node) else _shaped_like(source)
            if found is None:
                return None
            given[source] = found
        args, kwargs = (fx.map_arg(x, given.__getitem__) for x in (node.args, node.kwargs))
        named = {argument.name for argument in target._schema.arguments}
        found = target(*args, **{**kwargs, **({"device": torch.device("cpu")} if "device" in named else {})})  # type: ignore[dict-item]
        return found if isinstance(found, Tensor) else None


def _extent(value: Tensor) -> int:
    """Elements in memory: of an expanded dimension one."""
    count = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        count *= int(size) if stride else 1
    return count


def _shaped_like(node: fx.Node) -> Tensor | None:
    value: Any = node.meta.get("val")
    if not isinstance(value, Tensor) or not is_static(node):
        return None
    return torch.empty((), dtype=value.dtype).expand(value.shape)
