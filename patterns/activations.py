"""Rules for elementwise functions that are composed of program operations, with eager's gradient at each corner.

An arm that is not chosen passes 0 on, which its derivative must not turn into NaN: where that may be infinite, the arm gets a clamped value.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from .cell import Cell, Rule

_SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
"""alpha and scale of SELU (Klambauer et al., arXiv:1706.02515), as PyTorch has them."""


def _float(cell: Cell) -> int | None:
    """The first argument, if the result is a float at all."""
    return cell.typed(0, "float") if cell.kind == "float" else None


def _function(op: str) -> Rule:
    def rule(cell: Cell) -> int | None:
        x = _float(cell)
        return None if x is None else cell.builder.emit(op, x)

    return rule


def _logarithm(base: float) -> Rule:
    def rule(cell: Cell) -> int | None:
        b, x = cell.builder, _float(cell)
        return None if x is None else b.emit("mul", b.emit("log", x), b.const(1.0 / math.log(base)))

    return rule


def _gelu(cell: Cell) -> int:
    b, x = cell.builder, cell.typed(0, "float")
    if cell.node.kwargs.get("approximate", "none") == "tanh":
        cube = b.emit("mul", b.emit("mul", x, x), x)
        inner = b.emit("mul", b.emit("add", x, b.emit("mul", cube, b.const(0.044715))), b.const(math.sqrt(2 / math.pi)))
        share = b.emit("tanh", inner)
    else:
        share = b.emit("erf", b.emit("mul", x, b.const(math.sqrt(0.5))))
    return b.emit("mul", b.emit("mul", x, b.const(0.5)), b.emit("add", share, b.const(1.0)))


def _log_of_one_and_exp(cell: Cell, x: int) -> int:
    """Its argument must not be large: exp would overflow."""
    return cell.builder.emit("log1p", cell.builder.emit("exp", x))


def _softplus(cell: Cell) -> int:
    """Above the threshold it is x itself, for eager too."""
    b, x = cell.builder, cell.typed(0, "float")
    beta, threshold = cell.typed(1, "float", "beta", 1.0), cell.typed(2, "float", "threshold", 20.0)
    power = b.emit("mul", x, beta)
    curve = b.emit("div", _log_of_one_and_exp(cell, b.emit("min", power, threshold, value="first")), beta)
    return b.emit("where", b.emit("gt", power, threshold), x, curve)


def _log_sigmoid(cell: Cell) -> int:
    b, x = cell.builder, cell.typed(0, "float")
    zero = b.const(0.0)
    below = b.emit("where", b.emit("lt", x, zero), x, b.emit("neg", x))  # -|x|, whose gradient at 0 is not 0
    return b.emit("sub", b.emit("min", x, zero, value="second"), _log_of_one_and_exp(cell, below))


def _mish(cell: Cell) -> int:
    """tanh(log(1 + exp(20))) is 1 in fp32."""
    b, x = cell.builder, cell.typed(0, "float")
    return b.emit("mul", x, b.emit("tanh", _log_of_one_and_exp(cell, b.emit("min", x, b.const(20.0), value="first"))))


def _exponential_unit(cell: Cell, alpha: int, scale: int, inside: int) -> int:
    """``scale * (x if x > 0 else alpha * (exp(inside * x) - 1))``"""
    b, x = cell.builder, cell.typed(0, "float")
    curve = b.emit("expm1", b.emit("mul", b.emit("min", x, b.const(0.0), value="first"), inside))
    return b.emit("where", b.emit("le", x, b.const(0.0)), b.emit("mul", curve, b.emit("mul", alpha, scale)), b.emit("mul", x, scale))


def _elu(cell: Cell) -> int:
    alpha, scale, inside = (cell.typed(i, "float", name, 1.0) for i, name in ((1, "alpha"), (2, "scale"), (3, "input_scale")))
    return _exponential_unit(cell, alpha, scale, inside)


def _selu(cell: Cell) -> int:
    alpha, scale = map(cell.builder.const, _SELU)
    return _exponential_unit(cell, alpha, scale, cell.builder.const(1.0))


def _celu(cell: Cell) -> int:
    b, alpha = cell.builder, cell.typed(1, "float", "alpha", 1.0)
    return _exponential_unit(cell, alpha, b.const(1.0), b.emit("div", b.const(1.0), alpha))


def _between(cell: Cell, x: int, low: float, high: float) -> int:
    """The nearest number in the interval, without a gradient at its ends."""
    b = cell.builder
    return b.emit("min", b.emit("max", x, b.const(low), value="second"), b.const(high), value="second")


def _hardsigmoid(cell: Cell) -> int:
    b = cell.builder
    return b.emit("div", b.emit("add", _between(cell, cell.typed(0, "float"), -3.0, 3.0), b.const(3.0)), b.const(6.0))


def _hardswish(cell: Cell) -> int:
    """A product with 0 would pass NaN on as a gradient, eager's choice does not."""
    b, x = cell.builder, cell.typed(0, "float")
    inner = _between(cell, x, -3.0, 3.0)
    curve = b.emit("div", b.emit("mul", inner, b.emit("add", inner, b.const(3.0))), b.const(6.0))
    nothing = b.emit("where", b.emit("eq", x, b.const(-math.inf)), b.const(math.nan), b.const(0.0))  # 0 * -inf
    return b.emit("where", b.emit("le", x, b.const(-3.0)), nothing, b.emit("where", b.emit("lt", x, b.const(3.0)), curve, x))


def _softshrink(cell: Cell) -> int:
    b, x, limit = cell.builder, cell.typed(0, "float"), cell.typed(1, "float", "lambd", 0.5)
    below = b.emit("neg", limit)
    inside = b.emit("where", b.emit("ne", x, x), x, b.const(0.0))
    inside = b.emit("where", b.emit("lt", x, below), b.emit("sub", x, below), inside)
    return b.emit("where", b.emit("gt", x, limit), b.emit("sub", x, limit), inside)


def _hardshrink(cell: Cell) -> int:
    b, x, limit = cell.builder, cell.typed(0, "float"), cell.typed(1, "float", "lambd", 0.5)
    inside = b.emit("and", b.emit("ge", x, b.emit("neg", limit)), b.emit("le", x, limit))
    return b.emit("where", inside, b.const(0.0), x)


def _prelu(cell: Cell) -> int | None:
    """With one weight for all: several belong to the channels of dimension 1."""
    weight = cell.arg(1, "weight")
    if not isinstance(weight, fx.Node) or weight.meta["val"].numel() != 1:
        return None
    b, x = cell.builder, cell.typed(0, "float")
    return b.emit("where", b.emit("gt", x, b.const(0.0)), x, b.emit("mul", x, cell.typed(1, "float", "weight")))


def _sign(cell: Cell) -> int | None:
    if cell.kind == "bool":
        return None
    b, x, zero = cell.builder, cell.typed(0, cell.kind), cell.builder.const(0.0 if cell.kind == "float" else 0)
    above, below = (b.convert(b.emit(op, x, zero), cell.kind) for op in ("gt", "lt"))
    return b.emit("sub", above, below)


def _lerp(cell: Cell) -> int:
    """From the nearer end, as eager: next to an infinity the two forms differ."""
    b = cell.builder
    x, end, weight = cell.typed(0, "float"), cell.typed(1, "float"), cell.typed(2, "float", "weight")
    way = b.emit("sub", end, x)
    low = b.emit("add", x, b.emit("mul", weight, way))
    high = b.emit("sub", end, b.emit("mul", way, b.emit("sub", b.const(1.0), weight)))
    return b.emit("where", b.emit("lt", b.emit("abs", weight), b.const(0.5)), low, high)


def _without_nan(op: str) -> Rule:
    """fmax and fmin: the other value where one is NaN, and the first one's gradient where they are equal."""

    def rule(cell: Cell) -> int:
        b, x, y = cell.builder, cell.typed(0, cell.kind), cell.typed(1, cell.kind)
        return b.emit("where", b.emit("or", b.emit(op, x, y), b.emit("ne", y, y)), x, y)

    return rule


def _logaddexp(cell: Cell) -> int:
    """Of equal infinities eager's gradient is NaN, that of a product of infinities."""
    b, x, y = cell.builder, cell.typed(0, "float"), cell.typed(1, "float")
    zero, equal = b.const(0.0), b.emit("eq", x, y)
    difference = b.emit("where", equal, zero, b.emit("sub", x, y))
    found = b.emit("add", b.emit("max", x, y), _log_of_one_and_exp(cell, b.emit("neg", b.emit("abs", difference))))
    infinite = b.emit("and", equal, b.emit("eq", b.emit("abs", x), b.const(math.inf)))
    one, other = (b.emit("where", infinite, z, zero) for z in (x, y))
    return b.emit("where", infinite, b.emit("mul", one, b.emit("abs", other)), found)


def _powers(cell: Cell) -> int | None:
    """Of a tensor with a number as exponent: whole up to 16, and halves; other powers cost digits."""
    exponent, b = cell.arg(1, "exponent"), cell.builder
    if not isinstance(exponent, (int, float)) or not isinstance(cell.arg(0), fx.Node) or not 0 < abs(exponent) <= 16 or 2 * exponent != int(2 * exponent):
        return None
    if cell.kind != "float" and (exponent != int(exponent) or exponent < 0 or cell.kind == "bool"):
        return None
    one = b.const(1.0 if cell.kind == "float" else 1)
    x, whole, half = cell.typed(0, cell.kind), int(abs(exponent)), abs(exponent) % 1 != 0
    if exponent == -0.5:
        return b.emit("div", one, b.emit("sqrt", x))
    if exponent < 0:  # first, since powers of infinity have infinite derivatives
        x = b.emit("div", one, x)
    if not whole:
        return b.emit("sqrt", x)
    if not half:
        return _whole_power(cell, x, whole, one)
    zero = b.emit("eq", x, b.const(0.0))  # the root's gradient is infinite there, the power's is 0
    x = b.emit("where", zero, one, x)
    return b.emit("where", zero, b.const(0.0), b.emit("mul", _whole_power(cell, x, whole, one), b.emit("sqrt", x)))


def _whole_power(cell: Cell, x: int, exponent: int, one: int) -> int:
    """By squaring."""
    b, found, square = cell.builder, one, x
    while exponent:
        if exponent & 1:
            found = square if found == one else b.emit("mul", square, found)
        exponent >>= 1
        square = b.emit("mul", square, square) if exponent else square
    return found


def _power(cell: Cell) -> int | None:
    base, exponent = cell.arg(0), cell.arg(1, "exponent")
    if base == 2 and isinstance(exponent, fx.Node) and cell.kind == "float":
        return cell.builder.emit("exp2", cell.typed(1, "float", "exponent"))
    return _powers(cell)


def _is_infinite(cell: Cell) -> int:
    b = cell.builder
    return b.emit("eq", b.emit("abs", cell.typed(0, "float")), b.const(math.inf))


def _is_plus_infinity(cell: Cell) -> int:
    return cell.builder.emit("eq", cell.typed(0, "float"), cell.builder.const(math.inf))


def _is_finite(cell: Cell) -> int:
    b = cell.builder
    return b.emit("lt", b.emit("abs", cell.typed(0, "float")), b.const(math.inf))


def fixed(node: fx.Node) -> bool:
    """Made of nothing that gets a gradient."""
    seen, queue = {node}, [node]
    while queue:
        node = queue.pop()
        example = node.meta.get("example_value", node.meta.get("val"))
        if node.op in ("placeholder", "get_attr") and isinstance(example, torch.Tensor) and example.requires_grad:
            return False
        queue += [n for n in node.all_input_nodes if n not in seen]
        seen.update(node.all_input_nodes)
    return True


ACTIVATIONS: dict[str, Rule] = {
    **{name: _function(op) for op in ("erf", "exp2", "expm1", "log1p") for name in (op, f"special_{op}")},
    "sin": _function("sin"),
    "cos": _function("cos"),
    "special_expit": _function("sigmoid"),
    "log2": _logarithm(2.0),
    "log10": _logarithm(10.0),
    "gelu": _gelu,
    "softplus": _softplus,
    "log_sigmoid": _log_sigmoid,
    "mish": _mish,
    "elu": _elu,
    "selu": _selu,
    "celu": _celu,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "softshrink": _softshrink,
    "hardshrink": _hardshrink,
    "prelu": _prelu,
    "sign": _sign,
    "lerp": _lerp,
    "fmax": _without_nan("ge"),
    "fmin": _without_nan("le"),
    "logaddexp": _logaddexp,
    "pow": _power,
    "isinf": _is_infinite,
    "isposinf": _is_plus_infinity,
    "isfinite": _is_finite,
}
