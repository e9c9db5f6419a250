"""Retracing a Dynamo graph into pre-dispatch ATen.

The graph runs under copies of its placeholders' fake tensors, in their own fake mode (the tracing context's is another
one), inside ``make_fx(pre_dispatch=True)``: composite operators such as matmul, softmax, dropout and einsum stay whole, no
autograd formula and no autocast cast is applied yet, and autocast and grad-mode switches are recorded as nodes.

Higher-order operators cannot run there (activation checkpointing needs state that only exists later), so each stays one
call of the outer graph and yields the fake values that Dynamo computed for it.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx, track_tensor_tree
from torch.utils import _pytree as pytree

from .calling import adopt_placeholders, inline_constants
from .fakes import fresh_copies
from .state import Ambient, ambient, restored
from .vmap import without_vmap

PLAIN_WRAPPERS = frozenset({"tag_activation_checkpoint", "wrap"})
"""Higher-order operators ``op(body, *operands)`` that yield ``body(*operands)``."""


@dataclass
class BodyCall:
    """How a higher-order node calls one of its body modules: what the body's placeholders are given, and under which modes."""

    node: fx.Node
    path: str
    operands: tuple[Any, ...]
    ambient: Ambient


class TraceError(Exception):
    """Running one node of the original graph failed; the cause is chained."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node.name)
        self.node = node


@dataclass
class Trace:
    """The retraced graph and the calls of plain wrappers in it."""

    gm: fx.GraphModule
    bodies: list[BodyCall] = field(default_factory=list)


class _Retrace(fx.Interpreter):
    """Interprets a Dynamo graph; higher-order nodes and attributes are recorded instead of run."""

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm)
        self.mode = mode
        self.bodies: list[BodyCall] = []
        self.recorded: dict[fx.Node, Any] = {}
        self.modules: dict[fx.Node, fx.Node] = {}
        self.autocasts: list[Any] = []
        for node in gm.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, HigherOrderOperator):
                self.recorded[node] = fresh_copies(node.meta["example_value"], mode)
            elif node.op == "get_attr":
                self.recorded[node] = self._attribute(node)

    def _attribute(self, node: fx.Node) -> Any:
        value = self.fetch_attr(str(node.target))
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            with self.mode:
                return fresh_copies(self.mode.from_tensor(value, static_shapes=True), self.mode)
        return value

    def run_node(self, n: fx.Node) -> Any:
        if n not in self.recorded:
            try:
                return super().run_node(n)
            except Exception as error:
                raise TraceError(n) from error
        value = self.recorded[n]
        mode = get_proxy_mode()
        assert mode is not None, "only runs inside make_fx"
        with fx.traceback.set_current_meta(n):
            node = self._record_attribute(n, mode.tracer) if n.op == "get_attr" else self._record_call(n, mode.tracer)
            if isinstance(value, torch.nn.Module):
                self.modules[n] = node
                return value
            return track_tensor_tree(value, fx.Proxy(node, mode.tracer), constant=None, tracer=mode.tracer)  # type: ignore[arg-type]

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Under make_fx the two autocast functions are recorded without being run; the context manager does both."""
        if target is torch.amp.autocast_mode._enter_autocast:
            self.autocasts.append(torch.autocast(*args))
            return self.autocasts[-1].__enter__()
        if target is torch.amp.autocast_mode._exit_autocast:
            return self.autocasts.pop().__exit__(None, None, None)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``x.contiguous()`` stays in the graph where x is contiguous already: under Inductor's decompositions it may not be
        (a cat with an empty tensor becomes a clone, which keeps the strides). Not where a node would look like a detached
        tensor while the call returns x itself."""
        if target == "contiguous" and (torch.is_grad_enabled() or not args[0].requires_grad):
            return torch.ops.aten.contiguous.default(*args, **kwargs)
        return super().call_method(target, args, kwargs)

    def leave_autocasts(self) -> None:
        """After an error in one."""
        while self.autocasts:
            self.autocasts.pop().__exit__(None, None, None)

    def _record_attribute(self, n: fx.Node, tracer: Any) -> fx.Node:
        name = str(n.target)
        holder = tracer.root
        *parents, leaf = name.split(".")
        for parent in parents:
            if not hasattr(holder, parent):
                holder.add_module(parent, torch.nn.Module())
            holder = getattr(holder, parent)
        if not hasattr(holder, leaf):
            setattr(holder, leaf, self.fetch_attr(name))
        return cast(fx.Node, tracer.create_node("get_attr", name, (), {}))

    def _record_call(self, n: fx.Node, tracer: Any) -> fx.Node:
        def argument(node: fx.Node) -> Any:
            if node in self.modules:
                return self.modules[node]
            return pytree.tree_map(lambda leaf: _node_of(leaf, tracer), self.env[node])

        args, kwargs = fx.map_arg(n.args, argument), fx.map_arg(n.kwargs, argument)
        created = cast(fx.Node, tracer.create_node("call_function", n.target, args, kwargs, name=n.name))
        body = n.args[0] if str(n.target) in PLAIN_WRAPPERS else None
        if isinstance(body, fx.Node):
            operands = fx.map_arg(tuple(n.args[1:]), lambda node: self.env[node])
            self.bodies.append(BodyCall(created, str(body.target), operands, ambient()))
        return created


def _node_of(value: Any, tracer: Any) -> Any:
    """The graph node that produced a traced value; constants are themselves."""
    if isinstance(value, torch.Tensor):
        return get_proxy_slot(value, tracer).proxy.node
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return get_proxy_slot(value, tracer).force().node
    return value


def retrace(gm: fx.GraphModule, values: tuple[Any, ...], mode: FakeTensorMode) -> Trace:
    """Trace ``gm`` on ``values``, one for each placeholder; they may be updated in place. ``gm`` is left as it is."""
    gm = without_vmap(gm, mode)
    interpreter = _Retrace(gm, mode)

    def run(*args: Any) -> Any:
        return interpreter.run(*args, enable_io_processing=False)

    # every size this asks about was asked, and guarded on, when Dynamo ran the same calls; guards that only describe
    # results (contiguity) would be new
    quiet = mode.shape_env.suppress_guards() if mode.shape_env is not None else nullcontext()
    with restored(), fx.traceback.preserve_node_meta(), mode, quiet:
        try:
            traced = make_fx(run, pre_dispatch=True, tracing_mode="real")(*values)
        finally:
            interpreter.leave_autocasts()
    adopt_placeholders(traced, gm)
    inline_constants(traced, gm, mode)
    return Trace(traced, interpreter.bodies)
