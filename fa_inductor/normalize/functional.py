"""In-place operators on fresh intermediates become functional ones.

A value is fresh where its storage starts with an operator of this graph (not an input, parameter or buffer). For one storage,
walking the graph in order: an update of ``x`` becomes ``x' = op(x)``; what ``x`` was a view of is rebuilt from ``x'``
(``inverse``); every other node of that storage is stale from there on and is computed again, where it is used, from its
rebuilt base. If any step is impossible, or the storage is used in a way that is not understood, all of it stays as it was:
the in-place graph is correct, and later stages refuse what they cannot read.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from .aliases import METADATA_READS, Storage, find_storages, same_layout, same_place, written_args
from .editor import Editor, Impossible
from .inverse import invert
from .modes import Modes
from .operators import functional_form


def functionalise(gm: fx.GraphModule, mode: FakeTensorMode, modes: dict[fx.Node, Modes], clean_calls: frozenset[fx.Node] = frozenset()) -> list[str]:
    """Rewrite ``gm`` in place; returns a line for each storage that had to stay as it was.

    Args:
        modes: see ``modes.modes``.
        clean_calls: higher-order nodes that are known to write none of their operands.
    """
    left: list[str] = []
    waiting = _mutated(gm, clean_calls)
    tried: set[int] = set()
    while waiting:
        storage = waiting.pop(0)
        tried.add(storage.key)
        editor, reason = _rewrite(gm, mode, storage, modes)
        if reason:
            left.append(f"{storage.mutations[0].name}: {reason}")
        elif editor.relaid:  # other values were computed again, in new storages
            waiting = [s for s in _mutated(gm, clean_calls) if s.key not in tried]
    return left


def _rewrite(gm: fx.GraphModule, mode: FakeTensorMode, storage: Storage, modes: dict[fx.Node, Modes]) -> tuple[Editor, str]:
    """Try to use updated values as they are; then, where their strides would show, only through their rebuilt bases."""
    reason = ""
    for from_base in (False, True):
        editor = Editor(gm, mode)
        try:
            _Rewrite(editor, storage, modes, from_base).run()
            editor.commit()
        except Impossible as impossible:
            editor.undo()
            reason = str(impossible)
        else:
            return editor, ""
    return editor, reason


def _mutated(gm: fx.GraphModule, clean_calls: frozenset[fx.Node]) -> list[Storage]:
    if not any(written_args(n) for n in gm.graph.nodes):
        return []
    return [s for s in find_storages(gm, clean_calls).values() if s.mutations]


aten = torch.ops.aten


class _Rewrite:
    """The walk over one storage. ``current[n]``: the node that now holds the value of ``n``, itself if absent."""

    def __init__(self, editor: Editor, storage: Storage, modes: dict[fx.Node, Modes], from_base: bool) -> None:
        self.editor, self.storage, self.modes, self.from_base = editor, storage, modes, from_base
        self.members = set(storage.nodes)
        self.mutations = set(storage.mutations)
        self.current: dict[fx.Node, fx.Node] = {}
        self.stale: set[fx.Node] = set()
        self.lost: set[fx.Node] = set()
        self.seen: list[fx.Node] = []

    def run(self) -> None:
        if self.storage.opaque:
            raise Impossible("its memory is an input's, is returned twice, or has a user that is not understood")
        for node in sorted(self.members.union(*(n.users for n in self.members))):
            used = [n for n in node.all_input_nodes if n in self.members]
            target = node.args[0] if node in self.mutations and node.args else None
            if node in self.mutations and target not in self.members:
                raise Impossible(f"{node.target} writes more than its first argument")
            if node.target in METADATA_READS:
                self.editor.replace_inputs(node, {n: self.unmutated(n) for n in used})
            else:
                self.editor.replace_inputs(node, {n: self.fresh(n, node) for n in used})
            if isinstance(target, fx.Node):
                self.update(node, self.unmutated(target))
            elif node in self.members:
                self.seen.append(node)

    def unmutated(self, node: fx.Node) -> fx.Node:
        """An in-place operator's result is its argument: the node that first stood for it."""
        while node in self.mutations:
            node = self.storage.parent[node]
        return node

    def fresh(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The node that holds the present value of ``node``, recomputed from its base where stale."""
        node = self.unmutated(node)
        if node in self.lost:
            raise Impossible(f"{node.name} is read after an update that cannot be put back into it")
        if node in self.stale:
            parent = self.storage.parent[node]
            self.current[node] = self.editor.replay(before, node, {parent: self.fresh(parent, before)})
            self.stale.discard(node)
        return self.current.get(node, node)

    def update(self, node: fx.Node, target: fx.Node) -> None:
        """``node`` updates ``target`` in place; its arguments are fresh."""
        if not self.modes[node].grad and any(self.modes[n].requires_grad for n in self.storage.nodes if n in self.modes):
            raise Impossible("it is updated under no_grad while it carries a gradient")
        chain = [n for n in self.storage.chain(target) if n not in self.mutations][::-1]
        bases = {base: self.fresh(base, node) for base in chain[1:] if base not in self.lost}
        value = functional_form(self.editor, node, autocast=self.modes[node].autocast, stands_alone=len(chain) == 1)
        self.stale |= {n for n in self.seen if not self.storage.disjoint(n, target)}
        self.current[target] = value
        self.stale.discard(target)
        self.editor.remove(node)
        rebuilt = self.rebuild(node, chain, bases, value)
        same = same_layout(value.meta["val"], target.meta["val"])
        copied = node.target is aten.copy_.default
        if rebuilt and (copied or (self.from_base and not same)):
            self.stale.add(target)  # where it is read, it is taken from its base again
        elif len(chain) > 1 and copied:
            raise Impossible(f"{target.name} is overwritten and cannot be put back into {chain[1].name}")
        elif not same:
            self.editor.relaid.add(value)

    def rebuild(self, before: fx.Node, chain: list[fx.Node], bases: dict[fx.Node, fx.Node], value: fx.Node) -> int:
        """Give each base of ``chain[0]`` its value after the update; returns how many have one."""
        views = [n for n in chain if not isinstance(n.meta["val"], (list, tuple))]
        for i, (view, base) in enumerate(pairwise(views)):
            updated = None
            if base in bases:
                same = same_place(view, base)
                updated = value if same else invert(self.editor, before, view, bases[base], value)
            if updated is None or not same_layout(updated.meta["val"], base.meta["val"]):
                self.lost.update(chain[chain.index(base) :])
                return i
            self.current[base] = value = updated
            self.stale.discard(base)
        return len(views) - 1
