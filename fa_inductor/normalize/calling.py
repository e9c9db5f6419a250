"""Making a traced graph callable, and recognisable to later compilers, exactly as the Dynamo graph it came from."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


def adopt_placeholders(traced: fx.GraphModule, original: fx.GraphModule) -> None:
    """Give the traced graph the original's names and the side tables by which later compilers know parameters and sources."""
    for new, old in zip(placeholders(traced), placeholders(original), strict=True):
        value = new.meta.get("val")
        new.target, new.type = old.target, old.type
        new._rename(old.name)
        new.meta = dict(old.meta)
        new.meta["val"] = value
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    traced.meta.update(original.meta)
    for name, value in original.__dict__.items():
        if name not in traced.__dict__:
            traced.__dict__[name] = value


def inline_constants(traced: fx.GraphModule, original: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Tensors that tracing met as literals (``torch.tensor(3.0)``) become calls again.

    As attributes they would be parameters of unknown source to AOTAutograd, and graph caches would not see their values.
    """
    known = {str(n.target) for n in original.graph.find_nodes(op="get_attr")}
    for node in traced.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        value = getattr(traced, name, None)
        if name in known or not isinstance(value, torch.Tensor):
            continue
        for user in list(node.users):
            if user.target is aten.lift_fresh_copy.default:
                _replace(traced.graph, user, value)
        if node.users:
            node.meta["val"] = mode.from_tensor(value, static_shapes=True)
            _replace(traced.graph, node, value)
        else:
            traced.graph.erase_node(node)
        delattr(traced, name)


def _replace(graph: fx.Graph, node: fx.Node, value: torch.Tensor) -> None:
    """Put a call that makes ``value`` in the place of a node (and of the ``detach_`` that ``torch.tensor`` ends with)."""
    how: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    with graph.inserting_before(node):
        if value.dim() == 0:
            literal = graph.call_function(aten.full.default, ([], value.item()), how)
        else:
            literal = graph.call_function(torch.tensor, (value.tolist(),), how)
    literal.meta.update(node.meta)
    for old in [*(u for u in node.users if u.target is aten.detach_.default), node]:
        old.replace_all_uses_with(literal)
        graph.erase_node(old)
