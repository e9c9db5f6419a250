"""Rewriting: the only code that edits a graph. A site's region becomes one call of ``fa_inductor::attention``."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._sympy.functions import FloorDiv, Mod

from .columns import column_scores, rows_or_zero, total_lse
from .emitter import Emitter, fake_mode_of
from .graph import GraphContext
from .index import ONE, Expr, exact_quotient
from .kernel_table import kernel_named
from .layout import dense_order, freed_views, makes_its_own
from .patterns.views import name_of, value_of
from .request import Plan, TensorSpec
from .rewrite_tiles import tiles_of
from .shares import shares, weighted
from .site import Atom, AttentionSite, Captured, View4

aten = torch.ops.aten
_CANONICAL = {"q": ("b", "h", "q", "d"), "k": ("b", "h", "k", "d"), "v": ("b", "h", "k", "d"), "out": ("b", "h", "q", "d")}


@dataclass(frozen=True)
class Placed:
    """The operand nodes of a site, emitted before its output node; not yet used by anything."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    captures: tuple[fx.Node, ...]
    sizes: tuple[Any, ...]

    def specs(self, context: GraphContext) -> tuple[TensorSpec, ...]:
        """Metadata of q, k, v and the captures."""
        return tuple(_spec(n, n in context.needs_grad) for n in (self.q, self.k, self.v, *self.captures))


def _spec(node: fx.Node, requires_grad: bool) -> TensorSpec:
    value: Tensor = node.meta["val"]
    return TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype, requires_grad and value.dtype.is_floating_point)


class SiteEmitter(Emitter):
    """The operands, the output and the captured tensors of a site, before its output node or an earlier one."""

    def __init__(self, context: GraphContext, site: AttentionSite, before: fx.Node | None = None) -> None:
        super().__init__(context, before or site.output.node)
        self.end = site.output.node

    # -- operands ----------------------------------------------------------------------------------------------------------
    def canonical(self, view: View4, which: str, extents: dict[str, Expr], dtype: torch.dtype) -> fx.Node:
        """The operand as a (B, H, L, D) tensor of ``dtype``."""
        return self.arranged(self.trained(self.own(view.node), view.node), view, which, extents, dtype)

    def arranged(self, node: fx.Node, view: View4, which: str, extents: dict[str, Expr], dtype: torch.dtype) -> fx.Node:
        """``node``, of the shape that ``view`` is about, as a canonical tensor."""
        for dim, start, length in view.windows:
            node = self.call(aten.slice.Tensor, node, dim, self.size(start), self.size(sympy.expand(start + length)))
        atoms = [a for dimension in view.dimensions for a in dimension]
        if any(len(d) != 1 for d in view.dimensions):
            node = self.call(aten.reshape.default, node, [self.size(a.extent) for a in atoms])
        names = _CANONICAL[which]
        order = sorted(range(len(atoms)), key=lambda i: (names.index(atoms[i].axis), _speed(atoms, i)))
        if order != list(range(len(atoms))):
            node = self.call(aten.permute.default, node, order)
        counts = [sum(a.axis == n for a in atoms) for n in names]
        if any(c > 1 for c in counts):
            node = self.call(aten.reshape.default, node, [self.size(_axis_extent(atoms, n)) for n, c in zip(names, counts) if c])
        for position, count in enumerate(counts):
            if count == 0:
                node = self.call(aten.unsqueeze.default, node, position)
        node = self._expanded(node, names, extents, atoms)
        return node if node.meta["val"].dtype == dtype else self.call(aten.to.dtype, node, dtype)

    def _expanded(self, node: fx.Node, names: tuple[str, ...], extents: dict[str, Expr], atoms: list[Atom]) -> fx.Node:
        """Broadcast axes that the operand lacks (stride 0); the key heads stay as few as they are."""
        missing = [n for n in names if not any(a.axis == n for a in atoms) and extents[n] != 1]
        if not missing:
            return node
        return self.call(aten.expand.default, node, [self.size(extents[n]) if n in missing else -1 for n in names])

    def original(self, node: fx.Node, view: View4, extents: dict[str, Expr], dtype: torch.dtype) -> fx.Node:
        """The canonical output as the tensor that the replaced node was."""
        names = _CANONICAL["out"]
        atoms = [a for dimension in view.dimensions for a in dimension]
        canonical = sorted(range(len(atoms)), key=lambda i: (names.index(atoms[i].axis), _speed(atoms, i)))
        if [sum(a.axis == n for a in atoms) for n in names] != [1, 1, 1, 1]:
            node = self.call(aten.reshape.default, node, [self.size(atoms[i].extent) for i in canonical])
        back = [canonical.index(i) for i in range(len(atoms))]
        if back != list(range(len(atoms))):
            node = self.call(aten.permute.default, node, back)
        if any(len(d) != 1 for d in view.dimensions):
            node = self.call(aten.reshape.default, node, [self.size(_product(d)) for d in view.dimensions])
        return node if node.meta["val"].dtype == dtype else self.call(aten.to.dtype, node, dtype)

    def own(self, node: fx.Node) -> fx.Node:
        """``node``, or a copy where it is written to later and the backward pass would find it changed (a plain clone would be removed)."""
        saved = bool(self.context.needs_grad)
        written = saved and self.context.is_written_after(node, self.context.order[self.before])
        return self.call(torch.ops.fa_inductor.own_copy.default, node) if written else node

    def trained(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """``node``, detached where eager gives ``source`` no gradient: the op would give zeros."""
        if source not in self.context.needs_grad or self.context.gradient_reaches(source, self.end):
            return node
        node = self.call(aten.detach.default, node)
        self.context.needs_grad.discard(node)
        return node

    def layout(self, node: fx.Node, old: fx.Node) -> fx.Node:
        """``node`` in the memory layout of ``old``, if that could be seen; a tensor of its own if it is written to later."""
        written = self.context.is_written_after(old, self.context.order[old])
        freed = None if written else freed_views(old)
        if freed is not None:
            for view in freed:
                view.target = aten.reshape.default
            return node
        order = dense_order(old)
        if order is not None:
            node = self.call(aten.permute.default, node, order)
        node = self.call(aten.clone.default if written else aten.contiguous.default, node, **({"memory_format": torch.contiguous_format} if written else {}))
        return node if order is None else self.call(aten.permute.default, node, [order.index(d) for d in range(len(order))])

    def capture(self, captured: Captured, device: torch.device) -> fx.Node:
        """A captured node as the tensor that the program reads: a symbolic float becomes a 0-d tensor."""
        node = captured.node
        if not isinstance(node.meta["val"], Tensor):
            one = self.call(aten.full.default, [], 1.0, dtype=torch.float32, device=device)
            return self.call(aten.mul.Tensor, one, node)  # scalar_tensor would put a guard on the number
        node = self.trained(self.own(node), node)
        if captured.dtype is not None:
            node = self.call(aten.to.dtype, node, getattr(torch, captured.dtype))
        if captured.split is not None:
            node = self.call(aten.reshape.default, node, [self.size(e) for parts in captured.split for e in parts])
        if captured.order is None:
            return node
        return self.call(aten.contiguous.default, self.call(aten.permute.default, node, captured.order))


def _speed(atoms: list[Atom], i: int) -> int:
    """How many atoms of the same axis are slower: the strides of digits divide each other."""
    mine = _stride(atoms[i].expr)
    others = (_stride(a.expr) for a in atoms if a.axis == atoms[i].axis)
    return sum(x != mine and exact_quotient(x, mine) is not None for x in others)


def _stride(digit: Expr) -> Expr:
    """``n`` of the digits ``s // n`` and ``s // n % m``, 1 of ``s % m`` and of a whole axis."""
    inner = digit.args[0] if isinstance(digit, Mod) else digit
    return inner.args[1] if isinstance(inner, FloorDiv) else ONE


def _axis_extent(atoms: list[Atom], axis: str) -> Expr:
    return _product([a for a in atoms if a.axis == axis])


def _product(atoms: Any) -> Expr:
    result: Expr = ONE
    for a in atoms:
        result = result * a.extent
    return sympy.expand(result)


def place(context: GraphContext, site: AttentionSite, before: fx.Node | None = None) -> tuple[SiteEmitter, Placed]:
    """Emit the canonical operands of ``site`` before its output node, or before an earlier one."""
    emitter = SiteEmitter(context, site, before)
    ax = site.axes
    assert isinstance(site.dtype, torch.dtype)
    q = emitter.canonical(site.q, "q", {"b": ax.b, "h": ax.hq, "q": ax.q, "d": ax.d}, site.dtype)
    k = emitter.canonical(site.k, "k", {"b": ax.b, "h": ax.hkv, "k": ax.k, "d": ax.d}, site.dtype)
    v = emitter.canonical(site.v, "v", {"b": ax.b, "h": ax.hkv, "k": ax.k, "d": ax.dv}, site.dtype)
    captures = tuple(emitter.capture(n, q.meta["val"].device) for n in site.captures)
    return emitter, Placed(q, k, v, captures, tuple(emitter.size(s) for s in site.size_symbols))


def discard(emitter: SiteEmitter) -> None:
    """Take back what ``place`` emitted (no kernel took the site)."""
    for node in reversed(emitter.added):
        emitter.context.graph.erase_node(node)


def replace(context: GraphContext, site: AttentionSite, emitter: SiteEmitter, placed: Placed, plan: Plan, zero_rows: bool = False) -> None:
    """Put the fused call in the place of the site's output and drop what is dead."""
    old, ax = site.output.node, site.axes
    call = call_of(emitter, site, placed, plan)
    saved = out = result_of(emitter, call, 0)
    scores = column_scores_of(emitter, site, out)
    if scores:
        out = _with_columns(emitter, call, plan, out, scores, zero_rows)
    if site.cleaned:
        out = emitter.record(rows_or_zero, out, emitter.record(total_lse, result_of(emitter, call, 1), scores))
    result = emitter.original(out, site.output, {"b": ax.b, "h": ax.hq, "q": ax.q, "d": ax.dv}, old.meta["val"].dtype)
    exchange(emitter, old, result)
    if saved is out and saved in context.needs_grad and _returned(saved):
        _share_copy(context, saved)
    erase_dead(context, old, site.region)


def call_of(emitter: SiteEmitter, site: AttentionSite, placed: Placed, plan: Plan) -> fx.Node:
    """The call of the op for ``site``, and what it draws its dropout from."""
    seed = None
    if site.random:
        seed = emitter.call(aten.randint.low, -(2**62), 2**62, [2], dtype=torch.int64, device=placed.q.meta["val"].device)
    return _attention_call(emitter, site, placed, seed, plan)


def exchange(emitter: SiteEmitter, old: fx.Node, result: fx.Node) -> None:
    """Give ``result``, in the layout of ``old``, to the users of ``old``."""
    result = emitter.layout(result, old)
    assert result.meta["val"].shape == old.meta["val"].shape, f"rewritten output has shape {result.meta['val'].shape}, not {old.meta['val'].shape}"
    old.replace_all_uses_with(result)


def _returned(node: fx.Node) -> bool:
    """Is ``node``, or what may be found to share its memory, an output of the graph?"""
    seen, queue = {node}, [node]
    while queue:
        for user in queue.pop().users:
            if user.op == "output":
                return True
            if user not in seen and not makes_its_own(user):
                seen.add(user)
                queue.append(user)
    return False


def _share_copy(context: GraphContext, saved: fx.Node) -> None:
    """The backward pass reads the output: who gets it from the graph may write to it, as eager lets them, so they get a copy."""
    with context.graph.inserting_after(saved):
        copy = context.graph.call_function(torch.ops.fa_inductor.own_copy.default, (saved,))
    copy.meta = dict(saved.meta)
    context.needs_grad.add(copy)
    saved.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


def _with_columns(emitter: SiteEmitter, call: fx.Node, plan: Plan, out: fx.Node, scores: list[fx.Node], zero_rows: bool) -> fx.Node:
    """The output of a softmax that runs over more columns, from the one that runs over the keys alone (see ``columns``)."""
    high, low = lse_of(emitter, call, plan)
    found = emitter.record(partial(shares, zero_rows=zero_rows), [high], [low], scores)
    return emitter.record(partial(weighted, part=0), out, found)


def column_scores_of(emitter: SiteEmitter, site: AttentionSite, out: fx.Node) -> list[fx.Node]:
    ax, found = site.axes, []
    for column in site.columns:
        captures = [emitter.capture(c, out.meta["val"].device) for c in column.captures]
        sizes = [value_of(emitter.size(s)) for s in column.size_symbols]
        box = [value_of(emitter.size(e)) for e in (ax.b, ax.hq, ax.q, column.length)]
        found.append(emitter.record(partial(column_scores, column.program, box, sizes), out, captures))
    return found


def lse_of(emitter: SiteEmitter, call: fx.Node, plan: Plan) -> tuple[fx.Node, fx.Node | None]:
    """The high and, if the kernel keeps one, the low part of the lse; only the high part has a gradient."""
    high = result_of(emitter, call, 1)
    if not kernel_named(plan.kernel).splits_lse(plan):
        return high, None
    low = result_of(emitter, call, 2)
    emitter.context.needs_grad.discard(low)
    return high, low


def result_of(emitter: SiteEmitter, call: fx.Node, position: int) -> fx.Node:
    """One of the results of the attention call."""
    with emitter.context.graph.inserting_before(emitter.before):
        node = emitter.context.graph.call_function(operator.getitem, (call, position))
    node.meta = {**call.meta, "val": call.meta["val"][position]}
    if call in emitter.context.needs_grad:
        emitter.context.needs_grad.add(node)
    return node


def _attention_call(emitter: SiteEmitter, site: AttentionSite, placed: Placed, seed: fx.Node | None, plan: Plan) -> fx.Node:
    """The op call; its fake value is made from shapes alone, without running the kernel's own code."""
    graph, before = emitter.context.graph, emitter.before
    tiles = tiles_of(emitter, site, placed, plan)
    args = (placed.q, placed.k, placed.v, list(placed.captures), tiles, list(placed.sizes), site.dropout_p, seed, plan.to_text())
    with graph.inserting_before(before):
        call = graph.call_function(torch.ops.fa_inductor.attention.default, args)
    q, v = placed.q.meta["val"], placed.v.meta["val"]
    with fake_mode_of(call):
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        low = torch.empty_like(lse) if kernel_named(plan.kernel).splits_lse(plan) else q.new_empty(0)
        empty = q.new_empty(0)
    call.meta = {k: v for k, v in before.meta.items() if k in ("stack_trace", "nn_module_stack")}
    call.meta["val"] = (out, lse, low, empty)
    if any(n in emitter.context.needs_grad for n in call.all_input_nodes):
        emitter.context.needs_grad.add(call)
    return call


def erase_dead(context: GraphContext, root: fx.Node, region: frozenset[fx.Node]) -> None:
    """Erase ``root`` and what only it used. A dropout of the region is erased too: its random numbers have no other reader."""
    queue = [root]
    while queue:
        node = queue.pop()
        if node.users or node.op in ("placeholder", "output") or node._erased:
            continue
        if node is not root and node.is_impure() and not (node in region and name_of(node) == "dropout"):
            continue
        inputs = node.all_input_nodes
        context.graph.erase_node(node)
        queue += inputs
