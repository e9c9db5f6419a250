"""The fused output's memory layout: eager's wherever someone could tell.

A kernel writes its output in q's dimension order, which makes the usual ``transpose(1, 2).reshape(…)`` behind it free. The matmul that
it replaces wrote a dense tensor of its own. So the uses are followed: where they end in ops that give the same result for any
layout, nothing is done but to turn ``view`` into ``reshape``; where the layout could be seen (graph outputs, ``as_strided``, unknown
ops) the output is put into eager's layout.
"""

from __future__ import annotations

from torch import fx

from .index import as_expr
from .patterns import generators, pointwise, views
from .patterns.views import name_of

_STOPS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "contiguous", "layer_norm", "native_layer_norm"})
"""Ops whose result, layout included, does not depend on their input's layout."""
_MOST = 300


def freed_views(node: fx.Node) -> list[fx.Node] | None:
    """The ``view`` calls behind ``node`` that must become ``reshape`` so that its layout is free; None if it can be seen."""
    found: list[fx.Node] = []
    seen = {node}
    queue = [node]
    while queue:
        for user in queue.pop().users:
            name = name_of(user)
            if user in seen or name in _STOPS:
                continue
            if len(seen) > _MOST or not _passes(user, name):
                return None
            if name in ("view", "_unsafe_view"):
                found.append(user)
            seen.add(user)
            queue.append(user)
    return found


def _passes(user: fx.Node, name: str) -> bool:
    """Views and elementwise ops hand the layout on; whatever else is not known may show it."""
    if name in ("split", "chunk", "unbind", "split_with_sizes", "getitem", "dropout"):
        return True
    return name not in ("view_as", "_reshape_alias", "as_strided") and (name in views.RULES or name in pointwise.RULES)


_NEVER_ITS_INPUT = frozenset({"layer_norm", "native_layer_norm", "rms_norm", "group_norm", "batch_norm", "softmax", "log_softmax", "sum", "mean", "var"})
_SUMS = frozenset({"add", "sub", "subtract", "rsub"})
_PRODUCTS = frozenset({"mul", "multiply", "div", "divide", "true_divide", "pow"})
_MAY_RETURN_ITS_INPUT = frozenset({"to", "_to_copy", "dropout", "feature_dropout", "type_as", "float"})


def makes_its_own(node: fx.Node) -> bool:
    """Is the result never its input, nor a view of it, after Inductor's passes either (which drop copies and additions of 0)?

    What is not known counts as an alias.
    """
    name = name_of(node)
    if name in _STOPS - {"contiguous", "einsum"} or name in _NEVER_ITS_INPUT:
        return True
    if name in ("to", "_to_copy"):
        source = node.args[0]
        return isinstance(source, fx.Node) and source.meta["val"].dtype != node.meta["val"].dtype
    if name in views.RULES or name in _MAY_RETURN_ITS_INPUT or name not in pointwise.RULES:
        return False
    if name not in _SUMS | _PRODUCTS:
        return True
    constant = any(name_of(n) in generators.RULES for n in node.all_input_nodes)  # of zeros or ones, perhaps
    return not constant and (0 if name in _SUMS else 1) not in [x for x in node.args if isinstance(x, (int, float))]


def dense_order(node: fx.Node) -> list[int] | None:
    """Dimensions of ``node`` from the slowest in memory, or None where it is contiguous."""
    value = node.meta["val"]
    if value.is_contiguous():
        return None
    strides = [as_expr(s) for s in value.stride()]
    order = sorted(range(len(strides)), key=lambda d: strides[d].subs(dict.fromkeys(strides[d].free_symbols, 4096)), reverse=True)
    return None if order == sorted(order) else order
