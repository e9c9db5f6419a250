"""Ops whose element is arithmetic on its own index: arange, full, eye, tril/triu — and reading an integer or boolean tensor
at computed places (``mask[batch, key]``)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import sympy
import torch
from torch import fx

from fa_inductor.index import ZERO, Expr, Space, as_expr, broadcast_index, shape_of
from fa_inductor.program import ProgramBuilder

from .cell import kind_of
from .views import argument, name_of, step, value_of


class Reader(Protocol):
    """The part of the lifter that these rules use."""

    builder: ProgramBuilder

    def size(self, expr: Expr) -> int: ...
    def operand(self, x: Any, index: tuple[Expr, ...]) -> int: ...
    def element(self, node: fx.Node, index: tuple[Expr, ...]) -> int: ...
    def gather(self, node: fx.Node, places: list[int]) -> int: ...
    def place(self, node: Any, index: tuple[Expr, ...], entries: Expr) -> int: ...


Rule = Callable[[Reader, fx.Node, tuple[Expr, ...]], "int | None"]


def _literal(reader: Reader, node: fx.Node, value: object) -> int:
    """A number argument in the node's own type (rounded to its format, as the tensor would be)."""
    dtype = node.meta["val"].dtype
    kind = kind_of(dtype)
    if isinstance(value, fx.Node):
        return reader.builder.convert(reader.operand(value, ()), kind)
    if kind == "float":
        return reader.builder.const(float(torch.tensor(value, dtype=dtype)))
    return reader.builder.const(bool(value) if kind == "bool" else int(value))  # type: ignore[call-overload]


def _arange_bounds(node: fx.Node) -> tuple[Any, Any]:
    """(start, step)"""
    overload = node.target._overloadname  # type: ignore[union-attr]
    start = node.args[0] if overload != "default" else 0
    return start, node.args[2] if overload == "start_step" and len(node.args) > 2 else 1


def _arange(reader: Reader, node: fx.Node, index: tuple[Expr, ...]) -> int | None:
    start, step = (value_of(x) for x in _arange_bounds(node))
    if not isinstance(start, (int, torch.SymInt)) or not isinstance(step, (int, torch.SymInt)):
        return None
    return reader.builder.convert(reader.size(as_expr(start) + index[0] * as_expr(step)), kind_of(node.meta["val"].dtype))


_FILL_ARGUMENT = {"full": 1, "full_like": 1, "new_full": 2}
_FILL_VALUE = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
"""Which argument of an op, or which number, fills the whole tensor."""


def _full(position: int) -> Rule:
    def rule(reader: Reader, node: fx.Node, index: tuple[Expr, ...]) -> int:
        return _literal(reader, node, argument(node, position, "fill_value"))

    return rule


def _constant(value: int) -> Rule:
    return lambda reader, node, index: _literal(reader, node, value)


def _triangle(keep: str) -> Rule:
    def rule(reader: Reader, node: fx.Node, index: tuple[Expr, ...]) -> int:
        b, diagonal = reader.builder, argument(node, 1, "diagonal", 0)
        offset = b.emit("sub", reader.size(index[-1]), reader.size(index[-2]))  # column - row
        inside = b.emit(keep, offset, reader.size(as_expr(value_of(diagonal))))
        value = reader.element(node.args[0], index)  # type: ignore[arg-type]
        kind = b.nodes[value].type
        zero = b.const({"float": 0.0, "int": 0, "bool": False}[kind])
        return b.emit("and", inside, value) if kind == "bool" else b.emit("where", inside, value, zero)

    return rule


def _eye(reader: Reader, node: fx.Node, index: tuple[Expr, ...]) -> int:
    b = reader.builder
    return b.convert(b.emit("eq", reader.size(index[0]), reader.size(index[1])), kind_of(node.meta["val"].dtype))


def _scalar_tensor(reader: Reader, node: fx.Node, index: tuple[Expr, ...]) -> int:
    return _literal(reader, node, node.args[0])


def _index(reader: Reader, node: fx.Node, index: tuple[Expr, ...]) -> int | None:
    """``tensor[i, j, …]``: affine places continue the walk into the tensor, others become a gather from memory."""
    source, places = node.args[0], _places(node)
    assert isinstance(source, fx.Node)
    shape = shape_of(source.meta["val"])
    positions = [p for p, x in enumerate(places) if x is not None]
    rank = max(x.meta["val"].dim() for x in places if x is not None)
    if not positions or positions != list(range(positions[0], positions[-1] + 1)):
        return None  # separated index tensors move their dimensions to the front
    lead = positions[0]
    at = index[lead : lead + rank]
    plain = [*index[:lead], *index[lead + rank :]]
    exact = [affine(x, broadcast_index(shape_of(x.meta["val"]), at)) if x is not None else None for x in places]
    if all(e is not None and e.is_nonnegative for p, e in enumerate(exact) if p in positions):  # negative places would wrap around
        rest = iter(plain)
        return reader.element(source, tuple(exact[p] if p in positions else next(rest) for p in range(len(shape))))  # type: ignore[misc]
    b, rest, values = reader.builder, iter(plain), []
    for p, size in enumerate(shape):
        if p not in positions:
            values.append(reader.size(next(rest)))
            continue
        place = reader.place(places[p], at, size)
        wrapped = b.emit("add", place, reader.size(size))  # negative places count from the end
        values.append(b.emit("where", b.emit("lt", place, b.const(0)), wrapped, place))
    return reader.gather(source, values)


def _places(node: fx.Node) -> list[fx.Node | None]:
    places = list(node.args[1])  # type: ignore[arg-type]
    return places + [None] * (node.args[0].meta["val"].dim() - len(places))  # type: ignore[union-attr, return-value]


SHAPED_LIKE = frozenset({"full_like", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones"})
"""Generators that take a shape, dtype or device from their first argument and none of its values."""


LIKE_ANOTHER = frozenset({"type_as", "expand_as", "view_as", "reshape_as"})
"""Ops that take a shape or dtype from their second argument and none of its values."""


def reads(node: fx.Node) -> list[fx.Node]:
    """The inputs whose values ``node`` depends on."""
    if name_of(node) in LIKE_ANOTHER and isinstance(node.args[0], fx.Node):
        return [node.args[0]]
    if name_of(node) not in SHAPED_LIKE:
        return node.all_input_nodes
    given: list[fx.Node] = []
    fx.map_arg((node.args[1:], node.kwargs), given.append)
    return given


def accepts(node: fx.Node) -> bool:
    """May the op be computed per element? Of floats only tables (two dimensions) are read by index in the kernel."""
    if name_of(node) == "arange":
        return all(isinstance(value_of(x), (int, torch.SymInt)) for x in _arange_bounds(node))
    if name_of(node) == "diff":
        return constant(node) is not None
    if name_of(node) == "cumsum":
        return constant(node.args[0]) == 0
    if name_of(node) == "embedding":
        return _plain_embedding(node)
    if name_of(node) != "index":
        return name_of(node) in RULES
    places = [x for x in _places(node) if x is not None]
    table = node.args[0].meta["val"]  # type: ignore[union-attr]
    return (not table.dtype.is_floating_point or table.dim() == 2) and bool(places) and all(x.meta["val"].dtype in _PLACES for x in places)


def _plain_embedding(node: fx.Node) -> bool:
    """Without the options that change its gradient."""
    padding, by_frequency, sparse = (argument(node, p, n, d) for p, n, d in ((2, "padding_idx", -1), (3, "scale_grad_by_freq", False), (4, "sparse", False)))
    return padding in (None, -1) and not by_frequency and not sparse and value_of(node.args[1]).dtype in _PLACES


def _embedding(reader: Reader, node: fx.Node, index: tuple[Expr, ...]) -> int | None:
    table, places = node.args[:2]
    assert isinstance(table, fx.Node)
    place = reader.place(places, index[:-1], shape_of(table.meta["val"])[0])
    return reader.gather(table, [place, reader.size(index[-1])])


def affine(node: object, index: tuple[Expr, ...]) -> Expr | None:
    """An integer element as an index expression when it is made of arange, sums, products and views alone."""
    value = value_of(node)
    if isinstance(value, (int, torch.SymInt)):
        return as_expr(value)
    if not isinstance(node, fx.Node) or not isinstance(value, torch.Tensor) or value.dtype not in (torch.int64, torch.int32):
        return None
    name = name_of(node)
    below = step(_NO_EXTENTS, node, index)
    if below is not None:
        return affine(*below)
    if name in ("add", "sub", "mul") and not node.kwargs and len(node.args) == 2:
        x, y = (affine(a, broadcast_index(shape_of(v), index)) if isinstance(v := value_of(a), torch.Tensor) else affine(a, ()) for a in node.args)
        return None if x is None or y is None else x + y if name == "add" else x - y if name == "sub" else x * y
    if name == "diff":
        return _difference(node, index)
    if name == "arange" and node.target._overloadname != "start_step":  # type: ignore[union-attr]
        start = as_expr(value_of(node.args[0])) if node.target._overloadname == "start" else ZERO  # type: ignore[union-attr]
        return start + index[0] if start.is_nonnegative else None
    if name in ("to", "_to_copy"):
        return affine(node.args[0], index)
    return None


def _difference(node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    """torch.diff once over the last axis, where it is the same expression everywhere, the first element included."""
    source = node.args[0]
    times, dim, first, last = (argument(node, p, n, d) for p, n, d in ((1, "n", 1), (2, "dim", -1), (3, "prepend", None), (4, "append", None)))
    if times != 1 or dim not in (-1, len(index) - 1) or last is not None:
        return None
    at = (*index[:-1], index[-1] + (1 if first is None else 0))
    here, before = affine(source, at), affine(source, (*at[:-1], at[-1] - 1))
    if here is None or before is None:
        return None
    change = sympy.expand(here - before)
    if first is not None:
        start, prepended = affine(source, (*index[:-1], ZERO)), affine(first, (*index[:-1], ZERO))
        if start is None or prepended is None or sympy.expand(start - prepended) != change:
            return None
    return change


def constant(node: object) -> int | bool | None:
    """The value of an integer or boolean tensor that is the same number everywhere by construction, else None."""
    if isinstance(node, (bool, int)):
        return node
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    free = tuple(sympy.Symbol(f"i{d}", integer=True, nonnegative=True) for d in range(node.meta["val"].dim()))
    exact = affine(node, free)
    if exact is not None:
        return int(exact) if exact.is_Integer else None
    name = name_of(node)
    if name in _COMPARISONS:
        x, y = (constant(a) for a in node.args[:2])
        return None if x is None or y is None else _COMPARISONS[name](x, y)
    below = step(_NO_EXTENTS, node, free)
    return constant(below[0]) if below is not None else None


def constant_of(x: object) -> object:
    """The number that an argument is: a literal, or a tensor filled with one; None where it is not known."""
    if isinstance(x, (int, float)):
        return x
    if not isinstance(x, fx.Node):
        return None
    name = name_of(x)
    filled = _FILL_VALUE.get(name)
    if filled is None and name in (*_FILL_ARGUMENT, "scalar_tensor"):
        filled = argument(x, _FILL_ARGUMENT.get(name, 0), "fill_value")
    return filled if isinstance(filled, (int, float)) else None


def _diff(reader: Reader, node: fx.Node, index: tuple[Expr, ...]) -> int | None:
    exact = affine(node, index)
    return None if exact is None else reader.size(exact)


def _cumsum(reader: Reader, node: fx.Node, index: tuple[Expr, ...]) -> int | None:
    """Running sums of zeros: the document ids of a sequence that is one document."""
    return _literal(reader, node, 0) if constant(node.args[0]) == 0 else None


_PLACES = (torch.int64, torch.int32)
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {n: getattr(operator, n) for n in ("ne", "eq", "lt", "le", "gt", "ge")}
_NO_EXTENTS = Space({})

RULES: dict[str, Rule] = {
    "index": _index,
    "embedding": _embedding,
    "diff": _diff,
    "cumsum": _cumsum,
    "arange": _arange,
    **{name: _full(position) for name, position in _FILL_ARGUMENT.items()},
    **{name: _constant(value) for name, value in _FILL_VALUE.items()},
    "tril": _triangle("le"),
    "triu": _triangle("ge"),
    "eye": _eye,
    "scalar_tensor": _scalar_tensor,
}
