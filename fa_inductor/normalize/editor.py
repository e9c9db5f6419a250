"""Edits of a traced graph that keep its fake values right and can be undone as a whole."""

from __future__ import annotations

import operator
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from .aliases import same_layout, storage_keys
from .state import autocast_at_nodes, restored

aten = torch.ops.aten


class Impossible(Exception):
    """This edit cannot be made; the message says why."""


class Editor:
    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode) -> None:
        self.graph, self.mode = gm.graph, mode
        self.created: list[fx.Node] = []
        self.relaid: set[fx.Node] = set()
        """Nodes whose strides are no longer those of the original graph."""
        self._before: dict[fx.Node, tuple[Any, Any, Any, Any]] = {}
        self._removed: list[fx.Node] = []
        self._autocast = autocast_at_nodes(gm.graph)
        inputs = gm.graph.find_nodes(op="placeholder")
        self._sizes: dict[Any, fx.Node] = {n.meta["val"].node.expr: n for n in inputs if isinstance(n.meta.get("val"), torch.SymInt)}

    # -- building ------------------------------------------------------------------------------------------------------
    def call(self, before: fx.Node, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call before a node, with the stack trace and module of ``like``."""
        with self.graph.inserting_before(before):
            name = target._schema.name.split("::")[-1] if isinstance(target, OpOverload) else None
            node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        self.created.append(node)
        node.meta.update(like.meta)
        self._autocast[node] = self._autocast[before]
        node.meta["val"] = self.value(node)
        return node

    def sizes(self, before: fx.Node, like: fx.Node) -> list[int | fx.Node]:
        """The shape of ``like``: numbers, and graph nodes where it is symbolic."""
        return [s if isinstance(s, int) else self._size(before, like, i, s) for i, s in enumerate(like.meta["val"].shape)]

    def _size(self, before: fx.Node, like: fx.Node, dim: int, size: torch.SymInt) -> fx.Node:
        expression: Any = size.node.expr
        if expression not in self._sizes:
            self._sizes[expression] = self.call(before, like, aten.sym_size.int, like, dim)
        return self._sizes[expression]

    def replay(self, before: fx.Node, node: fx.Node, replaced: dict[fx.Node, fx.Node]) -> fx.Node:
        """Insert a copy of ``node``, as it was before any edit, that reads other nodes."""
        _, args, kwargs, _ = self._before.get(node, (None, node.args, node.kwargs, None))
        args, kwargs = fx.map_arg((args, kwargs), lambda n: replaced.get(n, n))
        return self.call(before, node, node.target, *args, **kwargs)

    def replace_inputs(self, node: fx.Node, replaced: dict[fx.Node, fx.Node]) -> None:
        if all(old is new for old, new in replaced.items()):
            return
        self._remember(node)
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: replaced.get(n, n))

    def remove(self, node: fx.Node) -> None:
        """Erase at commit; its users must have been given other inputs by then."""
        self._removed.append(node)

    # -- fake values ---------------------------------------------------------------------------------------------------
    def value(self, node: fx.Node) -> Any:
        """What a call yields on its arguments' fake values under the autocast of its place: without gradient or new guards."""
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        assert callable(node.target)
        with restored(self._autocast[node]), self.mode:
            if self.mode.shape_env is None:
                return node.target(*args, **kwargs)
            with self.mode.shape_env.suppress_guards():
                return node.target(*args, **kwargs)

    def refresh_values(self) -> None:
        """Bring the fake values downstream of the created nodes up to date, as far as storages and strides change."""
        changed = set(self.created)
        removed = set(self._removed)
        waiting = [user for node in self.created for user in node.users]
        heapify(waiting)
        while waiting:
            node = heappop(waiting)
            if node in changed or node in removed:
                continue
            if isinstance(node.target, OpOverload) or node.target is operator.getitem:
                if self._refresh(node):
                    changed.add(node)
                    for user in node.users:
                        heappush(waiting, user)
            elif not self.relaid.isdisjoint(node.all_input_nodes):
                raise Impossible(f"{node.name} would see other strides")

    def _refresh(self, node: fx.Node) -> bool:
        """Recompute one fake value; False if nothing after it can notice."""
        if isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags:
            raise Impossible(f"{node.name} changes metadata in place")
        self._remember(node)
        old = node.meta["val"]
        try:
            new = self.value(node)
        except (RuntimeError, ValueError):
            if node.target is not aten.view.default:
                raise
            node.target = aten.reshape.default
            new = self.value(node)
        kept = all(same_layout(a, b) for a, b in zip(_tensors(new), _tensors(old), strict=True))
        inputs = frozenset[int]().union(*(storage_keys(n) for n in node.all_input_nodes))
        node.meta["val"] = new
        if kept and inputs.isdisjoint(storage_keys(node)):
            node.meta["val"] = old
            return False
        if not kept:
            self.relaid.add(node)
        return True

    # -- ending --------------------------------------------------------------------------------------------------------
    def _remember(self, node: fx.Node) -> None:
        self._before.setdefault(node, (node.target, node.args, node.kwargs, node.meta.get("val")))

    def undo(self) -> None:
        for node, (target, args, kwargs, value) in self._before.items():
            node.target, node.args, node.kwargs = target, args, kwargs
            if "val" in node.meta:
                node.meta["val"] = value
        for node in reversed(self.created):
            self.graph.erase_node(node)

    def commit(self) -> None:
        """Finish: raises Impossible, leaving the undoing to the caller, where a result's strides would change."""
        for node in reversed(self.created):
            if not node.users and node not in self._removed:
                self.remove_created(node)
        self.refresh_values()
        for node in reversed(self._removed):
            self.graph.erase_node(node)

    def remove_created(self, node: fx.Node) -> None:
        self.created.remove(node)
        self.graph.erase_node(node)


def _tensors(value: Any) -> list[FakeTensor]:
    return [v for v in pytree.tree_leaves(value) if isinstance(v, FakeTensor)]
