"""Named attention problems for every kernel's tests, and the check that holds a kernel to the fp64 reference.

A *form* builds a score program with its facts, captured tensors and sizes for given dimensions; a *case* is a form at one
shape, dtype and memory layout. ``check`` runs a kernel's forward and backward eagerly and compares the output, lse and every
gradient by the two-reference rule: the error against fp64 is at most twice that of eager PyTorch (everything materialised in
the case's dtype, gradients by autograd) plus a small rounding floor.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import sympy
import torch
from torch import Tensor

from fa_inductor.facts import Affine, MaskFacts, MaskTerm, ProgramFacts
from fa_inductor.kernels.reference import KERNEL as REFERENCE
from fa_inductor.program import Coordinates, ProgramBuilder, ScoreProgram, evaluate
from fa_inductor.recognise import recognise
from fa_inductor.request import AttentionRequest, Forward, Gradients, Inputs, Kernel, Needs, Plan, TensorSpec

INF = math.inf


@dataclass(frozen=True)
class Dims:
    b: int = 2
    hq: int = 2
    hkv: int = 2
    lq: int = 65
    lk: int = 65
    d: int = 32
    dv: int = 32


@dataclass(frozen=True)
class Form:
    """What a form builds. ``captures``: real tensors; ``differentiable``: which of them need a gradient."""

    program: ScoreProgram
    facts: ProgramFacts
    captures: tuple[Tensor, ...] = ()
    differentiable: tuple[bool, ...] = ()
    sizes: tuple[int, ...] = ()
    post: ScoreProgram | None = None


@dataclass(frozen=True)
class Case:
    """``layout``: see ``LAYOUTS``; ``scale_input`` multiplies q (large scores); ``lse``: the lse has a gradient too."""

    name: str
    form: str
    dims: Dims = field(default_factory=Dims)
    dtype: torch.dtype = torch.float32
    layout: str = "bhld"
    masked_rows: str = "eager"
    scale_input: float = 1.0
    lse: bool = False


# -- forms ---------------------------------------------------------------------------------------------------------------
class _Maker:
    """A ProgramBuilder with the score scaled by 1/sqrt(D), and shorthands."""

    def __init__(self, dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> None:
        self.dims, self.dtype, self.generator = dims, dtype, generator
        self.b = ProgramBuilder()
        self.scale = 1 / math.sqrt(dims.d)
        self.scaled = self.b.emit("mul", self.b.score(), self.b.const(self.scale))
        self.captures: list[Tensor] = []
        self.differentiable: list[bool] = []
        self.sizes: tuple[int, ...] = ()

    def emit(self, op: str, *args: int) -> int:
        return self.b.emit(op, *args)

    def index(self, name: str) -> int:
        return self.b.index(name)

    def zero(self) -> int:
        return self.b.const(0)

    def capture(self, tensor: Tensor, differentiable: bool = False) -> int:
        self.captures.append(tensor)
        self.differentiable.append(differentiable)
        return self.b.capture(str(tensor.dtype).removeprefix("torch."), tensor.ndim)

    def floats(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.dtype)

    def load(self, tensor: Tensor, indices: Sequence[int], differentiable: bool = False) -> int:
        return self.b.load(self.capture(tensor, differentiable), indices)

    def distance(self) -> int:
        return self.emit("sub", self.index("k"), self.index("q"))

    def hide(self, visible: int, fill: float, kind: str, value: int) -> int:
        """``value`` with hidden scores replaced by ``fill``, or ``fill`` added to them."""
        if kind == "replace":
            return self.emit("where", visible, value, self.b.const(fill))
        return self.emit("add", value, self.emit("where", visible, self.b.const(0.0), self.b.const(fill)))

    def finish(self, result: int, terms: Sequence[tuple[str, int, Affine | None]] = (), mask: dict[str, object] | None = None, **facts: object) -> Form:
        bias = facts.pop("bias", None)
        places: Sequence[int] = mask.get("places", ()) if mask else ()  # type: ignore[assignment]
        program = self.b.finish(result, *(t[1] for t in terms), *places, *([bias] if bias is not None else []))  # type: ignore[list-item]
        rest = program.results[1:]
        mask_facts = None
        if mask is not None and mask.get("hidden") == "add" and mask["fill"] > -1e30:  # type: ignore[operator]
            facts["scale"] = None  # such a fill is not reported as a mask: nothing is known about the program
        elif mask is not None:
            fill = float(mask["fill"])  # type: ignore[arg-type]
            hidden = str(mask.get("hidden", "replace"))
            placed = tuple(MaskTerm(kind, node, bound) for (kind, _, bound), node in zip(terms, rest, strict=False))  # type: ignore[arg-type]
            mask_facts = MaskFacts(
                fill,
                hidden,  # type: ignore[arg-type]
                placed,
                bool(mask.get("every", False)),
                skip_above(fill, hidden),
                places=rest[len(terms) : len(terms) + len(places)],
            )
        known = ProgramFacts(mask_facts, bias=rest[-1] if bias is not None else None, **facts)  # type: ignore[arg-type]
        program = ScoreProgram(program.nodes, program.results[:1], program.captures, program.n_sizes)
        return Form(program, known, tuple(self.captures), tuple(self.differentiable), self.sizes)


def skip_above(fill: float, hidden: str) -> float:
    """Least running maximum from which a hidden score of about ``fill`` has exp(score - maximum) == 0 in fp32."""
    if fill == -INF:
        return -INF
    if hidden == "add":
        return fill * 0.5
    least = torch.tensor(fill + 105.0, dtype=torch.float32)
    return float(torch.nextafter(least, torch.tensor(INF))) if abs(fill) > 1e4 else float(least)


FORMS: dict[str, Callable[[_Maker], Form]] = {}


def _form(name: str) -> Callable[[Callable[[_Maker], Form]], Callable[[_Maker], Form]]:
    def register(function: Callable[[_Maker], Form]) -> Callable[[_Maker], Form]:
        FORMS[name] = function
        return function

    return register


@_form("plain")
def _plain(m: _Maker) -> Form:
    return m.finish(m.scaled, scale=m.scale, plain=True)


@_form("unscaled")
def _unscaled(m: _Maker) -> Form:
    return m.finish(m.b.score(), scale=1.0, plain=True)


def _causal(fill: float, kind: str = "replace") -> Callable[[_Maker], Form]:
    def build(m: _Maker) -> Form:
        visible = m.emit("le", m.distance(), m.zero())
        return m.finish(
            m.hide(visible, _fill(fill, m.dtype), kind, m.scaled),
            [("upper", visible, Affine(0))],
            {"fill": _fill(fill, m.dtype), "hidden": kind, "every": True},
            scale=m.scale,
            plain=False,
            labels=("causal",),
        )

    return build


def _fill(fill: float, dtype: torch.dtype) -> float:
    """NaN stands for the dtype's own most negative number."""
    return float(torch.finfo(dtype).min) if math.isnan(fill) else fill


MIN = math.nan
for _name, _value in (("inf", -INF), ("min", MIN), ("1e9", -1e9), ("1e4", -1e4)):
    FORMS[f"causal_{_name}"] = _causal(_value)
FORMS["causal_add_inf"] = _causal(-INF, "add")
FORMS["causal_add_min"] = _causal(MIN, "add")


def _bottom_right(fill: float) -> Callable[[_Maker], Form]:
    def build(m: _Maker) -> Form:
        """Causal aligned to the last key, in symbolic sizes (Lq, Lk): the first Lq - Lk rows see nothing."""
        m.sizes = (m.dims.lq, m.dims.lk)
        visible = m.emit("le", m.distance(), m.emit("sub", m.b.size(1), m.b.size(0)))
        value = _fill(fill, m.dtype)
        return m.finish(m.hide(visible, value, "replace", m.scaled), [("upper", visible, Affine(0, ((1, 1), (0, -1))))], {"fill": value}, scale=m.scale)

    return build


FORMS["bottom_right_inf"] = _bottom_right(-INF)
FORMS["bottom_right_min"] = _bottom_right(MIN)


@_form("window_inf")
def _window(m: _Maker) -> Form:
    upper = m.emit("le", m.distance(), m.zero())
    lower = m.emit("ge", m.distance(), m.b.const(-16))
    result = m.hide(m.emit("and", upper, lower), -INF, "replace", m.scaled)
    return m.finish(result, [("upper", upper, Affine(0)), ("lower", lower, Affine(-16))], {"fill": -INF, "every": m.dims.lk >= m.dims.lq}, scale=m.scale)


@_form("band_min")
def _band(m: _Maker) -> Form:
    """A two-sided window with a finite fill."""
    upper = m.emit("le", m.distance(), m.b.const(7))
    lower = m.emit("ge", m.distance(), m.b.const(-7))
    fill = _fill(MIN, m.dtype)
    result = m.hide(m.emit("and", upper, lower), fill, "replace", m.scaled)
    return m.finish(result, [("upper", upper, Affine(7)), ("lower", lower, Affine(-7))], {"fill": fill}, scale=m.scale)


def _padding_mask(dims: Dims, hidden_rows: bool) -> Tensor:
    """[B, Lk] bool: batch i sees a prefix; with ``hidden_rows`` the last batch sees nothing."""
    lengths = torch.tensor([max(1, dims.lk - (dims.lk * 2 * i) // (3 * max(1, dims.b - 1) or 1)) for i in range(dims.b)])
    if hidden_rows:
        lengths[-1] = 0
    return torch.arange(dims.lk) < lengths[:, None]


def _padding(fill: float, kind: str, hidden_rows: bool = False, causal: bool = False) -> Callable[[_Maker], Form]:
    def build(m: _Maker) -> Form:
        key = m.load(_padding_mask(m.dims, hidden_rows), (m.index("b"), m.index("k")))
        value = _fill(fill, m.dtype)
        terms: list[tuple[str, int, Affine | None]] = [("key", key, None)]
        visible = key
        if causal:
            upper = m.emit("le", m.distance(), m.zero())
            terms.append(("upper", upper, Affine(0)))
            visible = m.emit("and", key, upper)
        result = m.hide(visible, value, kind, m.scaled)
        if kind == "add" and value > -1e30:
            bias = m.emit("where", visible, m.b.const(0.0), m.b.const(value))
            return m.finish(result, scale=m.scale, bias=bias)
        return m.finish(result, terms, {"fill": value, "hidden": kind}, scale=m.scale)

    return build


for _name, _value in (("inf", -INF), ("min", MIN), ("1e9", -1e9)):
    for _kind in ("replace", "add"):
        FORMS[f"padding_{_kind}_{_name}"] = _padding(_value, _kind)
        FORMS[f"padding_{_kind}_{_name}_hidden_rows"] = _padding(_value, _kind, hidden_rows=True)
    FORMS[f"causal_padding_{_name}"] = _padding(_value, "replace", causal=True)
FORMS["causal_padding_min_hidden_rows"] = _padding(MIN, "replace", hidden_rows=True, causal=True)


@_form("left_padding_causal_min")
def _left_padding(m: _Maker) -> Form:
    """Padding on the left under causal: the first rows see nothing and are uniform over all keys."""
    key = m.load(_padding_mask(m.dims, False).flip(1), (m.index("b"), m.index("k")))
    upper = m.emit("le", m.distance(), m.zero())
    fill = _fill(MIN, m.dtype)
    result = m.hide(m.emit("and", key, upper), fill, "replace", m.scaled)
    return m.finish(result, [("key", key, None), ("upper", upper, Affine(0))], {"fill": fill}, scale=m.scale)


def _bias(axes: str, differentiable: bool, causal: bool = False, longer: int = 0) -> Callable[[_Maker], Form]:
    """Dense additive bias of rank 4, of size 1 on the axes not named; ``longer``: than what is read of it."""

    def build(m: _Maker) -> Form:
        d = m.dims
        sizes = {"b": d.b, "h": d.hq, "q": d.lq, "k": d.lk}
        shape = [sizes[a] + longer if a in axes else 1 for a in "bhqk"]
        indices = [m.index(a) if a in axes else m.zero() for a in "bhqk"]
        bias = m.load(m.floats(*shape), indices, differentiable)
        result = m.emit("add", m.scaled, bias)
        if not causal:
            return m.finish(result, scale=m.scale, bias=bias)
        visible = m.emit("le", m.distance(), m.zero())
        return m.finish(m.hide(visible, -INF, "replace", result), [("upper", visible, Affine(0))], {"fill": -INF, "every": True}, scale=m.scale, bias=bias)

    return build


FORMS["bias_hqk_grad"] = _bias("hqk", True)
FORMS["bias_bqk_grad"] = _bias("bqk", True)
FORMS["bias_bk_grad"] = _bias("bk", True)
FORMS["bias_bhqk"] = _bias("bhqk", False)
FORMS["bias_k"] = _bias("k", False)
FORMS["longer_bias_hqk_grad"] = _bias("hqk", True, longer=9)
FORMS["longer_bias_k_grad"] = _bias("k", True, longer=9)
FORMS["bias_q_grad"] = _bias("q", True)
FORMS["causal_bias_hqk_grad"] = _bias("hqk", True, causal=True)


@_form("alibi_grad")
def _alibi(m: _Maker) -> Form:
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(m.dims.hq)]).to(m.dtype)
    bias = m.emit("mul", m.load(slopes, (m.index("h"),), True), m.b.convert(m.distance(), "float"))
    visible = m.emit("le", m.distance(), m.zero())
    result = m.hide(visible, -INF, "replace", m.emit("add", m.scaled, bias))
    return m.finish(result, [("upper", visible, Affine(0))], {"fill": -INF, "every": True}, scale=m.scale, bias=bias, labels=("causal", "ALiBi"))


def _softcapped(m: _Maker) -> int:
    cap = m.b.const(5.0)
    return m.emit("mul", m.emit("tanh", m.emit("div", m.scaled, cap)), cap)


@_form("softcap")
def _softcap(m: _Maker) -> Form:
    return m.finish(_softcapped(m), softcap=5.0)


@_form("softcap_window_inf")
def _softcap_window(m: _Maker) -> Form:
    upper = m.emit("le", m.distance(), m.zero())
    lower = m.emit("gt", m.distance(), m.b.const(-20))
    result = m.hide(m.emit("and", upper, lower), -INF, "replace", _softcapped(m))
    return m.finish(result, [("upper", upper, Affine(0)), ("lower", lower, Affine(-19))], {"fill": -INF, "every": m.dims.lk >= m.dims.lq}, softcap=5.0)


@_form("temperature_grad")
def _temperature(m: _Maker) -> Form:
    """A learned scalar tensor divides the scores."""
    tau = m.load(torch.tensor(1.7).to(m.dtype), (), True)
    return m.finish(m.emit("div", m.scaled, tau))


@_form("head_temperature_grad")
def _head_temperature(m: _Maker) -> Form:
    """A learned temperature per head with a bound, as in Swin-V2."""
    tau = m.load(m.floats(m.dims.hq, 1, 1, scale=0.3), (m.index("h"), m.zero(), m.zero()), True)
    return m.finish(m.emit("mul", m.scaled, m.emit("exp", m.emit("min", tau, m.b.const(2.0)))))


@_form("documents_inf")
def _documents(m: _Maker) -> Form:
    """Packed documents under causal: ids equal."""
    d = m.dims
    n = max(d.lq, d.lk)
    ids = torch.stack([torch.arange(n) // (11 + 6 * i) for i in range(d.b)])
    number = m.capture(ids)
    same = m.emit("eq", m.b.load(number, (m.index("b"), m.index("q"))), m.b.load(number, (m.index("b"), m.index("k"))))
    upper = m.emit("le", m.distance(), m.zero())
    result = m.hide(m.emit("and", same, upper), -INF, "replace", m.scaled)
    return m.finish(result, [("upper", upper, Affine(0))], {"fill": -INF, "places": [same], "every": d.lk >= d.lq}, scale=m.scale)


def _blocks(fill: float) -> Callable[[_Maker], Form]:
    def build(m: _Maker) -> Form:
        """A tensor that hides blocks of scores, whole rows and whole columns among them, and parts of blocks."""
        d, step = m.dims, 16
        kinds = torch.randint(0, 3, (d.hq, -(-d.lq // step), -(-d.lk // step)), generator=m.generator)
        kinds = kinds.repeat_interleave(step, 1).repeat_interleave(step, 2)[:, : d.lq, : d.lk]
        visible = (kinds == 2) | ((kinds == 1) & (torch.rand(kinds.shape, generator=m.generator) < 0.5))
        visible[:, 3 : min(20, d.lq - 1)] = False
        visible[:, :, 40:70] = False
        place = m.load(visible, (m.index("h"), m.index("q"), m.index("k")))
        return m.finish(m.hide(place, fill, "replace", m.scaled), (), {"fill": fill, "places": [place]}, scale=m.scale)

    return build


_form("blocks_inf_hidden_rows")(_blocks(-INF))
_form("blocks_min_hidden_rows")(lambda m: _blocks(_fill(MIN, m.dtype))(m))


def _float_mask(fill: float, causal: bool = False) -> Callable[[_Maker], Form]:
    def build(m: _Maker) -> Form:
        """A mask of 0 and ``fill`` that is added, one for each batch, beside a small trained bias; some rows see nothing."""
        d, step = m.dims, 16
        kept = torch.rand((d.b, -(-d.lq // step), -(-d.lk // step)), generator=m.generator) < 0.5
        visible = kept.repeat_interleave(step, 1).repeat_interleave(step, 2)[:, : d.lq, : d.lk]
        visible = visible & (torch.rand(visible.shape, generator=m.generator) < 0.8)
        visible[:, 3 : min(20, d.lq - 1)] = False
        own = torch.zeros(visible.shape).masked_fill(~visible, _fill(fill, m.dtype)).to(m.dtype)
        bias = m.load(m.floats(d.hq), (m.index("h"),), True)
        result = m.emit("add", m.emit("add", m.scaled, bias), m.load(own, (m.index("b"), m.index("q"), m.index("k"))))
        if causal:
            result = m.hide(m.emit("le", m.distance(), m.zero()), -INF, "replace", result)
        program = m.b.finish(result)
        facts = recognise(program, sympy.Integer(d.lq), sympy.Integer(d.lk), tuple(map(sympy.Integer, m.sizes)), m.dtype)
        assert facts.hiding_bias is not None
        return Form(program, facts, tuple(m.captures), tuple(m.differentiable), m.sizes)

    return build


_form("float_mask_inf_hidden_rows")(_float_mask(-INF))
_form("float_mask_min_hidden_rows")(_float_mask(MIN))
_form("float_mask_min_causal")(_float_mask(MIN, causal=True))


@_form("swin_grad")
def _swin(m: _Maker) -> Form:
    """Relative-position table by an index tensor, and a shift mask per window (b % nW); both gradients by scatter where asked."""
    d = m.dims
    n = max(d.lq, d.lk)
    table = m.load(
        m.floats(2 * n - 1, d.hq),
        (m.b.load(m.capture(torch.arange(n)[:, None] - torch.arange(n)[None, :] + n - 1), (m.index("q"), m.index("k"))), m.index("h")),
        True,
    )
    windows = 2
    shift = (torch.rand((windows, n, n), generator=m.generator) < 0.3).to(m.dtype) * -100.0
    window = m.load(shift, (m.emit("mod", m.index("b"), m.b.const(windows)), m.index("q"), m.index("k")))
    bias = m.emit("add", table, window)
    return m.finish(m.emit("add", m.scaled, bias), scale=m.scale, bias=bias)


@_form("buckets_grad")
def _buckets(m: _Maker) -> Form:
    """T5's learned relative bias: the bucket is computed from the distance."""
    bucket = m.emit("min", m.emit("abs", m.distance()), m.b.const(15))
    bias = m.load(m.floats(16, m.dims.hq), (bucket, m.index("h")), True)
    return m.finish(m.emit("add", m.b.score(), bias), scale=1.0, bias=bias)


@_form("groups_of_heads_grad")
def _groups(m: _Maker) -> Form:
    """What a concatenation of groups of heads becomes: scales, biases and masks by a choice, tensors read within their bounds."""
    d = m.dims
    n = (d.hq + 1) // 2
    first = m.emit("lt", m.index("h"), m.b.const(n))
    own = m.load(m.floats(n, d.lq, d.lk), (m.emit("min", m.index("h"), m.b.const(n - 1)), m.index("q"), m.index("k")), True)
    later = m.emit("max", m.emit("sub", m.index("h"), m.b.const(n)), m.zero())
    other = m.load(m.floats(max(d.hq - n, 1), d.lk), (later, m.index("k")), True)
    scale = m.emit("where", first, m.b.const(1.0), m.b.const(0.5))
    scores = m.emit("add", m.emit("mul", m.scaled, scale), m.emit("where", first, own, other))
    near = m.emit("lt", m.emit("abs", m.distance()), m.b.const(9))
    visible = m.emit("where", first, m.emit("le", m.distance(), m.zero()), near)
    return m.finish(m.hide(visible, -INF, "replace", scores), (), {"fill": -INF, "places": [visible]})


def _post(m: _Maker, form: Form, tensor: Tensor, indices: Sequence[str]) -> Form:
    """``form`` with probabilities multiplied by a captured tensor (last of the captures)."""
    m.capture(tensor, True)
    builder = ProgramBuilder()
    builder.captures = list(m.b.captures)
    post = builder.finish(builder.load(len(m.captures) - 1, [builder.index(i) for i in indices]))
    program = ScoreProgram(form.program.nodes, form.program.results, tuple(m.b.captures), form.program.n_sizes)
    return replace(form, program=program, post=post, captures=tuple(m.captures), differentiable=tuple(m.differentiable))


@_form("post_head_mask_grad")
def _head_mask(m: _Maker) -> Form:
    return _post(m, _causal(-INF)(m), m.floats(m.dims.hq), "h")


@_form("post_dense_grad")
def _post_dense(m: _Maker) -> Form:
    return _post(m, _plain(m), m.floats(m.dims.b, m.dims.lq, m.dims.lk), "bqk")


# -- cases ---------------------------------------------------------------------------------------------------------------
LAYOUTS = ("bhld", "blhd", "padded", "fused_qkv", "stride0")
SQUARE = Dims()
RECTANGLE = Dims(lq=33, lk=97)
TALL = Dims(lq=97, lk=33)
GROUPED = Dims(hq=4, hkv=2, lq=63, lk=63)
NARROW_VALUES = Dims(lq=65, lk=65, d=32, dv=16)
WINDOW = Dims(b=4, hq=2, hkv=2, lq=49, lk=49, d=32, dv=32)
SMALL_WINDOW = Dims(b=4, hq=2, hkv=2, lq=17, lk=31, d=16, dv=24)


def _cases() -> Iterator[Case]:
    for form in FORMS:
        yield Case(f"{form}", form)
    for name, dims in (("rectangle", RECTANGLE), ("tall", TALL), ("gqa", GROUPED), ("dv", NARROW_VALUES)):
        for form in (
            "plain",
            "causal_inf",
            "causal_min",
            "bottom_right_inf",
            "bottom_right_min",
            "padding_replace_min",
            "bias_hqk_grad",
            "softcap",
            "alibi_grad",
        ):
            yield Case(f"{form}-{name}", form, dims)
    for length in (1, 2, 63, 64, 127, 128, 129):
        yield Case(f"causal_inf-{length}", "causal_inf", Dims(b=1, lq=length, lk=length))
        yield Case(f"softcap_window_inf-{length}", "softcap_window_inf", Dims(b=1, lq=length, lk=length))
    for d, dv in ((8, 8), (16, 24), (40, 40), (64, 64), (80, 80), (96, 128), (128, 128), (1, 1), (17, 5)):
        yield Case(f"causal_inf-d{d}-dv{dv}", "causal_inf", Dims(b=1, d=d, dv=dv))
    yield Case("decode", "plain", Dims(lq=1, lk=200, hq=4, hkv=1))
    yield Case("decode_bottom_right", "bottom_right_inf", Dims(lq=1, lk=200, hq=4, hkv=1))
    yield Case("one", "plain", Dims(1, 1, 1, 1, 1, 8, 8))
    yield Case("mqa_window", "softcap_window_inf", Dims(hq=4, hkv=1, lq=130, lk=130))
    yield Case("gqa_bias", "bias_bk_grad", Dims(hq=6, hkv=2, lq=40, lk=72))
    yield Case("gqa_post", "post_dense_grad", Dims(hq=6, hkv=2, lq=40, lk=72))
    for form in ("documents_inf", "blocks_inf_hidden_rows", "blocks_min_hidden_rows", "float_mask_min_hidden_rows"):
        yield Case(f"{form}-rectangle", form, Dims(b=2, hq=4, hkv=2, lq=65, lk=128))
    yield Case("large_scores", "causal_inf", SQUARE, scale_input=30.0)
    for layout in LAYOUTS[1:]:
        yield Case(f"causal_inf-{layout}", "causal_inf", SQUARE, layout=layout)
        yield Case(f"padding_replace_min-{layout}", "padding_replace_min", SQUARE, layout=layout)
    for form in ("causal_inf", "bottom_right_inf", "padding_replace_inf_hidden_rows", "padding_add_inf_hidden_rows", "blocks_inf_hidden_rows"):
        yield Case(f"{form}-zero", form, TALL, masked_rows="zero")
    for dtype in (torch.bfloat16, torch.float16):
        short = str(dtype).removeprefix("torch.")
        for form in FORMS:
            if dtype == torch.bfloat16 or not form.endswith(("1e9", "1e9_hidden_rows")):  # -1e9 is -inf in fp16
                yield Case(f"{form}-{short}", form, dtype=dtype)
        yield Case(f"causal_inf-gqa-{short}", "causal_inf", GROUPED, dtype=dtype)
        yield Case(f"causal_inf-blhd-{short}", "causal_inf", SQUARE, dtype=dtype, layout="blhd")
        yield Case(f"plain-long-{short}", "plain", Dims(b=1, lq=65, lk=1030, d=64, dv=64), dtype=dtype)

    for form in FORMS:  # the scores of a head are one tile
        yield Case(f"{form}-window", form, SMALL_WINDOW)
        if not form.endswith(("1e9", "1e9_hidden_rows")):
            yield Case(f"{form}-window-bfloat16", form, WINDOW, dtype=torch.bfloat16)
    for form in ("padding_replace_inf_hidden_rows", "padding_add_inf_hidden_rows"):
        yield Case(f"{form}-window-zero", form, SMALL_WINDOW, masked_rows="zero")
    for form in ("plain", "causal_inf", "causal_min", "padding_replace_min_hidden_rows", "softcap", "bias_hqk_grad", "alibi_grad", "post_dense_grad"):
        yield Case(f"{form}-lse", form, GROUPED, lse=True)
    yield Case("padding_replace_inf_hidden_rows-zero-lse", "padding_replace_inf_hidden_rows", TALL, masked_rows="zero", lse=True)
    yield Case("causal_inf-bfloat16-lse", "causal_inf", SQUARE, dtype=torch.bfloat16, lse=True)


CASES: dict[str, Case] = {case.name: case for case in _cases()}
FLOAT32_CASES = [name for name, case in CASES.items() if case.dtype == torch.float32]


# -- problems ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Problem:
    """A case on real tensors."""

    case: Case
    form: Form
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None
    captures: tuple[Tensor, ...]

    def inputs(self, dropout_p: float = 0.0, seed: Tensor | None = None) -> Inputs:
        return Inputs(self.q, self.k, self.v, self.captures, self.form.sizes, dropout_p, seed)

    def to(self, dtype: torch.dtype) -> Problem:
        """The same numbers with floating tensors in another dtype, contiguous."""
        q, k, v, grad_out, *captures = (t.to(dtype) if t.is_floating_point() else t for t in (self.q, self.k, self.v, self.grad_out, *self.captures))
        grad_lse = None if self.grad_lse is None else self.grad_lse.to(dtype)
        return replace(self, q=q, k=k, v=v, grad_out=grad_out, grad_lse=grad_lse, captures=tuple(captures))

    def request(self, dropout_p: float = 0.0, capture_gradients: bool = True, training: bool = True) -> AttentionRequest:
        def spec(t: Tensor, grad: bool) -> TensorSpec:
            return TensorSpec(tuple(t.shape), tuple(t.stride()), t.dtype, grad and training)

        form = self.form
        return AttentionRequest(
            spec(self.q, True),
            spec(self.k, True),
            spec(self.v, True),
            form.program,
            form.facts,
            tuple(spec(t, d and capture_gradients) for t, d in zip(self.captures, form.differentiable, strict=True)),
            form.sizes,
            form.post,
            dropout_p,
            device=self.q.device.type,
            capability=torch.cuda.get_device_capability(self.q.device) if self.q.is_cuda else None,
            masked_rows=self.case.masked_rows,  # type: ignore[arg-type]
            lse=self.case.lse,
        )


def problem(case: Case | str, device: str = "cpu") -> Problem:
    """Tensors of a case: the same numbers in every process."""
    case = CASES[case] if isinstance(case, str) else case
    d = case.dims
    generator = torch.Generator().manual_seed(20)
    form = FORMS[case.form](_Maker(d, case.dtype, generator))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    q = (draw(d.b, d.hq, d.lq, d.d) * case.scale_input).to(case.dtype)
    k, v, grad_out = draw(d.b, d.hkv, d.lk, d.d), draw(d.b, d.hkv, d.lk, d.dv), draw(d.b, d.hq, d.lq, d.dv)
    q, k, v = (t.to(device) for t in (q, k, v))
    q, k, v = lay_out(q, k, v, case.layout)
    grad_lse = torch.randn(d.b, d.hq, d.lq, generator=generator).to(device) if case.lse else None
    return Problem(case, form, q, k, v, grad_out.to(device), grad_lse, tuple(t.to(device) for t in form.captures))


def dropping(p: Problem, chance: float, outside: bool = False) -> Problem:
    """The same with a dropout on the scores themselves, or ``outside``, on all that the program makes of them."""
    program = p.form.program
    builder = ProgramBuilder.like(program)
    weight = builder.emit("where", builder.keep(chance), builder.const(1 / (1 - chance)), builder.const(0.0))
    scores = {} if outside else {i: builder.emit("mul", builder.score(), weight) for i, n in enumerate(program.nodes) if n.op == "score"}
    result = builder.inline(program, scores)[program.result]
    dropped = builder.finish(builder.emit("mul", result, weight) if outside else result)
    lengths = (sympy.Integer(n) for n in (p.case.dims.lq, p.case.dims.lk))
    facts = recognise(dropped, *lengths, tuple(map(sympy.Integer, p.form.sizes)), p.case.dtype)
    return replace(p, form=replace(p.form, program=dropped, facts=facts))


def lay_out(q: Tensor, k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """The same values at other strides, each surrounded by NaN so that a read out of bounds shows."""
    if layout == "fused_qkv":
        packed = torch.stack([t.transpose(1, 2) for t in (q, k, v)], dim=2)  # (B, L, 3, H, D), as from one projection
        return tuple(t.transpose(1, 2) for t in _inside_nan(packed).unbind(2))  # type: ignore[return-value]
    if layout == "stride0":
        return _inside_nan(q), _inside_nan(k[:1]).expand(k.shape), _inside_nan(v[:, :1]).expand(v.shape)
    if layout == "blhd":
        return tuple(_inside_nan(t.transpose(1, 2)).transpose(1, 2) for t in (q, k, v))  # type: ignore[return-value]
    if layout == "padded":
        return tuple(_inside_nan(torch.nn.functional.pad(t, (0, 3), value=torch.nan))[..., :-3] for t in (q, k, v))  # type: ignore[return-value]
    return _inside_nan(q), _inside_nan(k), _inside_nan(v)


def _inside_nan(t: Tensor, slack: int = 64) -> Tensor:
    storage = torch.full((t.numel() + 2 * slack,), torch.nan, dtype=t.dtype, device=t.device)
    inner = storage[slack : slack + t.numel()].view(t.shape)
    return inner.copy_(t)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every uninitialised allocation is filled with NaN (or the largest integer), in C++ and Python alike."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]  # type: ignore[assignment]


# -- the check -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Results:
    """Named tensors: out, lse, dq, dk, dv, dcapture0 … (only those asked for)."""

    tensors: dict[str, Tensor]


def named(out: Tensor, lse: Tensor, gradients: Gradients) -> Results:
    named: dict[str, Tensor | None] = {"out": out, "lse": lse, "dq": gradients.q, "dk": gradients.k, "dv": gradients.v}
    named |= {f"dcapture{i}": g for i, g in enumerate(gradients.captures)}
    return Results({name: t for name, t in named.items() if t is not None})


def all_needs(p: Problem, capture_gradients: bool = True) -> Needs:
    return Needs(True, True, True, tuple(d and capture_gradients for d in p.form.differentiable))


def run_kernel(
    kernel: Kernel, p: Problem, needs: Needs | None = None, dropout_p: float = 0.0, seed: Tensor | None = None, request: AttentionRequest | None = None
) -> tuple[Plan, Forward, Gradients]:
    """Forward and backward with poisoned memory; the plan makes the trip through its text form, as in a compiled graph."""
    needs = needs or all_needs(p)
    plan = Plan.from_text(kernel.plan(request or p.request(dropout_p, any(needs.captures))).to_text())
    inputs = p.inputs(dropout_p, seed)
    with torch.no_grad(), poisoned_memory():
        result = kernel.forward(plan, inputs)
        gradients = kernel.backward(plan, inputs, result, p.grad_out, needs, p.grad_lse)
    return plan, result, gradients


def run_exact(p: Problem, needs: Needs | None = None) -> Results:
    """The reference kernel in fp64."""
    exact = p.to(torch.float64)
    _, result, gradients = run_kernel(REFERENCE, exact, needs or all_needs(p))
    return named(result.out, result.lse, gradients)


def run_eager(p: Problem, needs: Needs | None = None) -> Results:
    """Eager PyTorch, everything materialised in the case's dtype, gradients by autograd."""
    needs = needs or all_needs(p)
    leaves = [
        t.detach().clone().requires_grad_(n) if t.is_floating_point() else t
        for t, n in zip((p.q, p.k, p.v, *p.captures), (needs.q, needs.k, needs.v, *needs.captures), strict=True)
    ]
    q, k, v, *captures = leaves
    out, lse = eager_attention(p, q, k, v, captures)
    wanted = [t for t in leaves if t.requires_grad]
    outputs, grads = ([out], [p.grad_out]) if p.grad_lse is None else ([out, lse], [p.grad_out, p.grad_lse.to(lse.dtype)])
    found = dict(zip(map(id, wanted), torch.autograd.grad(outputs, wanted, grads), strict=True))
    gq, gk, gv, *gc = (found.get(id(t)) for t in leaves)
    return named(out.detach(), lse.detach(), Gradients(gq, gk, gv, tuple(gc)))


def eager_attention(p: Problem, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and lse as differentiable PyTorch operations in q's dtype."""
    d, form = p.case.dims, p.form
    group = d.hq // d.hkv
    score = q @ k.repeat_interleave(group, dim=1).transpose(-1, -2)
    box = Coordinates((0, d.b), (0, d.hq), (0, d.lq), (0, d.lk))
    (s,) = evaluate(form.program, box, score=score, keep=keep, captures=captures, sizes=form.sizes, device=q.device, dtype=q.dtype)
    s = s.expand(score.shape)
    probabilities = torch.softmax(s, dim=-1)
    if p.case.masked_rows == "zero":
        probabilities = torch.where((s == -INF).all(-1, keepdim=True), 0.0, torch.softmax(torch.where((s == -INF).all(-1, keepdim=True), 0.0, s), dim=-1))
    if form.post is not None:
        (factor,) = evaluate(form.post, box, captures=captures, sizes=form.sizes, device=q.device, dtype=q.dtype)
        probabilities = probabilities * factor
    return probabilities @ v.repeat_interleave(group, dim=1), torch.logsumexp(s, dim=-1)


@dataclass(frozen=True)
class Comparison:
    """Largest error of one tensor against fp64: the kernel's, eager's, and the rounding floor; ``ok`` by the two-reference rule."""

    name: str
    kernel: float
    eager: float
    floor: float
    nan_agrees: bool

    @property
    def ok(self) -> bool:
        return self.nan_agrees and self.kernel <= 2 * self.eager + self.floor


def compare(actual: Results, exact: Results, eager: Results, dtype: torch.dtype, lk: int) -> list[Comparison]:
    """Each tensor of ``actual`` against the exact one; ``actual`` must hold every tensor that ``exact`` holds."""
    assert actual.tensors.keys() == exact.tensors.keys(), (actual.tensors.keys(), exact.tensors.keys())
    out = []
    gradients = [t for name, t in exact.tensors.items() if name.startswith("d")]
    # a gradient is a sum with cancellation, of terms about as large as the largest gradient: each carries an fp32 rounding
    terms = max((_largest(t) for t in gradients), default=0.0)
    for name, want in exact.tensors.items():
        got, other = actual.tensors[name].double(), eager.tensors[name].double()
        assert got.shape == want.shape, (name, got.shape, want.shape)
        kind = torch.float32 if name == "lse" else dtype
        if name == "lse":
            # relative to its own size: a row under a finite fill has an lse near the fill; rows with no finite lse have no check
            keep = want.isfinite()
            size = want[keep].abs() + 1
            got, other, want = got[keep] / size, other[keep] / size, want[keep] / size
        floor = torch.finfo(kind).eps * _largest(want) * (8 if kind == torch.float32 else 1)
        if name.startswith("d"):
            # an element of a captured tensor's gradient is a sum over all scores that read it
            count = exact.tensors["lse"].numel() * lk / max(1, want.numel()) if name.startswith("dcapture") else 1
            # lse is stored in fp32: its own rounding is a relative error of every probability that is made from it
            lse = min(256.0, _largest(exact.tensors["lse"]))
            floor += (16 + 2 * math.sqrt(count) + lse) * torch.finfo(torch.float32).eps * terms
        out.append(_compare(name, got, other, want, floor))
    return out


def _largest(t: Tensor) -> float:
    finite = t[t.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _compare(name: str, got: Tensor, other: Tensor, want: Tensor, floor: float) -> Comparison:
    # the kernel must be NaN exactly where the equations are; eager's error counts where it is finite
    agrees = bool((got.isnan() == want.isnan()).all())
    keep = ~want.isnan() & ~got.isnan()
    error = (got - want)[keep].abs()
    error_eager = (other - want)[keep & other.isfinite()].abs()
    return Comparison(name, float(error.max()) if error.numel() else 0.0, float(error_eager.max()) if error_eager.numel() else 0.0, floor, agrees)


def check(kernel: Kernel, case: Case | str, device: str = "cpu", needs: Needs | None = None) -> list[Comparison]:
    """Run ``kernel`` on a case and assert the two-reference rule for the output, lse and every gradient."""
    p = problem(case, device)
    _, result, gradients = run_kernel(kernel, p, needs)
    assert result.out.dtype == p.q.dtype and result.lse.dtype == torch.float32, (result.out.dtype, result.lse.dtype)
    comparisons = compare(named(result.out, result.lse, gradients), run_exact(p, needs), run_eager(p, needs), p.q.dtype, p.k.shape[2])
    bad = [c for c in comparisons if not c.ok]
    assert not bad, f"{p.case.name}:\n" + "\n".join(
        f"  {c.name}: error {c.kernel:.3g}, eager {c.eager:.3g}, floor {c.floor:.3g}, NaN agree {c.nan_agrees}" for c in bad
    )
    return comparisons
