"""Which nodes of a traced graph share memory.

Fake tensors carry storages like real ones, so two nodes alias exactly when the storages of their fake values are the same:
this also catches operators that return their argument as it is (``contiguous``, ``to``, dropout in evaluation).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

aten = torch.ops.aten

METADATA_READS = frozenset({aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default})
_DETACHES = frozenset({aten.detach.default})
_SPLITS = frozenset({aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.tensor_split.sections})


CLEAN = "fa_inductor_clean"
"""In the meta of a higher-order node: its body writes none of its operands."""


def storage_keys(node: fx.Node) -> frozenset[int]:
    return frozenset(v.untyped_storage()._cdata for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, FakeTensor) and not v.is_sparse)


def written_args(node: fx.Node) -> list[fx.Node]:
    """Nodes whose memory an operator's schema says it writes."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    written: list[fx.Node] = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            written += [v for v in pytree.tree_leaves(value) if isinstance(v, fx.Node)]
    return written


def writes(node: fx.Node) -> list[fx.Node]:
    """Nodes whose memory ``node`` may write: by its schema; for a higher-order node all it is given, unless its body was seen to write none of it.

    The body of a checkpoint may write its operands, and so does a Triton kernel of the user's.
    """
    if isinstance(node.target, HigherOrderOperator):
        return [] if node.meta.get(CLEAN) else [n for n in node.all_input_nodes if storage_keys(n)]
    return written_args(node)


@dataclass
class Storage:
    """The nodes that live in one storage, in graph order. ``parent[n]`` is the node of the same storage that ``n`` was made from."""

    key: int
    nodes: list[fx.Node] = field(default_factory=list)
    parent: dict[fx.Node, fx.Node] = field(default_factory=dict)
    mutations: list[fx.Node] = field(default_factory=list)
    opaque: bool = False
    """Some node or user of it is not understood: nothing of it may be rewritten."""

    @property
    def root(self) -> fx.Node:
        return self.nodes[0]

    def chain(self, node: fx.Node) -> list[fx.Node]:
        """From the root down to ``node``."""
        chain = [node]
        while chain[-1] in self.parent:
            chain.append(self.parent[chain[-1]])
        return chain[::-1]

    def disjoint(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two nodes surely cover different elements: they descend from different parts of one split or select."""
        for x, y in zip(self.chain(a), self.chain(b), strict=False):
            if x is not y:
                return _disjoint_siblings(x, y)
        return False


def _disjoint_siblings(x: fx.Node, y: fx.Node) -> bool:
    if x.target is not y.target or x.args[0] is not y.args[0]:
        return False
    if x.target is operator.getitem:
        parent = x.args[0]
        return isinstance(parent, fx.Node) and parent.target in _SPLITS and x.args[1] != y.args[1]
    if x.target is aten.select.int:
        i, j = x.args[2], y.args[2]
        return x.args[1] == y.args[1] and isinstance(i, int) and isinstance(j, int) and (i < 0) == (j < 0) and i != j
    return False


def find_storages(gm: fx.GraphModule, clean_calls: frozenset[fx.Node]) -> dict[int, Storage]:
    """All storages that appear in the graph. ``clean_calls``: higher-order nodes known to write none of their operands."""
    storages: dict[int, Storage] = {}
    for node in gm.graph.nodes:
        for key in storage_keys(node):
            storage = storages.setdefault(key, Storage(key))
            _add(storage, node, key)
        for written in written_args(node):
            for key in storage_keys(written):
                storages[key].mutations.append(node)
        if not _understood(node, clean_calls):
            for used in node.all_input_nodes:
                for key in storage_keys(used):
                    storages[key].opaque = True
    for node in gm.graph.find_nodes(op="output"):
        _mark_aliased_outputs(storages, node)
    return storages


def _add(storage: Storage, node: fx.Node, key: int) -> None:
    makers = [n for n in node.all_input_nodes if key in storage_keys(n)]
    written = [n for n in written_args(node) if n in makers]
    made_by_call = isinstance(node.target, OpOverload) or node.target is operator.getitem
    if not storage.nodes:
        storage.opaque |= not (isinstance(node.target, OpOverload) and isinstance(node.meta["val"], torch.Tensor))
    elif not made_by_call or len(written or makers) != 1:
        storage.opaque = True
    else:
        storage.parent[node] = (written or makers)[0]
    storage.nodes.append(node)


def _understood(node: fx.Node, clean_calls: frozenset[fx.Node]) -> bool:
    if node.op in ("placeholder", "output", "get_attr") or node in clean_calls or node.target in (operator.getitem, torch.tensor):
        return True
    if not isinstance(node.target, OpOverload):
        return False
    return torch.Tag.inplace_view not in node.target.tags


def _mark_aliased_outputs(storages: dict[int, Storage], output: fx.Node) -> None:
    """Two results that share memory must go on sharing it."""
    seen: dict[int, fx.Node] = {}
    results: list[Any] = [n for n in pytree.tree_leaves(output.args) if isinstance(n, fx.Node)]
    for node in dict.fromkeys(results):
        for key in storage_keys(node):
            if key in seen:
                storages[key].opaque = True
            seen[key] = node


def writes_inputs(gm: fx.GraphModule, *only: fx.Node) -> bool:
    """Whether an operator of the graph (or one of ``only``) writes memory that a placeholder or attribute owns."""
    owned = frozenset[int]().union(*(storage_keys(n) for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")))
    return any(owned & storage_keys(w) for node in only or gm.graph.nodes for w in writes(node))


def same_place(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes of one storage show exactly the same elements, with the same gradient."""
    x, y = a.meta["val"], b.meta["val"]
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or x.dtype != y.dtype or a.target in _DETACHES:
        return False
    return same_layout(x, y) and same_size(x.storage_offset(), y.storage_offset())


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same sizes and strides, decided without adding a guard."""
    return a.dim() == b.dim() and all(map(same_size, (*a.shape, *a.stride()), (*b.shape, *b.stride())))


def same_size(a: Any, b: Any) -> bool:
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        return isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt) and bool(a.node.expr == b.node.expr)
    return bool(a == b)
