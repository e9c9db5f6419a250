"""Contractions: the ways to spell a batched matrix product, reduced to one description.

``out[index] = alpha * sum_r lhs[lhs_index] * rhs[rhs_index] + beta * addend[addend_index]`` with one summed symbol r.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy
from torch import fx

from fa_inductor.index import ZERO, Expr, broadcast_index, equal, shape_of

from .views import argument, name_of

NAMES = frozenset({"matmul", "linalg_matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "linear"})
OTHER_PRODUCTS = frozenset(
    {
        "matmul.out",
        "linalg_matmul.out",
        "bmm.out",
        "mm.out",
        "addmm.out",
        "baddbmm.out",
        "addmm_",
        "baddbmm_",
        "tensordot",
        "linalg_multi_dot",
        "chain_matmul",
        "inner",
        "mv",
        "dot",
        "linalg_vecdot",
    }
)
"""Matrix products that are not analysed."""


@dataclass(frozen=True)
class Contraction:
    """See the module docstring; ``size`` is the extent of the summed symbol."""

    node: fx.Node
    lhs: fx.Node
    lhs_index: tuple[Expr, ...]
    rhs: fx.Node
    rhs_index: tuple[Expr, ...]
    size: Expr
    alpha: object = 1
    beta: object = 0
    addend: fx.Node | None = None
    addend_index: tuple[Expr, ...] = ()


def is_contraction(node: object) -> bool:
    return name_of(node) in NAMES


def describe(node: fx.Node, index: tuple[Expr, ...], r: sympy.Symbol) -> Contraction | None:
    """``node`` read at ``index`` with the summed symbol ``r``, or None where it is not of the form above."""
    name = name_of(node)
    if name == "einsum":
        return _einsum(node, index, r)
    if name in ("addmm", "baddbmm"):
        addend, lhs, rhs = node.args[:3]
        plain = _matrix_product(node, lhs, rhs, index, r)
        assert isinstance(addend, fx.Node)
        beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
        at = broadcast_index(shape_of(addend.meta["val"]), index)
        return plain and Contraction(node, plain.lhs, plain.lhs_index, plain.rhs, plain.rhs_index, plain.size, alpha, beta, addend, at)
    if name == "linear":
        lhs, rhs, bias = node.args[0], node.args[1], argument(node, 2, "bias")
        assert isinstance(lhs, fx.Node) and isinstance(rhs, fx.Node)
        product = Contraction(node, lhs, (*index[:-1], r), rhs, (index[-1], r), shape_of(lhs.meta["val"])[-1])
        return product if bias is None else replace(product, beta=1, addend=bias, addend_index=index[-1:])
    if name in NAMES:
        return _matrix_product(node, node.args[0], node.args[1], index, r)
    return None


def _matrix_product(node: fx.Node, lhs: object, rhs: object, index: tuple[Expr, ...], r: sympy.Symbol) -> Contraction | None:
    assert isinstance(lhs, fx.Node) and isinstance(rhs, fx.Node)
    left, right = shape_of(lhs.meta["val"]), shape_of(rhs.meta["val"])
    if not left or not right:
        return None
    at = list(index)
    column = at.pop() if len(right) > 1 else ZERO
    row = at.pop() if len(left) > 1 else ZERO
    batch = tuple(at)
    lhs_index = (*broadcast_index(left[:-2], batch), row, r) if len(left) > 1 else (r,)
    rhs_index = (*broadcast_index(right[:-2], batch), r, column) if len(right) > 1 else (r,)
    return Contraction(node, lhs, lhs_index, rhs, rhs_index, left[-1])


def _einsum(node: fx.Node, index: tuple[Expr, ...], r: sympy.Symbol) -> Contraction | None:
    labels = labels_of(node)
    if labels is None:
        return None
    operands = node.args[1]
    assert isinstance(operands, (list, tuple))
    left, right = operands
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    shapes = shape_of(left.meta["val"]), shape_of(right.meta["val"])
    inputs, output = labels
    if len(output) != len(index):
        return None
    position = dict(zip(output, index))
    summed = [x for x in dict.fromkeys((*inputs[0], *inputs[1])) if x not in position]
    if len(summed) != 1 or any(summed[0] not in word for word in inputs):
        return None
    position[summed[0]] = r
    sizes = [shape[word.index(summed[0])] for word, shape in zip(inputs, shapes)]
    if not equal(*sizes):
        return None
    at = [tuple(ZERO if size == 1 and x != summed[0] else position[x] for x, size in zip(word, shape)) for word, shape in zip(inputs, shapes)]
    return Contraction(node, left, at[0], right, at[1], sizes[0])


def labels_of(node: fx.Node) -> tuple[list[list[str]], list[str]] | None:
    """Labels of both operands and of the output of an einsum; None where there are not two, or a label is repeated in one."""
    equation, operands = node.args[0], node.args[1]
    if not isinstance(equation, str) or not isinstance(operands, (list, tuple)) or len(operands) != 2:
        return None
    labels = _labels(equation, [x.meta["val"].dim() for x in operands if isinstance(x, fx.Node)])
    return None if labels is None or any(len(set(word)) != len(word) for word in (*labels[0], labels[1])) else labels


def _labels(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]] | None:
    """Labels of both operands and of the output; an ellipsis becomes the labels ``...0``, ``...1`` … counted from the right."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    words = left.split(",")
    if len(words) != 2:
        return None
    expanded = []
    for word, rank in zip(words, ranks):
        before, dots, after = word.partition("...")
        hidden = rank - len(before) - len(after)
        if hidden < 0 or (hidden and not dots):
            return None
        expanded.append([*before, *(f"...{i}" for i in reversed(range(hidden))), *after])
    widest = max(sum(x.startswith("...") for x in word) for word in expanded)
    if arrow:
        before, dots, after = output.partition("...")
        result = [*before, *(f"...{i}" for i in reversed(range(widest if dots else 0))), *after]
    else:  # implicit output: ellipsis, then the labels that appear once, sorted
        flat = [x for word in expanded for x in word if not x.startswith("...")]
        result = [*(f"...{i}" for i in reversed(range(widest))), *sorted(x for x in set(flat) if flat.count(x) == 1)]
    return expanded, result
