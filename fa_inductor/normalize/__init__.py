"""Dynamo graph → functional, pre-dispatch ATen graph with the same calling convention.

``trace`` retraces the graph, ``functional`` takes in-place operators on fresh intermediates out of it. The bodies of
activation checkpointing and other plain wrappers are treated the same way and stay where they were. Whatever goes wrong
becomes a Refusal, and the caller compiles the original graph.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from ..location import location_of
from ..refusal import Refusal, Refused, declare
from .aliases import CLEAN, writes_inputs
from .calling import placeholders
from .fakes import find_fake_mode, fresh_copies
from .functional import functionalise
from .modes import modes
from .state import ambient, restored
from .trace import BodyCall, Trace, TraceError, retrace

__all__ = ["Normalized", "normalize"]

log = logging.getLogger(__name__)

FAILED = declare("normalize_failed", "The graph was compiled by Inductor as it is; please report the message together with the code at that line.")
NO_TENSORS = declare("normalize_no_tensors", "Nothing to do: the graph has no tensor input.")
METADATA = declare("normalize_input_metadata", "Use the operator without the underscore, as x.t(), to have the graph analysed.")
SUBCLASS = declare("normalize_tensor_subclass", "Tensor subclasses (DTensor, quantised weights) are compiled by Inductor as they are.")


@dataclass(frozen=True)
class Normalized:
    """``gm`` replaces the Dynamo graph. Every tensor node has ``meta["val"]`` (a fake tensor) and ``meta["requires_grad"]``."""

    gm: fx.GraphModule
    subgraphs: tuple[tuple[str, fx.GraphModule], ...] = ()
    """Bodies of higher-order nodes that were normalised too, by attribute path: search them like ``gm`` itself."""
    left: tuple[str, ...] = ()
    """In-place updates of intermediates that stayed in the graph, and why."""


def normalize(gm: fx.GraphModule) -> Normalized | Refusal:
    """Normalise a graph as a Dynamo backend receives it (``example_value`` on its placeholders); ``gm`` is not changed."""
    try:
        values = tuple(n.meta["example_value"] for n in placeholders(gm))
        return _normalize(gm, values, _fake_mode(values))
    except Refused as refused:
        return refused.refusal
    except TraceError as error:
        log.debug("normalize failed at %s", error.node.format_node(), exc_info=True)
        cause = error.__cause__
        return Refusal(FAILED, f"{type(cause).__name__}: {cause}", error.node.name, location_of(error.node))
    except Exception as error:
        log.debug("normalize failed", exc_info=True)
        return Refusal(FAILED, f"{type(error).__name__}: {error}")


def _fake_mode(values: tuple[Any, ...]) -> FakeTensorMode:
    mode = find_fake_mode(values)
    if mode is None:
        raise Refused(Refusal(NO_TENSORS, "no input of the graph is a tensor"))
    for value in pytree.tree_leaves(values):
        if hasattr(value, "__tensor_flatten__"):
            raise Refused(Refusal(SUBCLASS, f"an input is a {type(value).__name__}"))
    return mode


def _normalize(gm: fx.GraphModule, values: tuple[Any, ...], mode: FakeTensorMode) -> Normalized:
    """Under the grad mode and autocast that are to surround the graph."""
    trace = retrace(gm, fresh_copies(values, mode), mode)
    _check_metadata_updates(trace.gm)
    subgraphs, left, writers = _normalize_bodies(trace, mode)
    clean = frozenset(c.node for c in trace.bodies if c.path not in writers)
    for node in clean:
        node.meta[CLEAN] = True
    grad, autocast = ambient()
    anywhere = any(enabled for _, enabled, _ in autocast)
    left += functionalise(trace.gm, mode, modes(trace.gm, grad, anywhere), clean)
    for node, mode_ in modes(trace.gm, grad, anywhere).items():
        if any(isinstance(v, FakeTensor) for v in pytree.tree_leaves(node.meta.get("val"))):
            node.meta["requires_grad"] = mode_.requires_grad
    trace.gm.recompile()
    return Normalized(trace.gm, tuple(subgraphs), tuple(left))


def _check_metadata_updates(gm: fx.GraphModule) -> None:
    """Dynamo's example of an input whose metadata is changed in place (``x.t_()``) may already show it changed: not a start to trace from."""
    for node in gm.graph.nodes:
        if isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags and writes_inputs(gm, node):
            raise Refused(Refusal(METADATA, f"{node.target} changes an input's shape or strides in place", node.name, location_of(node)))


def _normalize_bodies(trace: Trace, mode: FakeTensorMode) -> tuple[list[tuple[str, fx.GraphModule]], list[str], set[str]]:
    """Normalise each body in place (once, also when several nodes call it); the third result names those that write an operand."""
    subgraphs: list[tuple[str, fx.GraphModule]] = []
    left: list[str] = []
    writers: set[str] = set()
    calls: dict[str, BodyCall] = {}
    for call in trace.bodies:
        calls.setdefault(call.path, call)
    for path, call in calls.items():
        with restored(call.ambient):
            inner = _normalize(trace.gm.get_submodule(path), call.operands, mode)  # type: ignore[arg-type]
        trace.gm.set_submodule(path, inner.gm)
        subgraphs += [(path, inner.gm), *((f"{path}.{p}", g) for p, g in inner.subgraphs)]
        left += [f"{path}.{line}" for line in inner.left]
        if writes_inputs(inner.gm):
            writers.add(path)
    return subgraphs, left, writers
