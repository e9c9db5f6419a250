"""Grad mode, autocast and gradient flow at each node of a traced graph, from its switch nodes."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

_STOPS_GRADIENT = frozenset({torch.ops.aten.detach.default, torch.ops.aten.detach_copy.default})


@dataclass(frozen=True)
class Modes:
    """What surrounds one node. ``autocast`` is true where it may be on for some device."""

    grad: bool
    autocast: bool
    requires_grad: bool


def modes(gm: fx.GraphModule, grad: bool, autocast: bool) -> dict[fx.Node, Modes]:
    """``grad`` and ``autocast``: what holds when the graph starts.

    ``requires_grad`` follows autograd's rule: a floating result of an operation under grad mode with an argument that
    requires it. Placeholders say so themselves.
    """
    found: dict[fx.Node, Modes] = {}
    depth = 0
    for node in gm.graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            grad = bool(node.args[0])
        elif node.target is torch.amp.autocast_mode._enter_autocast:
            depth += 1
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            depth -= 1
        found[node] = Modes(grad, autocast or depth > 0, _requires_grad(gm, node, grad, found))
    return found


def _requires_grad(gm: fx.GraphModule, node: fx.Node, grad: bool, found: dict[fx.Node, Modes]) -> bool:
    if node.op == "placeholder":
        return bool(getattr(node.meta.get("example_value"), "requires_grad", False))
    values = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, FakeTensor)]
    if node.op == "get_attr":
        return bool(getattr(attrgetter(str(node.target))(gm), "requires_grad", False))
    if not grad or node.target in _STOPS_GRADIENT or not any(v.is_floating_point() or v.is_complex() for v in values):
        return False
    return any(found[n].requires_grad for n in node.all_input_nodes)
