"""Handing a graph to Inductor: counting the fused calls that it gets, and keeping its own attention matcher off what is left.

Inductor's attention patterns do not look at the axis of a softmax or at the rank of a mask (torch <= 2.13; fixed afterwards by
pytorch#195383): a softmax that is refused here would be fused there into another function. So each division of a softmax that is
left is hidden from the patterns while they run: ``exp / sum`` becomes ``|exp| / sum``, which is the same number, and back again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from . import op
from .counters import record_final

aten = torch.ops.aten
_HIDDEN = "fa_inductor_hidden"


@dataclass(frozen=True)
class Contents:
    """What a graph for Inductor holds: fused sites, those of them that need a gradient, and whether it was searched for softmaxes."""

    fused: int
    differentiated: int
    searched: bool


def compile_with_inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], settings: dict[str, Any], contents: Contents) -> Callable[..., Any]:
    """Compile with Inductor under the user's ``settings``, counting the fused calls of the graphs that it is given.

    A graph that comes whole from AOTAutograd's cache is not given to Inductor again: it was cached under the plans of this very
    graph, so it holds the calls that these make.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    if contents.searched:
        settings = _without_matcher(settings)
    if not contents.fused:
        return compile_fx(gm, example_inputs, config_patches=settings or None)  # type: ignore[return-value]

    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta.pop("val", None)  # for the C++ wrapper Inductor would take it for the example input, and it asks for no gradient
    called = False

    def inner(graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        nonlocal called
        called = True
        backward = bool(kwargs.get("is_backward"))
        calls = min(op.count_calls(graph, backward), contents.fused)  # a model may call PyTorch's fused attention too
        record_final(forward=0 if backward else calls, backward=calls if backward else 0)
        return compile_fx_inner(graph, inputs, **kwargs)

    compiled = compile_fx(gm, example_inputs, inner_compile=inner, config_patches=settings or None)
    if not called:
        record_final(forward=contents.fused, backward=contents.differentiated)
    return compiled  # type: ignore[return-value]


def _without_matcher(settings: dict[str, Any]) -> dict[str, Any]:
    """``settings`` with the two passes around Inductor's patterns, next to the user's own."""
    config: Any = torch._inductor.config
    patched = dict(settings)
    for name, ours, first in (("joint_custom_pre_pass", _hide, False), ("joint_custom_post_pass", _reveal, True)):
        theirs = patched.get(name, getattr(config, name))
        given = [] if theirs is None else list(theirs) if isinstance(theirs, (list, tuple)) else [theirs]
        patched[name] = _Passes([ours, *given] if first else [*given, ours])
    return patched


class _Passes(CustomGraphPass):  # type: ignore[misc]
    """Passes in order; the identity goes into the keys of Inductor's caches."""

    def __init__(self, passes: list[Any]) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self) -> Any:
        known = [_identity(each) for each in self.passes]
        return None if None in known else str(known)


def _identity(each: Any) -> Any:
    """None where a pass has no identity: it then keeps its graphs out of the caches."""
    if each in (_hide, _reveal):
        return f"fa_inductor.{each.__name__}.1"
    return each.uuid() if isinstance(each, CustomGraphPass) else None


def _hide(graph: fx.Graph) -> None:
    for node in list(graph.find_nodes(op="call_function", target=aten.div.Tensor)):
        numerator = node.args[0]
        if isinstance(numerator, fx.Node) and numerator.target is aten.exp.default:
            with graph.inserting_before(node):
                hidden = graph.call_function(aten.abs.default, (numerator,))
            hidden.meta = {**numerator.meta, _HIDDEN: True}
            node.replace_input_with(numerator, hidden)


def _reveal(graph: fx.Graph) -> None:
    for node in list(graph.find_nodes(op="call_function", target=aten.abs.default)):
        if _HIDDEN in node.meta:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)
