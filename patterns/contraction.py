"""Contractions: the ways to spell a batched matrix product, reduced to one description.

``out[index] = alpha * sum_r lhs[lhs_index] * rhs[rhs_index] + beta * addend[addend_index]`` with one summed symbol r, of which the places in several summed
dimensions are the digits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import sympy
from torch import fx

from fa_inductor.index import ZERO, Expr, Space, broadcast_index, equal, product, shape_of

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


def describe(node: fx.Node, index: tuple[Expr, ...], r: sympy.Symbol, order: Collection[fx.Node] = ()) -> Contraction | None:
    """``node`` read at ``index`` with the summed symbol ``r``, or None where it is not of the form above.

    ``order``: several summed dimensions are counted as those of these nodes are, if one is an operand.
    """
    name = name_of(node)
    if name == "einsum":
        return _einsum(node, index, r, order)
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
        found = Contraction(node, lhs, (*index[:-1], r), rhs, (index[-1], r), shape_of(lhs.meta["val"])[-1])
        return found if bias is None else replace(found, beta=1, addend=bias, addend_index=index[-1:])
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


def _einsum(node: fx.Node, index: tuple[Expr, ...], r: sympy.Symbol, order: Collection[fx.Node]) -> Contraction | None:
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
    words = inputs[::-1] if right in order else inputs
    summed = [x for x in dict.fromkeys((*words[0], *words[1])) if x not in position]
    if not summed or any(x not in word for x in summed for word in inputs):
        return None
    sizes, others = ([shape[word.index(x)] for x in summed] for word, shape in zip(inputs, shapes))
    if not all(map(equal, sizes, others)):
        return None
    position |= zip(summed, _places(r, sizes))
    at = [tuple(ZERO if size == 1 and x not in summed else position[x] for x, size in zip(word, shape)) for word, shape in zip(inputs, shapes)]
    return Contraction(node, left, at[0], right, at[1], sympy.expand(product(sizes)))


def _places(r: sympy.Symbol, sizes: list[Expr]) -> list[Expr]:
    """The places along summed dimensions of ``sizes`` that together are the ``r``-th, the last dimension fastest."""
    space, places, rest = Space({}), [ZERO] * len(sizes), r
    long = [i for i, size in enumerate(sizes) if size != 1] or [len(sizes) - 1]
    for i in reversed(long[1:]):
        places[i], rest = space.mod(rest, sizes[i]), space.div(rest, sizes[i])
    places[long[0]] = rest
    return places


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
