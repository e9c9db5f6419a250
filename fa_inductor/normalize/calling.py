"""Making a traced graph callable, and recognisable to later compilers, exactly as the Dynamo graph it came from."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode


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
            new._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]
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
        with traced.graph.inserting_before(node):
            literal = _literal(traced.graph, value)
        literal.meta.update(node.meta)
        literal.meta["val"] = mode.from_tensor(value, static_shapes=True)
        for user in list(node.users):
            if user.target is torch.ops.aten.lift_fresh_copy.default:
                user.replace_all_uses_with(literal)
                traced.graph.erase_node(user)
        node.replace_all_uses_with(literal)
        traced.graph.erase_node(node)
        delattr(traced, name)


def _literal(graph: fx.Graph, value: torch.Tensor) -> fx.Node:
    how = {"dtype": value.dtype, "device": value.device}
    if value.dim() == 0:
        return graph.call_function(torch.ops.aten.full.default, ([], value.item()), how)
    return graph.call_function(torch.tensor, (value.tolist(),), how)
