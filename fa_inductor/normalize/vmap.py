"""``torch.vmap`` in a Dynamo graph, replaced by the batched operators that it stands for.

Dynamo records a vmap as calls that push and pop a level of batching around the mapped operators. Each such stretch is run
by itself under ``make_fx``, which sees the batched operators. Model code uses it to build masks from a function of positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ..location import location_of
from ..refusal import Refusal, Refused, declare

FUNCTORCH = declare("normalize_functorch", "Graphs with torch.func.grad, jvp, or vmap over what is trained are compiled as they are; write the batched form.")
_MODULES = ("torch._functorch.predispatch", "torch._functorch.eager_transforms", "torch._C._functorch")
_LEVELS = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}
_MAPPING = frozenset({*_LEVELS, "lazy_load_decompositions", "_add_batch_dim", "_remove_batch_dim"})


def _function(node: fx.Node) -> str:
    """Name of a function transform's call, else empty."""
    return str(node.target.__name__) if getattr(node.target, "__module__", "") in _MODULES else ""  # type: ignore[union-attr]


def without_vmap(gm: fx.GraphModule, mode: FakeTensorMode) -> fx.GraphModule:
    """``gm``, or a copy in which no vmap is left; raises Refused for other function transforms."""
    calls = [n for n in gm.graph.nodes if _function(n)]
    if not calls:
        return gm
    for node in calls:
        if _function(node) not in _MAPPING:
            raise _refused(node, f"{_function(node)} of torch.func")
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, copies)
    graph.output(output)
    copy = fx.GraphModule(gm, graph)
    copy.meta.update(gm.meta)
    for region in _regions(graph):
        _replace(copy, region, mode)
    for node in [n for n in graph.nodes if _function(n) and not n.users]:
        graph.erase_node(node)  # lazy_load_decompositions
    copy.recompile()
    return copy


def _regions(graph: fx.Graph) -> list[list[fx.Node]]:
    """The stretches of nodes from the first level pushed to the last one popped."""
    found: list[list[fx.Node]] = []
    depth = 0
    for node in graph.nodes:
        change = _LEVELS.get(_function(node), 0)
        if depth == 0 and change == 1:
            found.append([])
        depth += change
        if depth or change:
            found[-1].append(node)
    return [[n for n in region if n.op != "get_attr"] for region in found]


def _replace(gm: fx.GraphModule, region: list[fx.Node], mode: FakeTensorMode) -> None:
    inside = set(region)
    inputs = list(dict.fromkeys(n for node in region for n in node.all_input_nodes if n not in inside))
    outputs = [n for n in region if any(u not in inside for u in n.users)]
    values = [_value(gm, n) for n in inputs]
    for node, value in zip(inputs, values, strict=True):
        if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise _refused(region[0], f"torch.vmap over {node.name}, which needs a gradient")
    body = fx.Graph()
    inner = {n: body.placeholder(n.name) for n in inputs}
    for node in region:
        inner[node] = body.node_copy(node, lambda n: inner[n])
    body.output(tuple(inner[n] for n in outputs))
    with torch.no_grad(), mode:
        batched = make_fx(fx.Interpreter(fx.GraphModule(gm, body)).run, tracing_mode="real")(*values)
    known = dict(zip(batched.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in batched.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            for old, new in zip(outputs, node.args[0], strict=True):
                old.replace_all_uses_with(known[new], delete_user_cb=lambda user: user not in inside)
            continue
        if node.op == "get_attr" or (isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags):
            raise _refused(region[0], f"torch.vmap with {node.target}")
        with gm.graph.inserting_before(region[0]):
            known[node] = gm.graph.node_copy(node, lambda n: known[n])
        known[node].meta = {k: v for k, v in region[0].meta.items() if k in ("stack_trace", "nn_module_stack", "source_fn_stack")}
    for node in reversed(region):
        gm.graph.erase_node(node)


def _value(gm: fx.GraphModule, node: fx.Node) -> Any:
    return node.meta["example_value"] if "example_value" in node.meta else getattr(gm, str(node.target))


def _refused(node: fx.Node, what: str) -> Refused:
    return Refused(Refusal(FUNCTORCH, f"the graph runs {what}", node.name, location_of(node)))
