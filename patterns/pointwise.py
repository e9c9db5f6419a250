"""Pointwise ATen ops as score-program operations.

Each rule gets a ``Cell`` (builder, node, and the values of its arguments at the element in question) and returns the
value of the node's element. Types follow ATen's promotion: the result type is the node's own dtype.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fa_inductor.program import ProgramBuilder
from fa_inductor.program.ir import Type

from .activations import ACTIVATIONS, fixed
from .cell import Cell, Rule, kind_of
from .views import name_of

RULES: dict[str, Rule] = {}


def _promoted(cell: Cell, x: int, y: int) -> tuple[int, int]:
    """Both values in the wider of their types (bool < int < float), as comparisons see them."""
    kinds: list[Type] = ["bool", "int", "float"]
    types = [cell.builder.nodes[v].type for v in (x, y)]
    kind = max(types, key=kinds.index)
    kind = "int" if kind == "bool" else kind
    return cell.builder.convert(x, kind), cell.builder.convert(y, kind)


def _as_compared(cell: Cell, position: int) -> int:
    """Argument of a comparison; a literal is rounded to the low-precision format of the tensor that it meets."""
    x, other = cell.arg(position), cell.arg(1 - position)
    dtype = other.meta["val"].dtype if isinstance(other, fx.Node) and isinstance(other.meta["val"], torch.Tensor) else None
    if isinstance(x, (int, float)) and dtype in (torch.float16, torch.bfloat16):
        return cell.builder.const(float(torch.tensor(x, dtype=torch.float64).to(dtype)))
    return cell.read(x)


def _binary(op: str) -> Rule:
    def rule(cell: Cell) -> int | None:
        if cell.kind == "bool":
            return {"add": _or, "mul": _and}.get(op, lambda c: None)(cell)
        x, y = cell.typed(0, cell.kind), cell.typed(1, cell.kind)
        alpha = cell.arg(2, "alpha", 1)
        if alpha != 1:
            y = cell.builder.emit("mul", y, cell.builder.convert(cell.read(alpha), cell.kind))
        return cell.builder.emit(op, x, y)

    return rule


def _unary(op: str) -> Rule:
    return lambda cell: cell.builder.emit(op, cell.typed(0, cell.kind))


def _compare(op: str) -> Rule:
    def rule(cell: Cell) -> int:
        x, y = _promoted(cell, *(_as_compared(cell, a) for a in (0, 1)))
        return cell.builder.emit(op, x, y)

    return rule


def _and(cell: Cell) -> int | None:
    return cell.builder.emit("and", cell.typed(0, "bool"), cell.typed(1, "bool")) if cell.kind == "bool" else None


def _or(cell: Cell) -> int | None:
    return cell.builder.emit("or", cell.typed(0, "bool"), cell.typed(1, "bool")) if cell.kind == "bool" else None


def _xor(cell: Cell) -> int | None:
    return cell.builder.emit("ne", cell.typed(0, "bool"), cell.typed(1, "bool")) if cell.kind == "bool" else None


def _not(cell: Cell) -> int | None:
    return cell.builder.emit("not", cell.typed(0, "bool")) if cell.kind == "bool" else None


def _div(cell: Cell) -> int | None:
    rounding = cell.node.kwargs.get("rounding_mode")
    if rounding is None:
        b, y = cell.builder, cell.typed(1, "float")
        literal = b.nodes[y]
        if literal.op == "const" and math.frexp(float(literal.value or 0.0))[0] == 0.5:  # a power of two: exact reciprocal
            return b.emit("mul", cell.typed(0, "float"), b.const(1.0 / float(literal.value)))  # type: ignore[arg-type]
        return b.emit("div", cell.typed(0, "float"), y)
    if rounding == "floor" and cell.kind == "int":
        return cell.builder.emit("floordiv", cell.typed(0, "int"), cell.typed(1, "int"))
    return None


def _int_binary(op: str) -> Rule:
    return lambda cell: cell.builder.emit(op, cell.typed(0, "int"), cell.typed(1, "int")) if cell.kind == "int" else None


def _of_two(op: str) -> Rule:
    """``torch.max(x, y)``; the reductions of the same name have no second tensor."""
    binary = _binary(op)
    return lambda cell: binary(cell) if isinstance(cell.arg(1), fx.Node) else None


def _reversed_sub(cell: Cell) -> int | None:
    if cell.kind == "bool" or cell.arg(2, "alpha", 1) != 1:
        return None
    return cell.builder.emit("sub", cell.typed(1, cell.kind), cell.typed(0, cell.kind))


def _where(cell: Cell) -> int | None:
    if cell.arg(1) is None:
        return None
    return cell.builder.emit("where", cell.typed(0, "bool"), cell.typed(1, cell.kind), cell.typed(2, cell.kind))


def _masked_fill(cell: Cell) -> int:
    return cell.builder.emit("where", cell.typed(1, "bool"), cell.typed(2, cell.kind), cell.typed(0, cell.kind))


def _clamp(cell: Cell) -> int | None:
    bounds = [x for x in (cell.arg(1, "min"), cell.arg(2, "max")) if isinstance(x, fx.Node)]
    if len(bounds) == 2 and not all(map(fixed, bounds)):
        return None  # where two tensors' bounds meet, neither has a gradient
    value = cell.typed(0, cell.kind)
    for position, name, op in ((1, "min", "max"), (2, "max", "min")):
        bound = cell.arg(position, name)
        if bound is not None:
            value = cell.builder.emit(op, value, cell.builder.convert(cell.read(bound), cell.kind), value="first")
    return value


def _clamp_one(name: str, op: str) -> Rule:
    return lambda cell: cell.builder.emit(op, cell.typed(0, cell.kind), cell.typed(1, cell.kind, name), value="first")


def _reciprocal(cell: Cell) -> int:
    return cell.builder.emit("div", cell.builder.const(1.0), cell.typed(0, "float"))


def _rsqrt(cell: Cell) -> int:
    return cell.builder.emit("div", cell.builder.const(1.0), cell.builder.emit("sqrt", cell.typed(0, "float")))


def _relu(cell: Cell) -> int:
    zero = cell.builder.const(0.0 if cell.kind == "float" else 0)
    return cell.builder.emit("max", cell.typed(0, cell.kind), zero, value="second")


def _leaky_relu(cell: Cell) -> int:
    b, x = cell.builder, cell.typed(0, "float")
    return b.emit("where", b.emit("gt", x, b.const(0.0)), x, b.emit("mul", x, cell.typed(1, "float", "negative_slope", 0.01)))


def _silu(cell: Cell) -> int:
    x = cell.typed(0, "float")
    return cell.builder.emit("mul", x, cell.builder.emit("sigmoid", x))


def _threshold(cell: Cell) -> int:
    b, x = cell.builder, cell.typed(0, cell.kind)
    return b.emit("where", b.emit("le", x, cell.typed(1, cell.kind)), cell.typed(2, cell.kind), x)


def _addcmul(cell: Cell) -> int:
    b = cell.builder
    product = b.emit("mul", b.emit("mul", cell.typed(1, cell.kind), cell.typed(2, cell.kind)), cell.typed(3, cell.kind, "value", 1))
    return b.emit("add", cell.typed(0, cell.kind), product)


def _clamp_between(low: float, high: float) -> Rule:
    def rule(cell: Cell) -> int:  # unlike clamp's, its gradient is 0 at the bounds
        b = cell.builder
        inner = b.emit("max", cell.typed(0, cell.kind), cell.typed(1, cell.kind, "min_val", low), value="second")
        return b.emit("min", inner, cell.typed(2, cell.kind, "max_val", high), value="second")

    return rule


def _isneginf(cell: Cell) -> int:
    return cell.builder.emit("eq", cell.typed(0, "float"), cell.builder.const(-math.inf))


def _isnan(cell: Cell) -> int:
    x = cell.typed(0, "float")
    return cell.builder.emit("ne", x, x)


def _nan_to_num(cell: Cell) -> int | None:
    """NaN and the infinities become numbers; the gradient there is 0."""
    dtype = cell.node.meta["val"].dtype
    if not dtype.is_floating_point:
        return None
    b, x, limits = cell.builder, cell.typed(0, "float"), torch.finfo(dtype)
    given = [cell.arg(1, "nan"), cell.arg(2, "posinf"), cell.arg(3, "neginf")]
    numbers = [default if n is None else n for n, default in zip(given, (0.0, limits.max, limits.min), strict=True)]
    if not all(isinstance(n, (int, float)) for n in numbers):
        return None
    value = x
    for literal, number in ((-math.inf, numbers[2]), (math.inf, numbers[1])):
        value = b.emit("where", b.emit("eq", x, b.const(literal)), b.const(float(number)), value)  # type: ignore[arg-type]
    return b.emit("where", b.emit("ne", x, x), b.const(float(numbers[0])), value)  # type: ignore[arg-type]


def _cast(cell: Cell) -> int:
    return cell.typed(0, cell.kind)


RULES.update(
    {
        **ACTIVATIONS,
        "add": _binary("add"),
        "sub": _binary("sub"),
        "subtract": _binary("sub"),
        "mul": _binary("mul"),
        "multiply": _binary("mul"),
        "minimum": _binary("min"),
        "maximum": _binary("max"),
        "min": _of_two("min"),
        "max": _of_two("max"),
        "rsub": _reversed_sub,
        "div": _div,
        "divide": _div,
        "true_divide": _div,
        "floor_divide": _int_binary("floordiv"),
        "remainder": _int_binary("mod"),
        "neg": _unary("neg"),
        "negative": _unary("neg"),
        "abs": _unary("abs"),
        "exp": _unary("exp"),
        "log": _unary("log"),
        "tanh": _unary("tanh"),
        "sigmoid": _unary("sigmoid"),
        "sqrt": _unary("sqrt"),
        "relu": _relu,
        "leaky_relu": _leaky_relu,
        "silu": _silu,
        "threshold": _threshold,
        "hardtanh": _clamp_between(-1.0, 1.0),
        "relu6": _clamp_between(0.0, 6.0),
        "addcmul": _addcmul,
        "square": lambda cell: cell.builder.emit("mul", cell.typed(0, cell.kind), cell.typed(0, cell.kind)),
        "reciprocal": _reciprocal,
        "rsqrt": _rsqrt,
        "where": _where,
        "masked_fill": _masked_fill,
        "clamp": _clamp,
        "clip": _clamp,
        "clamp_min": _clamp_one("min", "max"),
        "clamp_max": _clamp_one("max", "min"),
        "isneginf": _isneginf,
        "isnan": _isnan,
        "nan_to_num": _nan_to_num,
        "logical_and": lambda cell: cell.builder.emit("and", cell.typed(0, "bool"), cell.typed(1, "bool")),
        "logical_or": lambda cell: cell.builder.emit("or", cell.typed(0, "bool"), cell.typed(1, "bool")),
        "logical_xor": lambda cell: cell.builder.emit("ne", cell.typed(0, "bool"), cell.typed(1, "bool")),
        "logical_not": lambda cell: cell.builder.emit("not", cell.typed(0, "bool")),
        "bitwise_and": _and,
        "__and__": _and,
        "bitwise_or": _or,
        "__or__": _or,
        "bitwise_xor": _xor,
        "bitwise_not": _not,
        "to": _cast,
        "_to_copy": _cast,
        "type_as": _cast,
        "dropout": lambda cell: cell.read(cell.arg(0)) if not cell.arg(2, "train") or cell.arg(1, "p") == 0 else None,
        "feature_dropout": lambda cell: cell.read(cell.arg(0)) if not cell.arg(2, "train") else None,
        "lt": _compare("lt"),
        "less": _compare("lt"),
        "le": _compare("le"),
        "less_equal": _compare("le"),
        "gt": _compare("gt"),
        "greater": _compare("gt"),
        "ge": _compare("ge"),
        "greater_equal": _compare("ge"),
        "eq": _compare("eq"),
        "ne": _compare("ne"),
        "not_equal": _compare("ne"),
    }
)


def elementwise(node: fx.Node) -> bool:
    """Does PyTorch say so of the op, or of the one that it is another name of?"""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = name_of(node)
    plain = getattr(torch.ops.aten, name.removeprefix("special_").replace("arc", "a", 1), None)
    overloads = [node.target, *([getattr(plain, plain.overloads()[0])] if plain is not None and plain.__name__ != name else [])]
    reduces = name in ("max", "min") and not (len(node.args) > 1 and isinstance(node.args[1], fx.Node))
    return (name in RULES and not reduces) or any(torch.Tag.pointwise in o.tags for o in overloads)


def accepts(node: fx.Node) -> bool:
    """Would the rule of this op express it? Tried on placeholder values of the right types."""
    rule = RULES.get(name_of(node))
    if rule is None or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    builder = ProgramBuilder()

    def read(x: object) -> int:
        if isinstance(x, (bool, int, float)):
            return builder.const(x)
        value = x.meta["val"] if isinstance(x, fx.Node) else None
        kind = kind_of(value.dtype) if isinstance(value, torch.Tensor) else "int" if isinstance(value, (int, torch.SymInt)) else "float"
        return builder.load(builder.capture({"bool": "bool", "int": "int64", "float": "float32"}[kind], 0), [])

    return rule(Cell(builder, node, read)) is not None
