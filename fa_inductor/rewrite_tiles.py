"""The calls that list a mask's tiles: one beside each fused call whose kernel asks for it, then one for all that ask the same of the same tensors.

Layers that share a mask thus pass over it once a step, and the backward pass reads what the forward pass found.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .emitter import fake_mode_of, fake_value
from .kernel_table import kernel_named
from .normalize.aliases import storage_keys, writes
from .request import Plan
from .site import AttentionSite

if TYPE_CHECKING:
    from .rewrite import Placed, SiteEmitter

aten = torch.ops.aten
_SAME_VALUES = frozenset({aten.to.dtype, aten.permute.default, aten.contiguous.default, aten.reshape.default, aten.detach.default})
"""What may stand between a captured tensor and a call: equal calls on the same tensor give the same."""


def tiles_of(emitter: SiteEmitter, site: AttentionSite, placed: Placed, plan: Plan) -> list[fx.Node]:
    """What the fused call is given as its ``tiles``, emitted before it; nothing where the kernel asks for nothing."""
    context = emitter.context
    backward = any(n in context.needs_grad for n in (placed.q, placed.k, placed.v, *placed.captures))
    lists = kernel_named(plan.kernel).tile_lists(plan, backward)
    if lists is None:
        return []
    captures, sizes = [placed.captures[c] for c in lists.captures], [placed.sizes[s] for s in lists.sizes]
    shape = [emitter.size(e) for e in (site.axes.b, site.axes.hq, site.axes.q, site.axes.k)]
    like = captures[0] if captures else placed.q
    args = (like, captures, sizes, shape, lists.kernel, lists.text)
    with fake_mode_of(like):
        shapes = lists.shapes(fake_value(shape))
        found = [like.meta["val"].new_empty(s, dtype=torch.int32) for s in shapes]
    call = emitter.append(torch.ops.fa_inductor.find_tiles.default, args, {}, found)
    context.needs_grad.discard(call)
    return [emitter.append(operator.getitem, (call, i), {}, value) for i, value in enumerate(found)]


def share_tiles(graph: fx.Graph) -> None:
    """Let calls that ask the same of the same tensors, unwritten in between, be one."""
    known: dict[Any, fx.Node] = {}
    read: dict[Any, frozenset[int]] = {}
    for node in list(graph.nodes):
        for key in [k for k, storages in read.items() if any(storages & storage_keys(w) for w in writes(node))]:
            del known[key], read[key]
        if node.target is not torch.ops.fa_inductor.find_tiles.default:
            continue
        like, captures, *rest = node.args
        key = (tuple(_identity(c) for c in captures), str(rest), like.meta["val"].device)
        if key not in known:
            known[key], read[key] = node, frozenset(s for c in captures for s in _storages(c))
            continue
        node.replace_all_uses_with(known[key])
        graph.erase_node(node)


def _identity(node: fx.Node) -> Any:
    if node.target not in _SAME_VALUES:
        return node
    return (node.target, *(_identity(a) if isinstance(a, fx.Node) else str(a) for a in (*node.args, *node.kwargs.values())))


def _storages(node: fx.Node) -> frozenset[int]:
    """Of the tensor and of what it was made from."""
    own = storage_keys(node)
    return own.union(*(_storages(n) for n in node.all_input_nodes)) if node.target in _SAME_VALUES else own
