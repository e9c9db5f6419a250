"""Writing calls into a normalised graph that is not analysed yet: what stands in for a node until it is fused."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .emitter import fake_mode_of, fake_value
from .kernel_support import without_autocast


class Writer:
    """Emits calls before ``node``, with its stack trace, fake values and no autocast; ``added`` holds them in order."""

    def __init__(self, node: fx.Node) -> None:
        self.node, self.added = node, list[fx.Node]()
        self.dtype: torch.dtype = node.meta["val"].dtype

    def emit(self, target: Any, *args: Any) -> fx.Node:
        with self.node.graph.inserting_before(self.node):
            emitted = self.node.graph.call_function(target, args)
        self.added.append(emitted)
        emitted.meta = {k: v for k, v in self.node.meta.items() if k not in ("val", "example_value")}
        with fake_mode_of(emitted), without_autocast(self.node.meta["val"].device.type):
            emitted.meta["val"] = target(*(fake_value(a) for a in args))
        return emitted

    def cast(self, x: fx.Node) -> fx.Node:
        """``x`` in the dtype that the node computes in."""
        return x if x.meta["val"].dtype == self.dtype else self.emit(torch.ops.aten.to.dtype, x, self.dtype)

    def erase(self) -> None:
        """Take back all that nothing uses: a writing that failed half way may hold some."""
        for node in reversed(self.added):
            if not node._erased and not node.users:
                node.graph.erase_node(node)
