"""A mask's conditions on whole tiles, as Triton source: the rules of ``program/tile_map.py``, which says why they hold.

A number is a pair ``l, u`` of fp64 bounds, a condition a pair ``m, a`` (may hold, holds for all). Each is a vector over the key tiles of one
program of ``fa2_map``, of length 1 where it does not depend on the key. What is read at a query or key is reduced over each tile.
"""

from __future__ import annotations

import math

from fa_inductor.program import ScoreProgram, dependencies
from fa_inductor.program.evaluate import load_axes
from fa_inductor.program.ir import Node
from fa_inductor.program.tile_map import EXACT, MARGIN

RULES = f"""
@triton.jit
def fa2_known(low, high, limit):
    # bounds that are no numbers, or beyond what is exact, are not known
    none = tl.full([], float("inf"), tl.float64)
    low = tl.where((low != low) | (low < -limit) | (low > limit), -none, low)
    high = tl.where((high != high) | (high > limit) | (high < -limit), none, high)
    return low, high


@triton.jit
def fa2_anything(low, high):
    return (low == float("-inf")) & (high == float("inf"))


@triton.jit
def fa2_whole_number(low, high, anything):
    none = tl.full([], float("inf"), tl.float64)
    return fa2_known(tl.where(anything, -none, low), tl.where(anything, none, high), tl.full([], {EXACT!r}, tl.float64))


@triton.jit
def fa2_rounded(low, high, anything, MARGIN: tl.constexpr):
    none = tl.full([], float("inf"), tl.float64)
    low = tl.where(anything, -none, low)
    high = tl.where(anything, none, high)
    if MARGIN > 0:
        low = low - tl.abs(low) * MARGIN
        high = high + tl.abs(high) * MARGIN
    return fa2_known(low.to(tl.float32).to(tl.float64), high.to(tl.float32).to(tl.float64), none)


@triton.jit
def fa2_add(al, au, bl, bu):
    return al + bl, au + bu


@triton.jit
def fa2_sub(al, au, bl, bu):
    return al - bu, au - bl


@triton.jit
def fa2_neg(al, au):
    return -au, -al


@triton.jit
def fa2_min(al, au, bl, bu):
    return tl.minimum(al, bl), tl.minimum(au, bu)


@triton.jit
def fa2_max(al, au, bl, bu):
    return tl.maximum(al, bl), tl.maximum(au, bu)


@triton.jit
def fa2_abs(al, au):
    low = tl.minimum(tl.abs(al), tl.abs(au))
    return tl.where((al <= 0) & (au >= 0), low * 0, low), tl.maximum(tl.abs(al), tl.abs(au))


@triton.jit
def fa2_ends(w, x, y, z, known):
    # a function that is monotone in each argument has its extremes at the ends; 0 times infinity is not among them
    none = tl.full([], float("inf"), tl.float64)
    low = tl.minimum(tl.minimum(w, x), tl.minimum(y, z))
    high = tl.maximum(tl.maximum(w, x), tl.maximum(y, z))
    return tl.where(known, low, -none), tl.where(known, high, none)


@triton.jit
def fa2_finite(al, au, bl, bu):
    none = tl.full([], float("inf"), tl.float64)
    return (tl.abs(al) < none) & (tl.abs(au) < none) & (tl.abs(bl) < none) & (tl.abs(bu) < none)


@triton.jit
def fa2_mul(al, au, bl, bu):
    return fa2_ends(al * bl, al * bu, au * bl, au * bu, fa2_finite(al, au, bl, bu))


@triton.jit
def fa2_div(al, au, bl, bu):
    return fa2_ends(al / bl, al / bu, au / bl, au / bu, fa2_finite(al, au, bl, bu) & (bl > 0))


@triton.jit
def fa2_floordiv(al, au, bl, bu):
    low, high = fa2_div(al, au, bl, bu)
    return tl.floor(low), tl.floor(high)


@triton.jit
def fa2_mod(al, au, bl, bu):
    # of one positive number: within one period the rest grows as the number does
    none = tl.full([], float("inf"), tl.float64)
    one = (bl > 0) & (bl == bu)
    first = tl.floor(al / bl)
    last = tl.floor(au / bl)
    low = tl.where(first == last, al - first * bl, 0.0)
    high = tl.where(first == last, au - last * bl, bl - 1)
    return tl.where(one, low, -none), tl.where(one, high, none)


@triton.jit
def fa2_where(m, a, xl, xu, yl, yu):
    low = tl.where(a, xl, tl.where(m, tl.minimum(xl, yl), yl))
    high = tl.where(a, xu, tl.where(m, tl.maximum(xu, yu), yu))
    return low, high
"""

_ARITHMETIC = frozenset({"add", "sub", "neg", "min", "max", "mul", "div", "floordiv", "mod", "abs"})
_COMPARISONS = {
    "lt": ("{al} < {bu}", "{au} < {bl}"),
    "le": ("{al} <= {bu}", "{au} <= {bl}"),
    "gt": ("{bl} < {au}", "{bu} < {al}"),
    "ge": ("{bl} <= {au}", "{bu} <= {al}"),
    "eq": ("({al} <= {bu}) & ({bl} <= {au})", "({al} == {au}) & ({bl} == {bu}) & ({al} == {bl})"),
    "ne": ("~(({al} == {au}) & ({bl} == {bu}) & ({al} == {bl}))", "~(({al} <= {bu}) & ({bl} <= {au}))"),
}
_LOGIC = {
    "and": ("{am} & {bm}", "{aa} & {ba}"),
    "or": ("{am} | {bm}", "{aa} | {ba}"),
    "not": ("~{aa}", "~{am}"),
    "eq": ("({am} & {bm}) | (~{aa} & ~{ba})", "({aa} & {ba}) | (~{am} & ~{bm})"),
    "ne": ("({am} & ~{ba}) | (~{aa} & {bm})", "({aa} & ~{bm}) | (~{am} & {ba})"),
    "where": ("({am} & {bm}) | (~{aa} & {cm})", "(~{am} | {ba}) & ({aa} | {ca})"),
}
_CHUNK, _CHUNK_DENSE = 64, 4
"""Key tiles of one program: what is read at both q and k is read once, by many programs with much in flight."""


def is_dense(program: ScoreProgram, node: Node) -> bool:
    """A tensor that is read at q and at k: one number for each score."""
    axes = load_axes(program, node)
    return axes is not None and {"q", "k"} <= set(axes)


def letters(program: ScoreProgram) -> str:
    """Which of b and h the conditions depend on: there are maps of their own for these."""
    found = dependencies(program.nodes)
    return "".join(a for a in "bh" if any(a in found[r] for r in program.results))


def chunk(program: ScoreProgram) -> int:
    """Key tiles that one program of ``fa2_map`` evaluates."""
    return _CHUNK_DENSE if any(n.op == "load" and is_dense(program, n) for n in program.nodes) else _CHUNK


class IntervalRenderer:
    """Emits the pair of each node once; ``lines`` receives the statements."""

    def __init__(self, program: ScoreProgram) -> None:
        self.program = program
        self.lines: list[str] = []
        self._placed: dict[int, tuple[str, str]] = {}

    def value(self, i: int) -> tuple[str, str]:
        """(low, high) of a number, (may, all) of a condition: names of variables."""
        if i not in self._placed:
            node = self.program.nodes[i]
            names = (f"m{i}", f"a{i}") if node.type == "bool" else (f"l{i}", f"u{i}")
            if node.op == "load":
                self._load(node, names)
            else:
                args = [self.value(a) for a in node.args]
                self._assign(names, self._expression(node, args))
                if node.op in _ARITHMETIC and node.type != "bool":
                    self._assign(names, _kept(node, names, args))
            self._placed[i] = names
        return self._placed[i]

    def _expression(self, node: Node, args: list[tuple[str, str]]) -> str:
        if node.op == "index":
            return f"{node.value}_low, {node.value}_high"
        if node.op == "const" and node.type == "bool":
            return ", ".join([f"tl.full([1], {int(bool(node.value))}, tl.int1)"] * 2)
        if node.op == "const" and not math.isnan(float(node.value)):  # type: ignore[arg-type]
            return ", ".join([f"tl.full([1], {_literal(float(node.value))}, tl.float64)"] * 2)  # type: ignore[arg-type]
        if node.op == "size":
            return ", ".join([f"(tl.full([1], 0, tl.int64) + Z{node.value}).to(tl.float64)"] * 2)
        kinds = [self.program.nodes[a].type for a in node.args]
        if node.type == "bool" and set(kinds) == {"bool"} and node.op in _LOGIC:
            named = {f"{letter}{part}": name for letter, pair in zip("abc", args) for part, name in zip("ma", pair, strict=True)}
            return ", ".join(form.format(**named) for form in _LOGIC[node.op])
        if node.op == "where" and node.type != "bool":
            return f"fa2_where({', '.join(name for pair in args for name in pair)})"
        if node.op in ("to_float", "to_int", "to_bool"):
            return _converted(node, args[0], kinds[0])
        if "bool" in kinds:
            return _unknown(node)
        if node.op in _COMPARISONS:
            return _comparison(node.op, *args)
        return f"fa2_{node.op}({', '.join(name for pair in args for name in pair)})" if node.op in _ARITHMETIC else _unknown(node)

    def _assign(self, names: tuple[str, str], expression: str) -> None:
        self.lines.append(f"{names[0]}, {names[1]} = {expression}")

    def _load(self, node: Node, names: tuple[str, str]) -> None:
        axes = load_axes(self.program, node)
        capture = int(node.value)  # type: ignore[arg-type]
        if axes is None or any(isinstance(a, int) and a < 0 for a in axes):
            self._assign(names, _unknown(node))
            return
        place = {"b": "b.to(tl.int64)", "h": "h.to(tl.int64)", "q": "q_at", "k": "k_at"}
        terms = [f"{place[a] if isinstance(a, str) else f'tl.full([], {a}, tl.int64)'} * C{capture}_s{d}" for d, a in enumerate(axes)]
        inside = " & ".join(f"{a}_in" for a in ("q", "k") if a in axes)
        if node.type == "bool" and is_dense(self.program, node) and axes[-1] == "k":
            self._packed(capture, terms, names)
        elif node.type == "bool":
            self._conditions(_read(capture, terms, inside), inside, names)
        else:
            self._numbers(_read(capture, terms, inside), inside, names, self.program.captures[capture].dtype)

    def _conditions(self, read: str, inside: str, names: tuple[str, str]) -> None:
        (may, every), x = names, f"x{names[0][1:]}"
        self.lines += [f"{x} = ({read} != 0).to(tl.int8) + {_ZEROS}", f"{may} = {_over_tile('max', x)} > 0"]
        self.lines += [f"{every} = {_over_tile('min', f'tl.where({inside}, {x}, 1)' if inside else x)} > 0"]

    def _packed(self, capture: int, terms: list[str], names: tuple[str, str]) -> None:
        """Four conditions to a word, away from the edges and where rows begin at words: a byte at a time would take longer than to read them."""
        (may, every), w = names, f"w{names[0][1:]}"
        row = " + ".join([f"C{capture}", *terms[:-1]])
        steps = [f"({t if '_at' not in t else t.split(' * ')[1]}) % 4 == 0" for t in terms[:-1]]
        aligned = " & ".join(f"({x})" for x in (f"C{capture}.to(tl.int64) % 4 == 0", f"C{capture}_s{len(terms) - 1} == 1", *steps, "inner"))
        rest = IntervalRenderer(self.program)
        rest._conditions(_read(capture, terms, "q_in & k_in"), "q_in & k_in", names)
        self.lines += [
            f"if {aligned}:",
            f"    {w} = tl.load(({row}).to(tl.pointer_type(tl.int32), bitcast=True) + word_at)",
            f"    {may} = {_over_tile('max', f'({w} != 0).to(tl.int32)')} > 0",
            f"    {every} = {_over_tile('max', f'({w} != 0x01010101).to(tl.int32)')} == 0",
            "else:",
            *("    " + line for line in rest.lines),
        ]

    def _numbers(self, read: str, inside: str, names: tuple[str, str], dtype: str) -> None:
        (low, high), x = names, f"x{names[0][1:]}"
        kind = "tl.float32" if dtype in ("float32", "float16", "bfloat16") else "tl.float64"
        self.lines += [f"{x} = {read}.to({kind}) + {_ZEROS}"]
        ends = [f'tl.where({inside}, {x}, float("{sign}inf"))' if inside else x for sign in ("", "-")]
        self.lines += [f"{low} = {_over_tile('min', ends[0])}.to(tl.float64)", f"{high} = {_over_tile('max', ends[1])}.to(tl.float64)"]
        if kind == "tl.float32":
            self.lines += [
                f"n{x} = {_over_tile('max', f'({x} != {x}).to(tl.int32)')} > 0",
                f'{low} = tl.where(n{x}, float("-inf"), {low})',
                f'{high} = tl.where(n{x}, float("inf"), {high})',
            ]
        limit = 'float("inf")' if kind == "tl.float32" else repr(EXACT)
        self.lines.append(f"{low}, {high} = fa2_known({low}, {high}, tl.full([], {limit}, tl.float64))")


_ZEROS = "tl.zeros([1, 1, 1], tl.int8)"
"""Added to what is read, so that a scalar too is a tile."""


def _read(capture: int, terms: list[str], inside: str) -> str:
    pointer = " + ".join([f"C{capture}", *terms])
    return f"tl.load({pointer}, mask={inside}, other=0)" if inside else f"tl.load({pointer})"


def _over_tile(how: str, value: str) -> str:
    """(queries, key tiles, keys) -> key tiles."""
    return f"tl.{how}(tl.{how}({value}, 0), 1)"


def _comparison(op: str, a: tuple[str, str], b: tuple[str, str]) -> str:
    may, every = (form.format(al=a[0], au=a[1], bl=b[0], bu=b[1]) for form in _COMPARISONS[op])
    anything = _anything([a, b])  # NaN is nowhere in an order
    return f"({may}) | {anything}, ({every}) & ~({anything})"


def _anything(args: list[tuple[str, str]]) -> str:
    return "(" + " | ".join(f"fa2_anything({low}, {high})" for low, high in args) + ")"


def _kept(node: Node, names: tuple[str, str], args: list[tuple[str, str]]) -> str:
    """The bounds of a number that was computed, as far as they are certain."""
    if node.type == "int":
        return f"fa2_whole_number({', '.join(names)}, {_anything(args)})"
    return f"fa2_rounded({', '.join(names)}, {_anything(args)}, {MARGIN if node.op in ('mul', 'div') else 0.0!r})"


def _converted(node: Node, x: tuple[str, str], kind: str) -> str:
    low, high = x
    if kind == "bool":  # (may, all) as numbers: the least is 1 only where it holds for all
        return f"{low}, {high}" if node.op == "to_bool" else f"{high}.to(tl.float64), {low}.to(tl.float64)"
    if node.op == "to_bool":
        return f"~(({low} == 0) & ({high} == 0)), ~(({low} <= 0) & ({high} >= 0))"
    if node.op == "to_int":  # towards zero
        limit = f"tl.full([], {EXACT!r}, tl.float64)"
        return f"fa2_known({', '.join(f'tl.where({e} < 0, -tl.floor(-{e}), tl.floor({e}))' for e in x)}, {limit})"
    return f"{low}.to(tl.float32).to(tl.float64), {high}.to(tl.float32).to(tl.float64)"


def _unknown(node: Node) -> str:
    if node.type == "bool":
        return "tl.full([1], 1, tl.int1), tl.full([1], 0, tl.int1)"
    return 'tl.full([1], float("-inf"), tl.float64), tl.full([1], float("inf"), tl.float64)'


def _literal(value: float) -> str:
    return f'float("{value}")' if math.isinf(value) else repr(value)
