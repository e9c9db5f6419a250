"""Adding calls to a graph: each with its fake value, the stack trace of the node before which it stands, and whether it needs a gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from .graph import GraphContext
from .index import Expr, as_expr


class Emitter:
    """Adds ATen calls before one node, with fake values and the stack trace of that node."""

    def __init__(self, context: GraphContext, before: fx.Node) -> None:
        self.context, self.before = context, before
        self.added: list[fx.Node] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.append(target, args, kwargs, None)
        with fake_mode_of(node if node.all_input_nodes else self.before):
            node.meta["val"] = target(*(fake_value(a) for a in args), **kwargs)
        return node

    def append(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> fx.Node:
        with self.context.graph.inserting_before(self.before):
            node = self.context.graph.call_function(target, args, kwargs)
        node.meta = {k: v for k, v in self.before.meta.items() if k in ("stack_trace", "nn_module_stack", "source_fn_stack")}
        node.meta["val"] = value
        if target is not torch.ops.aten.detach.default and any(n in self.context.needs_grad for n in node.all_input_nodes):
            self.context.needs_grad.add(node)
        self.added.append(node)
        return node

    def size(self, expr: Expr) -> Any:
        return self.context.size_node(expr, self.before)

    def record(self, function: Callable[..., Tensor], *nodes: Any) -> fx.Node:
        """The ATen calls that ``function`` makes on the fake values of ``nodes`` (lists of them included), as calls before ``before``."""
        values = tree_map_only(fx.Node, lambda n: n.meta["val"], nodes)
        known = {id(v): n for n, v in zip(tree_leaves(nodes), tree_leaves(values)) if isinstance(v, Tensor)}
        example = next(v for v in tree_leaves(values) if isinstance(v, FakeTensor))
        with torch.no_grad(), example.fake_mode, _Recorder(self, known):
            node: fx.Node = known[id(function(*values))]
        return node


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Emits every call that is dispatched. ``known``: id of a tensor -> its node; the tensors are kept, so that no id is used again."""

    def __init__(self, emitter: Emitter, known: dict[int, fx.Node]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.emitter, self.known, self.kept = emitter, known, list[Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = tree_map(self._argument, (args, kwargs or {}))
        self.known[id(result)] = self.emitter.append(func, given[0], given[1], result)
        self.kept.append(result)
        return result

    def _argument(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.known[id(x)]
        return self.emitter.size(as_expr(x)) if isinstance(x, torch.SymInt) else x


def fake_value(x: Any) -> Any:
    """Fake value of an argument, lists included."""
    if isinstance(x, (list, tuple)):
        return [fake_value(y) for y in x]
    return x.meta["val"] if isinstance(x, fx.Node) else x


def fake_mode_of(node: fx.Node) -> Any:
    """The mode of the inputs' own fake tensors (the tracing context's is another one)."""
    values = [n.meta.get("val") for n in node.all_input_nodes]
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), nullcontext())
