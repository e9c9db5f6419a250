"""Score programs: text form, verifier, exact simplification, derivative, and the plan's text form."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from expecttest import TestCase
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fa_inductor.facts import Affine, MaskFacts, MaskTerm, ProgramFacts
from fa_inductor.program import Capture, Coordinates, Node, ProgramBuilder, ProgramError, ScoreProgram, differentiate, evaluate, from_text, to_text, verify
from fa_inductor.program.scatter import gradient_program, scatter_loads
from fa_inductor.request import Plan

CPU = torch.device("cpu")
CAPTURES = (Capture("bool", 2), Capture("float32", 2), Capture("int64", 1), Capture("float32", 0))
AXES = {0: "bk", 1: "hk", 2: "q", 3: ""}
"""Which indices a load of each capture reads."""
SIZES = (3, 4)
BOX = Coordinates((0, 1), (0, 2), (0, 3), (0, 4))
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -1e4, math.inf, -math.inf, math.nan]


# -- random programs -----------------------------------------------------------------------------------------------------
class Raw:
    """Appends nodes without any simplification, so that it can be compared with the builder."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(self, op: str, kind: str, *args: int, value: object = None) -> int:
        self.nodes.append(Node(op, kind, args, value))  # type: ignore[arg-type]
        return len(self.nodes) - 1

    def of(self, kind: str) -> list[int]:
        return [i for i, n in enumerate(self.nodes) if n.type == kind]

    def program(self, *results: int) -> ScoreProgram:
        return verify(ScoreProgram(tuple(self.nodes), results, CAPTURES, len(SIZES)))


def leaves(literals: list[float]) -> Raw:
    """All leaves of a program: what random operations choose from."""
    raw = Raw()
    place = {n: raw.add("index", "int", value=n) for n in "bhqk"}
    raw.add("score", "float")
    for number, kind in enumerate(("bool", "float", "int", "float")):
        raw.add("load", kind, *(place[a] for a in AXES[number]), value=number)
    for value in literals:
        raw.add("const", "float", value=value)
    for integer in (0, 1, -2, 3):
        raw.add("const", "int", value=integer)
    for flag in (True, False):
        raw.add("const", "bool", value=flag)
    raw.add("size", "int", value=0)
    raw.add("size", "int", value=1)
    return raw


NUMBERS = ("add", "sub", "mul", "min", "max")
EXACT: dict[str, list[tuple[str, ...]]] = {
    "float": [
        *((op, "f", "f") for op in NUMBERS),
        ("neg", "f"),
        ("abs", "f"),
        ("where", "b", "f", "f"),
        ("to_float", "b"),
        ("to_float", "b"),
        ("to_float", "i"),
    ],
    "int": [*((op, "i", "i") for op in NUMBERS if op != "mul"), ("neg", "i"), ("abs", "i"), ("where", "b", "i", "i"), ("to_int", "b")],
    "bool": [
        *((op, kind, kind) for op in ("lt", "le", "gt", "ge", "eq", "ne") for kind in "fib"),
        ("and", "b", "b"),
        ("or", "b", "b"),
        ("not", "b"),
        ("not", "b"),
        ("where", "b", "b", "b"),
        ("to_bool", "f"),
        ("to_bool", "i"),
    ],
}
KIND = {"f": "float", "i": "int", "b": "bool"}


@st.composite
def exact_programs(draw: Callable[..., object]) -> ScoreProgram:
    """Programs of operations whose result has one right answer bit by bit (the sign of a zero apart)."""
    raw = leaves(draw(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=3)))  # type: ignore[arg-type]
    rules = [(kind, rule) for kind, rules in EXACT.items() for rule in rules]
    for _ in range(draw(st.integers(1, 14))):  # type: ignore[call-overload]
        kind, (op, *kinds) = draw(st.sampled_from(rules))  # type: ignore[misc]
        raw.add(op, kind, *(_recent(draw, raw.of(KIND[k])) for k in kinds))
        if draw(st.booleans()):
            _by_a_literal(draw, raw)
    results = draw(st.lists(st.sampled_from(range(len(raw.nodes))), min_size=1, max_size=2))
    return raw.program(len(raw.nodes) - 1, *results)  # type: ignore[misc]


def _recent(draw: Callable[..., object], choices: list[int]) -> int:
    """An operand; the newest ones more often, so that programs get deep."""
    return draw(st.one_of(st.sampled_from(choices[-3:]), st.sampled_from(choices)))  # type: ignore[return-value]


def _by_a_literal(draw: Callable[..., object], raw: Raw) -> None:
    """x / 3.0, i // 3, i % 3, i * 3: operations whose second argument must not be zero (or must not grow)."""
    op = draw(st.sampled_from(("div", "floordiv", "mod", "mul")))
    kind = "float" if op == "div" else "int"
    at = _recent(draw, raw.of(kind))
    value = draw(st.sampled_from((1, 2, 3, -3)))
    raw.add(op, kind, at, raw.add("const", kind, value=float(value) if op == "div" else value))  # type: ignore[arg-type]


def inputs(seed: int) -> dict[str, object]:
    """Scores and captured tensors with every special value in them."""
    generator = torch.Generator().manual_seed(seed)

    def special(*shape: int) -> Tensor:
        chosen = torch.randint(len(SPECIAL), shape, generator=generator)
        return torch.where(torch.rand(shape, generator=generator) < 0.3, torch.randn(shape, generator=generator), torch.tensor(SPECIAL)[chosen]).double()

    captures = [torch.rand(1, 4, generator=generator) < 0.5, special(2, 4), torch.randint(-3, 4, (3,), generator=generator), special()]
    return {"score": special(1, 2, 3, 4), "captures": captures, "sizes": SIZES, "device": CPU, "dtype": torch.float64}


def simplified(program: ScoreProgram) -> ScoreProgram:
    """The program as the builder would have made it."""
    builder = ProgramBuilder()
    builder.captures, builder.n_sizes = list(program.captures), program.n_sizes
    placed = builder.inline(program)
    return builder.finish(*(placed[r] for r in program.results))


@settings(max_examples=250, deadline=None)
@given(exact_programs(), st.integers(0, 5))
def test_simplification_changes_no_value(program: ScoreProgram, seed: int) -> None:
    given_inputs = inputs(seed)
    simpler = simplified(program)
    assert len(simpler.nodes) <= 2 * len(program.nodes)
    for plain, ours in zip(evaluate(program, BOX, **given_inputs), evaluate(simpler, BOX, **given_inputs)):  # type: ignore[arg-type]
        plain, ours = torch.broadcast_tensors(plain, ours)
        assert plain.dtype == ours.dtype
        if plain.dtype.is_floating_point:
            same = (plain == ours) | (plain.isnan() & ours.isnan())
            assert same.all(), f"{program}\n{simpler}\n{plain}\n{ours}"
        else:
            assert torch.equal(plain, ours), f"{program}\n{simpler}\n{plain}\n{ours}"


@settings(max_examples=150, deadline=None)
@given(exact_programs())
def test_text_round_trip(program: ScoreProgram) -> None:
    for p in (program, simplified(program)):
        assert from_text(to_text(p)) == p
        assert hash(from_text(to_text(p))) == hash(p)


@settings(max_examples=100, deadline=None)
@given(exact_programs())
def test_simplified_programs_are_simple(program: ScoreProgram) -> None:
    """Built again nothing more is found; no dead node; literals stand on the right of symmetric operations."""
    simpler = simplified(program)
    assert simplified(simpler) == simpler
    live = set(simpler.results)
    for i in range(len(simpler.nodes) - 1, -1, -1):
        live |= set(simpler.nodes[i].args) if i in live else set()
    assert live == set(range(len(simpler.nodes)))
    for node in simpler.nodes:
        if node.op in ("add", "mul", "min", "max", "eq", "ne") and simpler.nodes[node.args[0]].op == "const":
            assert simpler.nodes[node.args[1]].op == "const"


# -- builder: single rules -----------------------------------------------------------------------------------------------
def built(make: Callable[[ProgramBuilder], int]) -> str:
    b = ProgramBuilder()
    b.captures = [Capture("float32", 1), Capture("float32", 1), Capture("bool", 1)]
    return "; ".join(line.strip() for line in to_text(b.finish(make(b))).splitlines()[1:])


def test_a_captured_tensor_with_number_one_is_not_the_literal_one() -> None:
    """1 - [p] is [not p]; element of capture 1 minus [p] is not."""

    def difference(b: ProgramBuilder) -> int:
        k = b.index("k")
        return b.emit("sub", b.load(1, [k]), b.convert(b.load(2, [k]), "float"))

    assert built(difference) == "%0 = index k; %1 = load 1 %0; %2 = load 2 %0; %3 = to_float %2; %4 = sub %1 %3; return %4"


def test_one_minus_a_flag_times_a_fill_is_a_choice() -> None:
    def additive(b: ProgramBuilder) -> int:
        flag = b.convert(b.load(2, [b.index("k")]), "float")
        return b.emit("mul", b.emit("sub", b.const(1.0), flag), b.const(-1e9))

    assert built(additive) == "%0 = index k; %1 = load 2 %0; %2 = const -1000000000.0; %3 = const 0.0; %4 = where %1 %3 %2; return %4"


def test_a_flag_times_infinity_stays_a_product() -> None:
    """0 * inf is NaN, which a choice would not give."""
    text = built(lambda b: b.emit("mul", b.convert(b.load(2, [b.index("k")]), "float"), b.const(-math.inf)))
    assert "mul" in text and "where" not in text


@pytest.mark.parametrize(("op", "flipped"), [("lt", "ge"), ("le", "gt"), ("gt", "le"), ("ge", "lt"), ("eq", "ne"), ("ne", "eq")])
def test_negation_goes_through_integer_comparisons_only(op: str, flipped: str) -> None:
    assert flipped in built(lambda b: b.emit("not", b.emit(op, b.index("k"), b.index("q"))))
    assert f"not %{2}" in built(lambda b: b.emit("not", b.emit(op, b.score(), b.const(0.5))))


def test_zeros_of_both_signs_and_types_stay_apart() -> None:
    b = ProgramBuilder()
    literals = [0.0, -0.0, 0, False, 1, True, 1.0]
    assert len({b.const(v) for v in literals}) == len(literals)
    assert b.const(math.nan) == b.const(math.nan)


def test_what_cannot_be_folded_stays() -> None:
    for op, values in (("div", (1.0, 0.0)), ("log", (0.0,)), ("sqrt", (-1.0,)), ("exp", (1e4,)), ("mod", (3, 0)), ("to_int", (math.inf,))):
        assert f" {op} " in built(lambda b, op=op, values=values: b.emit(op, *(b.const(v) for v in values)))


def test_the_builder_refuses_wrong_types() -> None:
    b = ProgramBuilder()
    with pytest.raises(ProgramError, match="add does not take"):
        b.emit("add", b.score(), b.index("k"))
    with pytest.raises(ProgramError, match="float64 cannot be read"):
        b.capture("float64", 1)
    with pytest.raises(ProgramError, match="not a bool, int or float"):
        b.const("x")  # type: ignore[arg-type]


# -- verifier ------------------------------------------------------------------------------------------------------------
S, K, F1 = Node("score", "float"), Node("index", "int", (), "k"), Node("const", "float", (), 1.0)
BROKEN: dict[str, tuple[tuple[Node, ...], str]] = {
    "later argument": ((Node("neg", "float", (1,)), S), "%0 neg: arguments (1,) must be earlier nodes"),
    "own argument": ((S, Node("neg", "float", (1,))), "%1 neg: arguments (1,) must be earlier nodes"),
    "negative argument": ((S, Node("neg", "float", (-1,))), "must be earlier nodes"),
    "mixed types": ((S, K, Node("add", "float", (0, 1))), "%2 add: wrong argument types ['float', 'int']"),
    "too many arguments": ((S, Node("neg", "float", (0, 0))), "%1 neg: wrong argument types"),
    "too few arguments": ((S, Node("add", "float", (0,))), "%1 add: wrong argument types"),
    "no arguments": ((Node("add", "float"),), "%0 add: wrong argument types []"),
    "declared type": ((S, Node("lt", "float", (0, 0))), "%1 lt: declared float, is bool"),
    "unknown operation": ((S, Node("gamma", "float", (0,))), "%1 gamma: wrong"),
    "index name": ((Node("index", "int", (), "d"),), "or value 'd'"),
    "index with an argument": ((K, Node("index", "int", (0,), "k")), "%1 index"),
    "literal type": ((Node("const", "float", (), "1"),), "or value '1'"),
    "boolean literal called int": ((Node("const", "int", (), True),), "declared int, is bool"),
    "score with a value": ((Node("score", "float", (), 1),), "%0 score"),
    "unknown size": ((Node("size", "int", (), 1),), "%0 size"),
    "boolean size": ((Node("size", "int", (), False),), "%0 size"),
    "unknown capture": ((K, Node("load", "float", (0,), 1)), "%1 load"),
    "rank of a load": ((K, Node("load", "float", (0, 0), 0)), "%1 load"),
    "float index of a load": ((S, Node("load", "float", (0,), 0)), "%1 load"),
    "rounding format": ((S, Node("round", "float", (0,), "f8")), "value 'f8'"),
    "rounding an int": ((K, Node("round", "float", (0,), "f16")), "%1 round"),
    "condition of where": ((S, Node("where", "float", (0, 0, 0))), "%1 where"),
    "branches of where": ((S, K, Node("lt", "bool", (1, 1)), Node("where", "float", (2, 0, 1))), "%3 where"),
    "not of an int": ((K, Node("not", "bool", (0,))), "%1 not"),
    "logic on ints": ((K, Node("and", "bool", (0, 0))), "%1 and"),
    "division of ints": ((K, Node("div", "int", (0, 0))), "%1 div"),
    "remainder of floats": ((S, Node("mod", "float", (0, 0))), "%1 mod"),
    "exp of an int": ((K, Node("exp", "float", (0,))), "%1 exp"),
    "sum of bools": ((K, Node("lt", "bool", (0, 0)), Node("add", "bool", (1, 1))), "%2 add"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_verifier_names_the_node_and_the_rule(name: str) -> None:
    nodes, words = BROKEN[name]
    with pytest.raises(ProgramError) as error:
        verify(ScoreProgram(nodes, (len(nodes) - 1,), (Capture("float32", 1),), 1))
    assert words in str(error.value)


@pytest.mark.parametrize("results", [(), (1,), (-1,)])
def test_the_verifier_checks_results(results: tuple[int, ...]) -> None:
    with pytest.raises(ProgramError, match="must name nodes"):
        verify(ScoreProgram((S,), results))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a program starts with"),
        ("programme\nreturn %0", "a program starts with"),
        ("program(; sizes=0)\n%1 = score\nreturn %1", "expected %0"),
        ("program(; sizes=0)\n%0 = score", "last line must be 'return"),
        ("program(; sizes=0)\n%0 = score\n%1 = gamma %0\nreturn %1", "cannot type"),
        ("program(; sizes=0)\n%0 = score\n%1 = and %0 %0\nreturn %1", "cannot type"),
        ("program(; sizes=0)\n%0 = score\nreturn %1", "must name nodes"),
        ("program(float64[0]; sizes=0)\n%0 = load 0\nreturn %0", "cannot type"),
    ],
)
def test_text_that_is_no_program_is_refused(text: str, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        from_text(text)


# -- golden text ---------------------------------------------------------------------------------------------------------
class Golden(TestCase):
    def check(self, program: ScoreProgram, expected: str) -> None:
        self.assertExpectedInline(to_text(program), expected, skip=1)
        assert from_text(to_text(program)) == program

    def test_causal_with_padding(self) -> None:
        b = ProgramBuilder()
        mask = b.capture("bool", 2)
        visible = b.emit("and", b.emit("le", b.index("k"), b.index("q")), b.load(mask, [b.index("b"), b.index("k")]))
        program = b.finish(b.emit("where", visible, b.emit("mul", b.const(0.125), b.score()), b.const(-math.inf)))
        self.check(
            program,
            """\
program(bool[2]; sizes=0)
  %0 = index k
  %1 = index q
  %2 = le %0 %1
  %3 = index b
  %4 = load 0 %3 %0
  %5 = and %2 %4
  %6 = const 0.125
  %7 = score
  %8 = mul %7 %6
  %9 = const -inf
  %10 = where %5 %8 %9
  return %10""",
        )

    def test_soft_cap_and_alibi(self) -> None:
        b = ProgramBuilder()
        slopes = b.capture("float32", 1)
        capped = b.emit("mul", b.emit("tanh", b.emit("div", b.score(), b.const(30.0))), b.const(30.0))
        distance = b.convert(b.emit("sub", b.index("k"), b.index("q")), "float")
        program = b.finish(b.emit("add", capped, b.emit("mul", b.load(slopes, [b.index("h")]), distance)))
        self.check(
            program,
            """\
program(float32[1]; sizes=0)
  %0 = score
  %1 = const 30.0
  %2 = div %0 %1
  %3 = tanh %2
  %4 = mul %3 %1
  %5 = index k
  %6 = index q
  %7 = sub %5 %6
  %8 = to_float %7
  %9 = index h
  %10 = load 0 %9
  %11 = mul %10 %8
  %12 = add %4 %11
  return %12""",
        )

    def test_special_literals_and_sizes(self) -> None:
        b = ProgramBuilder()
        edge = b.emit("le", b.emit("add", b.index("k"), b.size(1)), b.emit("add", b.index("q"), b.size(0)))
        low = b.emit("max", b.emit("round", b.score(), value="bf16"), b.const(-0.0))
        program = b.finish(b.emit("where", edge, b.emit("min", low, b.const(0.1)), b.const(-3.4028234663852886e38)), b.const(math.nan))
        self.check(
            program,
            """\
program(; sizes=2)
  %0 = index k
  %1 = size 1
  %2 = add %0 %1
  %3 = index q
  %4 = size 0
  %5 = add %3 %4
  %6 = le %2 %5
  %7 = score
  %8 = round bf16 %7
  %9 = const -0.0
  %10 = max %8 %9
  %11 = const 0.1
  %12 = min %10 %11
  %13 = const -3.4028234663852886e+38
  %14 = where %6 %12 %13
  %15 = const nan
  return %14 %15""",
        )


# -- derivative ----------------------------------------------------------------------------------------------------------
SMOOTH = ["add", "sub", "mul", "min", "max", "where", "neg", "abs", "tanh", "sigmoid", "exp", "log", "sqrt", "div"]
SMOOTH += ["exp2", "expm1", "log1p", "erf", "sin", "cos"]


@st.composite
def float_programs(draw: Callable[..., object]) -> ScoreProgram:
    """Programs of floats whose values and derivatives stay moderate."""
    b = ProgramBuilder()
    numbers = [b.capture("float32", rank) for rank in (2, 0, 2)]
    index = {n: b.index(n) for n in "bhqk"}
    turned = b.emit("floordiv", index["k"], b.const(2))
    values = [b.score(), b.load(numbers[0], [index["h"], index["k"]]), b.load(numbers[1], []), b.load(numbers[2], [index["q"], index["k"]])]
    values += [b.load(numbers[2], [turned, index["q"]]), b.const(draw(st.sampled_from((0.3, -1.7, 2.0)))), b.convert(index["k"], "float")]  # type: ignore[arg-type]
    half = b.const(0.5)
    for _ in range(draw(st.integers(1, 9))):  # type: ignore[call-overload]
        x, y = (draw(st.one_of(st.sampled_from(values[-3:]), st.sampled_from(values))) for _ in range(2))
        op = draw(st.sampled_from(SMOOTH))
        positive = b.emit("add", b.emit("abs", y), half)
        if op in ("log", "log1p", "sqrt"):
            made = b.emit(op, positive)
        elif op == "div":
            made = b.emit(op, x, positive)
        elif op in ("exp", "exp2", "expm1"):
            made = b.emit(op, b.emit("tanh", x))
        elif op in ("neg", "abs", "tanh", "sigmoid", "erf", "sin", "cos"):
            made = b.emit(op, x)
        elif op == "where":
            made = b.emit(op, b.emit(draw(st.sampled_from(("lt", "ge"))), x, y), x, b.emit("neg", y))
        else:
            made = b.emit(op, x, y)
        values.append(made)
    return b.finish(values[-1])


@settings(max_examples=120, deadline=None)
@given(float_programs(), st.integers(0, 3))
def test_derivative_is_autograds(program: ScoreProgram, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    box = Coordinates((0, 2), (0, 2), (0, 4), (0, 4))
    score, *captures = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in ((2, 2, 4, 4), (2, 4), (), (4, 4)))
    grad = torch.randn(2, 2, 4, 4, generator=generator, dtype=torch.float64)
    (value,) = evaluate(program, box, score=score, captures=captures, device=CPU, dtype=torch.float64)
    full = value.expand(2, 2, 4, 4)
    expected: tuple[Tensor | None, ...] = (None,) * 4
    if full.requires_grad:
        expected = torch.autograd.grad(full, (score, *captures), grad, allow_unused=True)
    gradient = gradient_program(program, range(3))
    with torch.no_grad():
        results = evaluate(gradient.program, box, score=score, grad=grad, captures=captures, device=CPU, dtype=torch.float64)
        targets: list[Tensor | None] = [torch.zeros_like(c) for c in captures]
        scatter_loads(gradient, results, box, targets)
    torch.testing.assert_close(results[0].expand_as(full), full.detach())
    for ours, theirs in zip((results[1].expand_as(score), *targets), expected):
        assert ours is not None
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs, rtol=1e-9, atol=1e-9, msg=lambda m: f"{m}\n{program}")


def test_a_tie_splits_its_gradient_as_pytorch_does() -> None:
    b = ProgramBuilder()
    other = b.capture("float32", 0)
    program = b.finish(b.emit("max", b.score(), b.load(other, [])))
    derivative, sites = differentiate(program, [other])
    box = Coordinates((0, 1), (0, 1), (0, 1), (0, 1))
    one = torch.ones(1, 1, 1, 1)
    _, dscore, dother = evaluate(derivative, box, score=one, grad=one, captures=[torch.tensor(1.0)], device=CPU)
    assert (dscore.item(), dother.item(), [c for c, _ in sites]) == (0.5, 0.5, [other])


def test_only_wanted_captures_get_a_gradient() -> None:
    b = ProgramBuilder()
    first, second, flags = b.capture("float32", 0), b.capture("float32", 0), b.capture("int64", 0)
    scaled = b.emit("mul", b.score(), b.emit("mul", b.load(first, []), b.load(second, [])))
    program = b.finish(b.emit("add", scaled, b.convert(b.load(flags, []), "float")))
    assert [c for c, _ in differentiate(program)[1]] == []
    assert [c for c, _ in differentiate(program, [second, flags])[1]] == [second]


def dropped() -> ScoreProgram:
    b = ProgramBuilder()
    return b.finish(b.emit("mul", b.emit("tanh", b.score()), b.emit("where", b.keep(0.25), b.const(4 / 3), b.const(0.0))))


def test_a_drawn_mask_is_a_leaf() -> None:
    """Given to the evaluator like the score; it depends on the whole position, and is the same in the derivative."""
    program = dropped()
    assert program.drop_p == 0.25 and from_text(to_text(program)) == program
    assert program.depends_on(program.result) == {"score", "b", "h", "q", "k"}
    score, grad = (torch.randn(1, 2, 3, 4, dtype=torch.float64) for _ in range(2))
    keep = torch.rand(1, 2, 3, 4) < 0.5
    leaf = score.requires_grad_()
    (y,) = evaluate(program, BOX, score=leaf, keep=keep, device=CPU, dtype=torch.float64)
    derivative, _ = differentiate(program)
    assert derivative.drop_p == 0.25
    again, dscore = evaluate(derivative, BOX, score=score, grad=grad, keep=keep, device=CPU, dtype=torch.float64)
    torch.testing.assert_close(again, torch.tanh(score) * keep * 4 / 3)
    torch.testing.assert_close(dscore, *torch.autograd.grad(y, leaf, grad))


@pytest.mark.parametrize("p", ["0.0", "1.0", "2", "nan"])
def test_a_mask_that_keeps_or_drops_all_is_not_drawn(p: str) -> None:
    with pytest.raises(ProgramError, match="keep"):
        from_text(f"program(; sizes=0)\n%0 = keep {p}\n%1 = to_float %0\nreturn %1")


def test_a_program_draws_one_mask() -> None:
    b = ProgramBuilder()
    assert b.keep(0.25) == b.keep(0.25)
    with pytest.raises(ProgramError, match="one mask"):
        b.finish(b.emit("and", b.keep(0.25), b.keep(0.5)))


def test_rounding_passes_the_gradient_on() -> None:
    b = ProgramBuilder()
    program = b.finish(b.emit("round", b.score(), value="f16"))
    box = Coordinates((0, 1), (0, 1), (0, 1), (0, 2))
    grad = torch.tensor([[[[0.1, 0.2]]]])
    y, dscore = evaluate(differentiate(program)[0], box, score=torch.full((1, 1, 1, 2), 0.1), grad=grad, device=CPU)
    assert torch.equal(dscore, grad) and y[0, 0, 0, 0].item() == torch.tensor(0.1).half().item()


# -- plans ---------------------------------------------------------------------------------------------------------------
fills = st.sampled_from([-math.inf, -3.4028234663852886e38, -1e9, -1e4])
affine = st.builds(Affine, st.integers(-9, 9), st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2)), max_size=2).map(tuple))
terms = st.builds(MaskTerm, st.sampled_from(["upper", "lower", "key"]), st.integers(0, 20), st.none() | affine)
places = st.lists(st.integers(0, 9), max_size=3).map(tuple)
hidden = st.sampled_from(["replace", "add", "mixed"])
masks = st.builds(MaskFacts, fills, hidden, st.lists(terms, max_size=3).map(tuple), st.booleans(), fills, st.booleans(), places)
numbers = st.none() | st.floats(allow_nan=False)


def plain_words(longest: int, shortest: int = 0) -> st.SearchStrategy[str]:
    """What plans hold: no quotes, no backslashes."""
    return st.text("abc xyz019-_.:|", min_size=shortest, max_size=longest)


facts = st.builds(ProgramFacts, st.none() | masks, numbers, st.none() | st.integers(0, 9), numbers, st.booleans(), st.lists(plain_words(5)).map(tuple))
settings_of = st.dictionaries(plain_words(4, 1), st.integers() | st.booleans() | plain_words(4), max_size=3)
config = settings_of.map(lambda d: tuple(sorted(d.items())))
plans = st.builds(
    Plan,
    st.sampled_from(["tiled", "triton_fa2"]),
    exact_programs(),
    facts,
    st.none() | exact_programs(),
    config,
    st.booleans(),
    st.booleans(),
    st.sampled_from(["eager", "zero"]),
    plain_words(8),
)


@settings(max_examples=60, deadline=None)
@given(plans)
def test_plan_text_round_trip(plan: Plan) -> None:
    text = plan.to_text()
    back = Plan.from_text(text)
    assert back == plan
    assert back.to_text() == text
    assert [type(v) for _, v in back.config] == [type(v) for _, v in plan.config]


def test_plan_text_does_not_depend_on_the_order_of_its_config_or_its_reason() -> None:
    program = from_text("program(; sizes=0)\n%0 = score\nreturn %0")
    one = Plan("tiled", program, ProgramFacts(), config=(("a", 1), ("b", True)), reason="fast")
    other = Plan("tiled", program, ProgramFacts(), config=(("b", True), ("a", 1)))
    assert one.to_text() == other.to_text() and one.get("b") is True
