"""``torch.vmap`` in a Dynamo graph, replaced by the batched operators that it stands for.

Dynamo records a vmap as calls that push and pop a level of batching around the mapped operators. Each such stretch is run
by itself under ``make_fx``, which sees the batched operators: those that eager differentiates, since batching comes before autograd.
Model code uses it to build masks from a function of positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ..location import location_of
from ..refusal import Refusal, Refused, declare

FUNCTORCH = declare(
    "normalize_functorch", "Graphs with torch.func.grad, jvp, or vmap around random numbers or modes are compiled as they are; write the batched form."
)
_MODULES = ("torch._functorch.predispatch", "torch._functorch.eager_transforms", "torch._C._functorch")
_LEVELS = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}
_MAPPING = frozenset({*_LEVELS, "lazy_load_decompositions", "_add_batch_dim", "_remove_batch_dim"})
_MODES = (torch._C._set_grad_enabled, torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)


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
        _check(copy, region)
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


def _check(gm: fx.GraphModule, region: list[fx.Node]) -> None:
    """Where something is trained, what is not an operator (modes, calls with a body) would be lost on its gradient."""
    trained = [n for n in _inputs(region) if _trains(_value(gm, n))]
    if not trained:
        return
    for node in region:
        if isinstance(node.target, HigherOrderOperator) or (node.op == "call_function" and node.target in _MODES):
            raise _refused(node, f"torch.vmap over {trained[0].name}, which needs a gradient, around {getattr(node.target, '__name__', node.target)}")
    opened = 0
    for node in gm.graph.nodes:
        opened += {_MODES[1]: 1, _MODES[2]: -1}.get(node.target, 0)
        if node is region[0]:
            break
    if opened:
        raise _refused(region[0], f"torch.vmap over {trained[0].name}, which needs a gradient, under autocast")


def _inputs(region: list[fx.Node]) -> list[fx.Node]:
    inside = set(region)
    return list(dict.fromkeys(n for node in region for n in node.all_input_nodes if n not in inside))


def _trains(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled()


def _replace(gm: fx.GraphModule, region: list[fx.Node], mode: FakeTensorMode) -> None:
    inside, inputs = set(region), _inputs(region)
    outputs = [n for n in region if any(u not in inside for u in n.users)]
    values = [_value(gm, n) for n in inputs]
    body = fx.Graph()
    inner = {n: body.placeholder(n.name) for n in inputs}
    for node in region:
        inner[node] = body.node_copy(node, lambda n: inner[n])
    body.output(tuple(inner[n] for n in outputs))
    with torch.set_grad_enabled(any(map(_trains, values))), mode:  # some operators do something else where nothing is trained
        batched = make_fx(fx.Interpreter(fx.GraphModule(gm, body)).run, tracing_mode="real")(*values)
    known = dict(zip(batched.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in batched.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            for old, new in zip(outputs, node.args[0], strict=True):
                _same_kind(region[0], old.meta.get("example_value"), new.meta["val"])
                old.replace_all_uses_with(known[new], delete_user_cb=lambda user: user not in inside)
            continue
        if node.op == "get_attr" or (isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags):
            raise _refused(region[0], f"torch.vmap with {node.target}")
        with gm.graph.inserting_before(region[0]):
            known[node] = gm.graph.node_copy(node, lambda n: known[n])
        known[node].meta = {k: v for k, v in region[0].meta.items() if k in ("stack_trace", "nn_module_stack", "source_fn_stack")}
    for node in reversed(region):
        gm.graph.erase_node(node)


def _same_kind(at: fx.Node, old: Any, new: Any) -> None:
    if isinstance(old, torch.Tensor) and (old.dtype, old.dim()) != (new.dtype, new.dim()):
        raise _refused(at, f"torch.vmap whose batched operators yield {new.dtype}, not {old.dtype}")


def _value(gm: fx.GraphModule, node: fx.Node) -> Any:
    return node.meta["example_value"] if "example_value" in node.meta else getattr(gm, str(node.target))


def _refused(node: fx.Node, what: str) -> Refused:
    return Refused(Refusal(FUNCTORCH, f"the graph runs {what}", node.name, location_of(node)))
