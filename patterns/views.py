"""Views: ops whose every output element is one input element. ``step`` answers which one.

Contiguous copies count as views (same values); ``detach`` does not (it cuts the gradient) and is treated by the lifter.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from fa_inductor.index import ONE, ZERO, Expr, Space, as_expr, broadcast_index, shape_of, view_index

Step = tuple[fx.Node, tuple[Expr, ...]]
Rule = Callable[[Space, fx.Node, tuple[Expr, ...]], "Step | None"]
RULES: dict[str, Rule] = {}
SPLITS = frozenset({"split", "split_with_sizes", "chunk", "unbind", "unsafe_split", "unsafe_chunk", "tensor_split"})
"""Ops whose outputs are views of a part each; ``getitem`` is the view."""


def name_of(node: Any) -> str:
    """``matmul`` for ``aten.matmul.default``, ``matmul.out`` where the result is written to an argument; empty for anything that is
    not an ATen call."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ""
    target = node.target
    if target is operator.getitem:
        return "getitem"
    if getattr(target, "namespace", "") != "aten":
        return ""
    schema = target._schema  # type: ignore[union-attr]
    name = str(schema.name).split("::")[1]
    return f"{name}.out" if schema.is_mutable and not name.endswith("_") else name


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Positional or keyword argument of an ATen call."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def value_of(x: Any) -> Any:
    """Fake value of a node argument, or the literal itself."""
    return x.meta.get("val") if isinstance(x, fx.Node) else x


def is_static(node: fx.Node) -> bool:
    """Are all sizes that the node has numbers?"""
    value = node.meta.get("val")
    return all(isinstance(n, int) for n in value.shape) if isinstance(value, torch.Tensor) else not isinstance(value, (torch.SymInt, torch.SymFloat))


def step(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step | None:
    """The input and its index that ``node[index]`` reads if ``node`` is a view, else None."""
    rule = RULES.get(name_of(node))
    return rule(space, node, index) if rule else None


def cut_dimension(node: fx.Node) -> int | None:
    """The dimension of its source that ``node`` is a part of: of a slice, a selected place or one of the outputs of a split."""
    name, source = name_of(node), node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if name == "getitem" and name_of(source) in SPLITS:
        dim = argument(source, 1 if name_of(source) == "unbind" else 2, "dim", 0)
        source = _input(source)
    elif name in ("slice", "narrow", "select"):
        dim = argument(node, 1, "dim", 0)
    else:
        return None
    return _dim(dim, source.meta["val"].dim())


def overlaps(node: fx.Node) -> bool:
    """May two elements share a place in memory, otherwise than by expansion? PyTorch's copies keep that, so that a write to one shows in the other."""
    value = node.meta["val"]
    moves = sorted((stride, size) for stride, size in zip(value.stride(), value.shape) if isinstance(stride, int) and isinstance(size, int) and size > 1)
    reach = 0
    for stride, size in moves:
        if 0 < stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def is_view(node: fx.Node) -> bool:
    return name_of(node) in RULES


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def _input(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _dim(position: int, rank: int) -> int:
    return position + rank if position < 0 else position


@_rule("contiguous", "clone", "alias", "lift_fresh", "lift_fresh_copy")
def _same(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step:
    return _input(node), index


@_rule("view", "reshape", "_unsafe_view", "unflatten", "flatten", "view_as", "reshape_as", "_reshape_alias")
def _view(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step | None:
    source = _input(node)
    if source.meta["val"].dtype != node.meta["val"].dtype:
        return None  # view(dtype) reinterprets bits
    return source, view_index(space, shape_of(source.meta["val"]), shape_of(node.meta["val"]), index)


@_rule("permute")
def _permute(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step:
    order = [_dim(d, len(index)) for d in argument(node, 1, "dims")]
    inner = [ZERO] * len(index)
    for i, d in zip(index, order):
        inner[d] = i
    return _input(node), tuple(inner)


@_rule("transpose", "swapaxes", "swapdims")
def _transpose(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step:
    a, b = (_dim(d, len(index)) for d in node.args[1:3])  # type: ignore[arg-type]
    inner = list(index)
    inner[a], inner[b] = inner[b], inner[a]
    return _input(node), tuple(inner)


@_rule("t", "numpy_T", "mT", "mH", "adjoint", "matrix_H")
def _last_two(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step | None:
    if name_of(node) in ("t", "numpy_T"):
        return _input(node), index[::-1]
    return _input(node), (*index[:-2], index[-1], index[-2])


@_rule("movedim", "moveaxis")
def _movedim(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step:
    rank = len(index)
    source, target = ([_dim(d, rank) for d in (x if isinstance(x, (list, tuple)) else [x])] for x in node.args[1:3])  # type: ignore[arg-type]
    inner: list[Expr | None] = [None] * rank
    for s, t in zip(source, target):
        inner[s] = index[t]
    rest = iter(i for t, i in enumerate(index) if t not in target)
    return _input(node), tuple(next(rest) if i is None else i for i in inner)


@_rule("unsqueeze")
def _unsqueeze(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step:
    d = _dim(argument(node, 1, "dim"), len(index))
    return _input(node), index[:d] + index[d + 1 :]


@_rule("squeeze")
def _squeeze(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step:
    source = _input(node)
    shape = shape_of(source.meta["val"])
    dims = argument(node, 1, "dim")
    listed = range(len(shape)) if dims is None else [_dim(d, len(shape)) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
    dropped = {d for d in listed if shape[d] == 1}
    rest = iter(index)
    return source, tuple(ZERO if d in dropped else next(rest) for d in range(len(shape)))


@_rule("expand", "expand_as", "broadcast_to")
def _expand(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step:
    source = _input(node)
    return source, broadcast_index(shape_of(source.meta["val"]), index)


@_rule("slice", "narrow")
def _slice(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step | None:
    source = _input(node)
    d = _dim(argument(node, 1, "dim", 0), len(index))
    stride = as_expr(value_of(argument(node, 4, "step", 1))) if name_of(node) == "slice" else ONE
    begin = _begin(node, shape_of(source.meta["val"])[d], shape_of(node.meta["val"])[d])
    return None if begin is None else (source, (*index[:d], begin + index[d] * stride, *index[d + 1 :]))


def _begin(node: fx.Node, size: Expr, length: Expr) -> Expr | None:
    """Where a slice of ``length`` out of ``size`` places begins; None where it is not known."""
    start = argument(node, 2, "start")
    begin = ZERO if start is None else as_expr(value_of(start))
    if begin.is_nonnegative:
        return begin
    if name_of(node) == "slice" and _to_the_end(argument(node, 3, "end")) and argument(node, 4, "step", 1) == 1:
        return sympy.expand(size - length)
    if begin.is_Integer:
        begin = begin + size
    return begin if begin.is_nonnegative or (begin.is_Add and size in begin.args) else None


def _to_the_end(end: Any) -> bool:
    return end is None or end == sys.maxsize


@_rule("select")
def _select(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step:
    source = _input(node)
    shape = shape_of(source.meta["val"])
    d = _dim(argument(node, 1, "dim"), len(shape))
    at = as_expr(value_of(argument(node, 2, "index")))
    at = at + shape[d] if at.is_negative else at
    return source, (*index[:d], at, *index[d:])


@_rule("getitem")
def _getitem(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step | None:
    """One output of split, chunk or unbind."""
    many, which = node.args
    assert isinstance(many, fx.Node) and isinstance(which, int)
    kind = name_of(many)
    if kind not in SPLITS:
        return None
    source = _input(many)
    rank = source.meta["val"].dim()
    if kind == "unbind":
        d = _dim(argument(many, 1, "dim", 0), rank)
        return source, (*index[:d], as_expr(which), *index[d:])
    d = _dim(argument(many, 2, "dim", 0), rank)
    offset = sum((as_expr(part.shape[d]) for part in many.meta["val"][:which]), ZERO)
    return source, (*index[:d], offset + index[d], *index[d + 1 :])


@_rule("as_strided")
def _as_strided(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step | None:
    """Of a source without holes in memory: the place in memory is a number whose digits are the source's index, fastest dimension last."""
    source = _input(node)
    value, offset = source.meta["val"], argument(node, 3, "storage_offset")
    numbers = [*node.args[1], *node.args[2], *value.shape, *value.stride(), value.storage_offset() if offset is None else offset]  # type: ignore[misc]
    if not all(isinstance(n, int) for n in (*numbers, value.storage_offset())):
        return None
    begin = 0 if offset is None else offset - value.storage_offset()
    order = sorted((d for d in range(value.dim()) if value.shape[d] != 1), key=value.stride)
    moves = [(i, size, stride) for i, size, stride in zip(index, *node.args[1:3]) if size != 1]  # type: ignore[misc]
    dense = all(value.stride(d) == math.prod(value.shape[x] for x in order[:at]) for at, d in enumerate(order))
    if not dense or begin < 0 or begin + sum((size - 1) * stride for _, size, stride in moves) >= value.numel():
        return None
    inner, unit = [ZERO] * value.dim(), 1
    while order:  # a dimension that both have needs no division
        size = value.shape[order[0]]
        here = [m for m in moves if m[2] % (unit * size)]
        if begin % (unit * size) or len(here) > 1 or (here and (here[0][2] != unit or here[0][1] > size)):
            break
        inner[order.pop(0)] = here[0][0] if here else ZERO
        moves, unit = [m for m in moves if m not in here], unit * size
    rest = [value.shape[d] for d in reversed(order)]
    if any(stride % unit for *_, stride in moves) or begin % unit:
        return None
    flat = sympy.expand(sum((i * (stride // unit) for i, _, stride in moves), as_expr(begin // unit)))
    for d, place in zip(reversed(order), view_index(space, [as_expr(n) for n in rest], [as_expr(math.prod(rest))], [flat]), strict=True):
        inner[d] = place
    return source, tuple(inner)


@_rule("repeat", "tile")
def _repeat(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step:
    source = _input(node)
    shape = shape_of(source.meta["val"])
    tail: Sequence[Expr] = index[len(index) - len(shape) :]
    out = shape_of(node.meta["val"])[len(index) - len(shape) :]
    return source, tuple(i if size == total else space.mod(i, size) for i, size, total in zip(tail, shape, out))


@_rule("repeat_interleave")
def _repeat_interleave(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step | None:
    source = _input(node)
    count, dim = argument(node, 1, "repeats"), argument(node, 2, "dim")
    if not isinstance(value_of(count), int) or dim is None:
        return None
    d = _dim(dim, len(index))
    return source, (*index[:d], space.div(index[d], as_expr(count)), *index[d + 1 :])
