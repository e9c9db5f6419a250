"""Golden programs of every elementwise operator that has a rule. No rule may be without one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from golden import GoldenLines, L, Scores
from torch import Tensor

from fa_inductor.patterns import pointwise

aten = torch.ops.aten


def i() -> Tensor:
    return torch.arange(L)[:, None]


def j() -> Tensor:
    return torch.arange(L)


def shown(m: Tensor) -> Tensor:
    return torch.where(m, 0.0, -1e4)


def of_scores(function: Callable[[Tensor], Tensor]) -> Scores:
    return lambda s, c, m: function(s)


NUMBERS: dict[str, Scores] = {
    "add": lambda s, c, m: s + c,
    "sub": lambda s, c, m: s - c,
    "subtract": lambda s, c, m: torch.subtract(s, c),
    "mul": lambda s, c, m: s * c,
    "multiply": lambda s, c, m: torch.multiply(s, c),
    "minimum": lambda s, c, m: torch.minimum(s, c),
    "maximum": lambda s, c, m: torch.maximum(s, c),
    "min": lambda s, c, m: torch.min(s, c),
    "max": lambda s, c, m: torch.max(s, c),
    "rsub": lambda s, c, m: torch.rsub(s, 2.0),
    "div": lambda s, c, m: s / 3.0,
    "divide": lambda s, c, m: torch.divide(s, 3.0),
    "true_divide": lambda s, c, m: torch.true_divide(s, 3.0),
    "floor_divide": lambda s, c, m: s + (j() - i()) // 2,
    "remainder": lambda s, c, m: s + (j() - i()) % 2,
    "neg": lambda s, c, m: -s,
    "negative": lambda s, c, m: torch.negative(s),
    "abs": lambda s, c, m: s.abs(),
    "exp": lambda s, c, m: s.exp(),
    "log": lambda s, c, m: s.log(),
    "tanh": lambda s, c, m: s.tanh(),
    "sigmoid": lambda s, c, m: s.sigmoid(),
    "sqrt": lambda s, c, m: s.sqrt(),
    "relu": lambda s, c, m: F.relu(s),
    "leaky_relu": lambda s, c, m: F.leaky_relu(s, 0.1),
    "silu": lambda s, c, m: F.silu(s),
    "threshold": lambda s, c, m: F.threshold(s, 0.5, -3.0),
    "hardtanh": lambda s, c, m: F.hardtanh(s),
    "relu6": lambda s, c, m: aten.relu6(s),
    "addcmul": lambda s, c, m: torch.addcmul(s, s, s, value=0.5),
    "pow": lambda s, c, m: s**3,
    "square": lambda s, c, m: s.square(),
    "reciprocal": lambda s, c, m: s.reciprocal(),
    "rsqrt": lambda s, c, m: s.rsqrt(),
    "clamp": lambda s, c, m: s.clamp(-5, 5),
    "clip": lambda s, c, m: torch.clip(s, -5, 5),
    "clamp_min": lambda s, c, m: torch.clamp_min(s, -5),
    "clamp_max": lambda s, c, m: torch.clamp_max(s, 5),
    **{name: of_scores(getattr(torch, name)) for name in ("erf", "exp2", "expm1", "log1p", "log2", "log10", "sin", "cos", "sign")},
    **{f"special_{name}": of_scores(getattr(torch.special, name)) for name in ("erf", "exp2", "expm1", "log1p", "expit")},
    "gelu": lambda s, c, m: F.gelu(s) + F.gelu(s, approximate="tanh"),
    "softplus": lambda s, c, m: F.softplus(s, 2.0),
    "log_sigmoid": lambda s, c, m: F.logsigmoid(s),
    "mish": lambda s, c, m: F.mish(s),
    "elu": lambda s, c, m: F.elu(s),
    "selu": lambda s, c, m: F.selu(s),
    "celu": lambda s, c, m: F.celu(s, 2.0),
    "hardsigmoid": lambda s, c, m: F.hardsigmoid(s),
    "hardswish": lambda s, c, m: F.hardswish(s),
    "softshrink": lambda s, c, m: F.softshrink(s),
    "hardshrink": lambda s, c, m: F.hardshrink(s),
    "prelu": lambda s, c, m: F.prelu(s, c[0, :1]),
    "lerp": lambda s, c, m: torch.lerp(s, c, 0.25),
    "fmax": lambda s, c, m: torch.fmax(s, c),
    "fmin": lambda s, c, m: torch.fmin(s, c),
    "logaddexp": lambda s, c, m: torch.logaddexp(s, c),
    "to": lambda s, c, m: s.to(torch.bfloat16),
    "_to_copy": lambda s, c, m: aten._to_copy(s, dtype=torch.bfloat16),
    "type_as": lambda s, c, m: s + (s > 0).type_as(s),
    "dropout": lambda s, c, m: F.dropout(s, 0.5, training=False),
    "feature_dropout": lambda s, c, m: aten.feature_dropout(s, 0.5, False),
}
CHOICES: dict[str, Scores] = {
    "where": lambda s, c, m: torch.where(m, s, -1e4),
    "masked_fill": lambda s, c, m: s.masked_fill(m, -1e4),
    "isneginf": lambda s, c, m: s.masked_fill(torch.isneginf(s), -1e4),
    "isnan": lambda s, c, m: s.masked_fill(torch.isnan(s), -1e4),
    "isfinite": lambda s, c, m: s.masked_fill(~torch.isfinite(s), -1e4),
    "isinf": lambda s, c, m: s.masked_fill(torch.isinf(s), -1e4),
    "isposinf": lambda s, c, m: s.masked_fill(torch.isposinf(s), -1e4),
    "nan_to_num": lambda s, c, m: torch.nan_to_num(s, posinf=9.0),
    "logical_and": lambda s, c, m: s + shown(torch.logical_and(s > 0, m)),
    "logical_or": lambda s, c, m: s + shown(torch.logical_or(s > 0, m)),
    "logical_xor": lambda s, c, m: s + shown(torch.logical_xor(s > 0, m)),
    "logical_not": lambda s, c, m: s + shown(torch.logical_not(s > 0)),
    "bitwise_and": lambda s, c, m: s + shown(torch.bitwise_and(s > 0, m)),
    "__and__": lambda s, c, m: s + shown(aten.__and__(s > 0, m)),
    "bitwise_or": lambda s, c, m: s + shown(torch.bitwise_or(s > 0, m)),
    "__or__": lambda s, c, m: s + shown(aten.__or__(s > 0, m)),
    "bitwise_xor": lambda s, c, m: s + shown(torch.bitwise_xor(s > 0, m)),
    "bitwise_not": lambda s, c, m: s + shown(~(s > 0)),
    "lt": lambda s, c, m: s + shown(s < c),
    "less": lambda s, c, m: s + shown(torch.less(s, c)),
    "le": lambda s, c, m: s + shown(s <= c),
    "less_equal": lambda s, c, m: s + shown(torch.less_equal(s, c)),
    "gt": lambda s, c, m: s + shown(s > c),
    "greater": lambda s, c, m: s + shown(torch.greater(s, c)),
    "ge": lambda s, c, m: s + shown(s >= c),
    "greater_equal": lambda s, c, m: s + shown(torch.greater_equal(s, c)),
    "eq": lambda s, c, m: s + shown(s == c),
    "ne": lambda s, c, m: s + shown(s != c),
    "not_equal": lambda s, c, m: s + shown(torch.not_equal(s, c)),
}


class Operators(GoldenLines):
    def test_none_is_without_a_case(self):
        self.assertEqual({*NUMBERS, *CHOICES}, set(pointwise.RULES))

    def test_numbers(self):
        self.lines(
            NUMBERS,
            """\
add                 s + c0[q, k]
sub                 s - c0[q, k]
subtract            s - c0[q, k]
mul                 s*c0[q, k]
multiply            s*c0[q, k]
minimum             min(s, c0[q, k])
maximum             max(s, c0[q, k])
min                 min(s, c0[q, k])
max                 max(s, c0[q, k])
rsub                2 - s
div                 s/3
divide              s/3
true_divide         s/3
floor_divide        s + (k - q)//2
remainder           s + (k - q)%2
neg                 -s
negative            -s
abs                 abs(s)
exp                 exp(s)
log                 log(s)
tanh                tanh(s)
sigmoid             sigmoid(s)
sqrt                sqrt(s)
relu                max(s, 0)
leaky_relu          where(s > 0, s, 0.1*s)
silu                s*sigmoid(s)
threshold           where(not s <= 0.5, s, -3)
hardtanh            min(max(s, -1), 1)
relu6               min(max(s, 0), 6)
addcmul             s + 0.5*(s*s)
pow                 s*s*s
square              s*s
reciprocal          1/s
rsqrt               1/sqrt(s)
clamp               min(max(s, -5), 5)
clip                min(max(s, -5), 5)
clamp_min           max(s, -5)
clamp_max           min(s, 5)
erf                 erf(s)
exp2                exp2(s)
expm1               expm1(s)
log1p               log1p(s)
log2                1.4427*log(s)
log10               0.434294*log(s)
sin                 sin(s)
cos                 cos(s)
sign                (s > 0) - (s < 0)
special_erf         erf(s)
special_exp2        exp2(s)
special_expm1       expm1(s)
special_log1p       log1p(s)
special_expit       sigmoid(s)
gelu                0.5*s*(erf(0.707107*s) + 1) + 0.5*s*(tanh(0.797885*(s + 0.044715*(s*s*s))) + 1)
softplus            where(2*s > 20, s, log1p(exp(min(2*s, 20)))/2)
log_sigmoid         min(s, 0) - log1p(exp(where(s < 0, s, -s)))
mish                s*tanh(log1p(exp(min(s, 20))))
elu                 where(s <= 0, expm1(min(s, 0)), s)
selu                where(s <= 0, 1.7581*expm1(min(s, 0)), 1.0507*s)
celu                where(s <= 0, 2*expm1(0.5*min(s, 0)), s)
hardsigmoid         (min(max(s, -3), 3) + 3)/6
hardswish           t0 = min(max(s, -3), 3)
where(s <= -3, where(s == -inf, nan, 0), where(s < 3, t0*(t0 + 3)/6, s))
softshrink          where(s > 0.5, s - 0.5, where(s < -0.5, s - -0.5, where(s != s, s, 0)))
hardshrink          where(not s >= -0.5 or not s <= 0.5, s, 0)
prelu               where(s > 0, s, s*c0[0, 0])
lerp                s + 0.25*(c0[q, k] - s)
fmax                where(s >= c0[q, k] or c0[q, k] != c0[q, k], s, c0[q, k])
fmin                where(s <= c0[q, k] or c0[q, k] != c0[q, k], s, c0[q, k])
logaddexp           t0 = s == c0[q, k] and abs(s) == inf
where(t0, where(t0, s, 0)*abs(where(t0, c0[q, k], 0)), max(s, c0[q, k]) + log1p(exp(-abs(where(not s == c0[q, k], s - c0[q, k], 0)))))
to                  s
_to_copy            s
type_as             s + (s > 0)
dropout             s
feature_dropout     s""",
        )

    def test_choices(self):
        self.lines(
            CHOICES,
            """\
where               where(c0[q, k], s, -10000)
masked_fill         where(not c0[q, k], s, -10000)
isneginf            where(not s == -inf, s, -10000)
isnan               where(not s != s, s, -10000)
isfinite            where(abs(s) < inf, s, -10000)
isinf               where(not abs(s) == inf, s, -10000)
isposinf            where(not s == inf, s, -10000)
nan_to_num          where(not s != s, where(not s == inf, where(not s == -inf, s, min(float32)), 9), 0)
logical_and         s + where(s > 0 and c0[q, k], 0, -10000)
logical_or          s + where(s > 0 or c0[q, k], 0, -10000)
logical_xor         s + where((s > 0) != c0[q, k], 0, -10000)
logical_not         s + where(not s > 0, 0, -10000)
bitwise_and         s + where(s > 0 and c0[q, k], 0, -10000)
__and__             s + where(s > 0 and c0[q, k], 0, -10000)
bitwise_or          s + where(s > 0 or c0[q, k], 0, -10000)
__or__              s + where(s > 0 or c0[q, k], 0, -10000)
bitwise_xor         s + where((s > 0) != c0[q, k], 0, -10000)
bitwise_not         s + where(not s > 0, 0, -10000)
lt                  s + where(s < c0[q, k], 0, -10000)
less                s + where(s < c0[q, k], 0, -10000)
le                  s + where(s <= c0[q, k], 0, -10000)
less_equal          s + where(s <= c0[q, k], 0, -10000)
gt                  s + where(s > c0[q, k], 0, -10000)
greater             s + where(s > c0[q, k], 0, -10000)
ge                  s + where(s >= c0[q, k], 0, -10000)
greater_equal       s + where(s >= c0[q, k], 0, -10000)
eq                  s + where(s == c0[q, k], 0, -10000)
ne                  s + where(s != c0[q, k], 0, -10000)
not_equal           s + where(s != c0[q, k], 0, -10000)""",
        )
