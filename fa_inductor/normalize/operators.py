"""The functional form of an in-place operator: ``x.op_(…)`` as ``op(x, …)`` with x's dtype.

Random in-place operators keep their place in the graph, so the generator's sequence does not change.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch._ops import OpOverload

from .aliases import same_size
from .editor import Editor, Impossible

aten = torch.ops.aten

_RANDOM = frozenset({aten.dropout_.default, aten.bernoulli_.float})
"""Random operators whose functional form has a derivative and the same distribution."""


def functional_form(editor: Editor, node: fx.Node, *, autocast: bool, stands_alone: bool) -> fx.Node:
    """Insert, before ``node``, the value that its first argument has after it.

    Args:
        autocast: autocast may be on there.
        stands_alone: the value is used as it is (else it is only copied into a base).
    """
    target = node.target
    assert isinstance(target, OpOverload)
    x = node.args[0]
    assert isinstance(x, fx.Node)
    if target is aten.copy_.default:
        return _copied(editor, node, x, stands_alone)
    if target is aten.zero_.default:
        return editor.call(node, node, aten.zeros_like.default, x)
    functional = functional_overload(target)
    if functional is None or (torch.Tag.nondeterministic_seeded in target.tags and not _may_redraw(node)):
        raise Impossible(f"{target} has no functional form that gives the same result")
    if autocast and _autocast_rule(functional) and not _autocast_rule(target):
        raise Impossible(f"autocast has a rule for {functional} and none for {target}")
    args = [*node.args, *(a.default_value for a in target._schema.arguments[len(node.args) :] if not a.kwarg_only and a.name not in node.kwargs)]
    value = editor.call(node, node, functional, *args, **node.kwargs)
    dtype = x.meta["val"].dtype
    if value.meta["val"].dtype != dtype:
        value = editor.call(node, node, aten.to.dtype, value, dtype)
    return value


def _copied(editor: Editor, node: fx.Node, x: fx.Node, stands_alone: bool) -> fx.Node:
    """``x.copy_(source)``: the source with x's dtype and shape."""
    source = node.args[1]
    assert isinstance(source, fx.Node)
    to, given = x.meta["val"], source.meta["val"]
    if given.device != to.device:
        raise Impossible("it is copied from another device")
    value = source
    if given.dtype != to.dtype:
        value = editor.call(node, node, aten.to.dtype, value, to.dtype)
    if len(given.shape) != len(to.shape) or not all(map(same_size, given.shape, to.shape)):
        value = editor.call(node, node, aten.expand.default, value, editor.sizes(node, x))
    shares_memory = value is source or value.target is aten.expand.default
    return editor.call(node, node, aten.clone.default, value) if shares_memory and stands_alone else value


@cache
def functional_overload(op: OpOverload) -> OpOverload | None:
    """The operator of the same name without the underscore and with the same arguments, if it has a derivative of its own."""
    name = op._schema.name.removeprefix("aten::")
    if op.namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(aten, name.removesuffix("_"), None)
    overload = {"bernoulli_.float": "p"}.get(f"{name}.{op._overloadname}", op._overloadname)
    found: Any = getattr(packet, overload, None)
    if found is None or found._schema.is_mutable or torch.Tag.generated in found.tags:
        return None
    same = [str(a.type) for a in found._schema.arguments] == [str(a.type) for a in op._schema.arguments]
    return found if same else None


def _may_redraw(node: fx.Node) -> bool:
    """The functional form can be another kernel that draws other numbers: not where Inductor is told to reproduce eager's.

    A dropout in evaluation, or of nothing, draws none.
    """
    if node.target is aten.dropout_.default and (node.args[1] == 0 or not node.args[2]):
        return True
    return node.target in _RANDOM and not inductor_config.fallback_random


@cache
def _autocast_rule(op: OpOverload) -> bool:
    name = op.name()  # type: ignore[no-untyped-call]
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in ("AutocastCPU", "AutocastCUDA"))
