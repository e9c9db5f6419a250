"""A mask's conditions on whole tiles, as Triton source: the rules of ``program/tile_map.py``, which says why they hold.

A number is a pair ``l, u`` of fp64 bounds, a condition a pair ``m, a`` (may hold, holds for all). Each is a vector over the key tiles of one
program of ``fa2_map``, of length 1 where it does not depend on the key. What is read at a query or key is reduced over each tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fa_inductor.program import ScoreProgram, dependencies
from fa_inductor.program.evaluate import load_axes
from fa_inductor.program.ir import Node
from fa_inductor.program.tile_map import EXACT, MARGIN

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
_CHUNK, _CHUNK_DENSE = 16, 4
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
            elif node.op in _COMPARISONS and self.program.nodes[node.args[0]].type != "bool":
                self._comparison(node, names, *(self.value(a) for a in node.args))
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
        return f"fa2_{node.op}({', '.join(name for pair in args for name in pair)})" if node.op in _ARITHMETIC else _unknown(node)

    def _comparison(self, node: Node, names: tuple[str, str], a: tuple[str, str], b: tuple[str, str]) -> None:
        may, every = (form.format(al=a[0], au=a[1], bl=b[0], bu=b[1]) for form in _COMPARISONS[node.op])
        nan = f"n{names[0][1:]}"  # what may be anything may be NaN, which is nowhere in an order
        self.lines += [f"{nan} = {_anything([a, b])}", f"{names[0]} = ({may}) | {nan}", f"{names[1]} = ({every}) & ~{nan}"]

    def _assign(self, names: tuple[str, str], expression: str) -> None:
        self.lines.append(f"{names[0]}, {names[1]} = {expression}")

    def _load(self, node: Node, names: tuple[str, str]) -> None:
        axes = load_axes(self.program, node)
        capture = int(node.value)  # type: ignore[arg-type]
        if axes is None or any(isinstance(a, int) and a < 0 for a in axes):
            self._assign(names, _unknown(node))
        elif is_dense(self.program, node):
            self._dense(_Read(capture, axes, "row"), node.type == "bool", names)
        elif node.type == "bool":
            (may, every), read, x = names, _Read(capture, axes, "q"), f"x{names[0][1:]}"
            self.lines += [f"{x} = ({read.text} != 0).to(tl.int8) + {_ZEROS}", f"{may} = {_over_tile('max', x)} > 0"]
            self.lines += [f"{every} = {_over_tile('min', f'tl.where({read.inside}, {x}, 1)' if read.inside else x)} > 0"]
        else:
            self._numbers(_Read(capture, axes, "q"), names)

    def _numbers(self, read: _Read, names: tuple[str, str]) -> None:
        x, kind = f"x{names[0][1:]}", self._kind(read)
        greatest, least = (f'tl.where({read.inside}, {e}, float("{sign}inf"))' if read.inside else e for e, sign in zip(_ends(x, kind), ("-", ""), strict=True))
        self.lines += [f"{x} = {read.text}.to({kind}) + {_ZEROS}"]
        self.lines += [f"{names[0]} = {_over_tile('min', least)}.to(tl.float64)", f"{names[1]} = {_over_tile('max', greatest)}.to(tl.float64)"]
        self._known(names, kind)

    def _kind(self, read: _Read) -> str:
        return "tl.float32" if self.program.captures[read.capture].dtype in ("float32", "float16", "bfloat16") else "tl.float64"

    def _known(self, names: tuple[str, str], kind: str) -> None:
        limit = 'float("inf")' if kind == "tl.float32" else repr(EXACT)
        self._assign(names, f"fa2_known({', '.join(names)}, tl.full([], {limit}, tl.float64))")

    def _dense(self, read: _Read, conditions: bool, names: tuple[str, str]) -> None:
        """One element for each score. Away from the edges, where keys are neighbours, each row of a chunk is one run without a mask, reduced as it lies."""
        quick = self._words(read, names) if conditions else self._runs(read, names)
        slow = self._slabs(read, conditions, names)
        self.lines += slow if read.axes[-1] != "k" else [*quick, "else:", *("    " + line for line in slow)]
        if not conditions:
            self._known(names, self._kind(read))

    def _slabs(self, read: _Read, conditions: bool, names: tuple[str, str]) -> list[str]:
        """Any strides, any edge: a few rows at a time, so that many programs are resident and much is in flight."""
        x, (low, high), kind = f"x{names[0][1:]}", names, "tl.int8" if conditions else self._kind(read)
        worst = ("0", "1") if conditions else ('float("-inf")', 'float("inf")')
        value = f"({read.text} != 0).to(tl.int8)" if conditions else f"{read.text}.to({kind})"
        greatest, least = _ends(x, kind)
        reduced = [_over_tile("max", f"{x}_max"), _over_tile("min", f"{x}_min")]
        return [
            f"{x}_max = tl.full([ROWS, {chunk(self.program)}, TILE_K], {worst[0]}, {kind})",
            f"{x}_min = tl.full([ROWS, {chunk(self.program)}, TILE_K], {worst[1]}, {kind})",
            "for r in tl.range(0, TILE_Q, ROWS):",
            "    row_at = (q0 + r + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]",
            "    row_in = row_at < Lq",
            f"    {x} = {value}",
            f"    {x}_max = tl.maximum({x}_max, {x if conditions else f'tl.where({read.inside}, {greatest}, {worst[0]})'})",
            f"    {x}_min = tl.minimum({x}_min, tl.where({read.inside}, {least}, {worst[1]}))",
            *(
                [f"{low} = {reduced[0]} > 0", f"{high} = {reduced[1]} > 0"]
                if conditions
                else [f"{low} = {reduced[1]}.to(tl.float64)", f"{high} = {reduced[0]}.to(tl.float64)"]
            ),
        ]

    def _words(self, read: _Read, names: tuple[str, str]) -> list[str]:
        """Four conditions to a word, where rows begin at words: a byte at a time would take longer than to read them. True is 1, and 0x01010101 four times."""
        (may, every), w, run, keys = names, f"w{names[0][1:]}", _Read(read.capture, read.axes, "run"), f"{chunk(self.program)} * TILE_K"
        steps = [f"({t if '_at' not in t else t.split(' * ')[1]}) % 4 == 0" for t in run.terms[:-1]]
        aligned = " & ".join(f"({x})" for x in (f"C{read.capture}.to(tl.int64) % 4 == 0", *steps, self._neighbours(run)))
        pointer = f"({run.first}).to(tl.pointer_type(tl.uint32), bitcast=True)"
        return [
            f"if {aligned}:",
            "    run_at = (q0 + tl.arange(0, TILE_Q)).to(tl.int64)[:, None]",
            f"    {w} = tl.load({pointer} + (pid % chunks * ({keys} // 4) + tl.arange(0, {keys} // 4))[None, :])",
            f"    {w}_max = {self._over_run('max', f'tl.max({w}, 0)', 'TILE_K // 4')}",
            f"    {w}_min = {self._over_run('min', f'tl.min({w}, 0)', 'TILE_K // 4')}",
            f"    {may} = {w}_max != 0",
            f"    {every} = ({w}_min == 0x01010101) & ({w}_max == 0x01010101)",
        ]

    def _runs(self, read: _Read, names: tuple[str, str]) -> list[str]:
        (low, high), x, kind = names, f"y{names[0][1:]}", self._kind(read)
        keys, run = f"{chunk(self.program)} * TILE_K", _Read(read.capture, read.axes, "run")
        greatest, least = _ends(x, kind)
        return [
            f"if {self._neighbours(run)}:",
            f'    {x}_max = tl.full([RUNS, {keys}], float("-inf"), {kind})',
            f'    {x}_min = tl.full([RUNS, {keys}], float("inf"), {kind})',
            "    for r in tl.range(0, TILE_Q, RUNS):",
            "        run_at = (q0 + r + tl.arange(0, RUNS)).to(tl.int64)[:, None]",
            f"        {x} = tl.load({run.first} + (pid % chunks * ({keys}) + tl.arange(0, {keys}))[None, :]).to({kind})",
            f"        {x}_max = tl.maximum({x}_max, {greatest})",
            f"        {x}_min = tl.minimum({x}_min, {least})",
            f"    {low} = {self._over_run('min', f'tl.min({x}_min, 0)', 'TILE_K')}.to(tl.float64)",
            f"    {high} = {self._over_run('max', f'tl.max({x}_max, 0)', 'TILE_K')}.to(tl.float64)",
        ]

    def _neighbours(self, run: _Read) -> str:
        return f"inner & (C{run.capture}_s{len(run.axes) - 1} == 1)"

    def _over_run(self, how: str, value: str, each: str) -> str:
        """(elements of a chunk) -> key tiles."""
        return f"tl.{how}(tl.reshape({value}, [{chunk(self.program)}, {each}]), 1)"


@dataclass(frozen=True)
class _Read:
    """A capture that is read at positions. ``row``, the name of the queries in the text: ``q`` along the last of three dimensions, ``row`` along the first,
    ``run`` along the first of two."""

    capture: int
    axes: tuple[str | int, ...]
    row: str

    @property
    def terms(self) -> list[str]:
        place = {"b": "b.to(tl.int64)", "h": "h.to(tl.int64)", "q": f"{self.row}_at", "k": "k_at"}
        return [f"{place[a] if isinstance(a, str) else f'tl.full([], {a}, tl.int64)'} * C{self.capture}_s{d}" for d, a in enumerate(self.axes)]

    @property
    def first(self) -> str:
        """Where the keys of each query begin, of a tensor whose last dimension they are."""
        return " + ".join([f"C{self.capture}", *self.terms[:-1]])

    @property
    def inside(self) -> str:
        return " & ".join({"q": f"{self.row}_in", "k": "k_in"}[a] for a in ("q", "k") if a in self.axes)

    @property
    def text(self) -> str:
        pointer = " + ".join([f"C{self.capture}", *self.terms])
        return f"tl.load({pointer}, mask={self.inside}, other=0)" if self.inside else f"tl.load({pointer})"


_ZEROS = "tl.zeros([1, 1, 1], tl.int8)"
"""Added to what is read, so that a scalar too is a tile."""


def _over_tile(how: str, value: str) -> str:
    """(queries, key tiles, keys) -> key tiles."""
    return f"tl.{how}(tl.{how}({value}, 0), 1)"


def _ends(x: str, kind: str) -> tuple[str, str]:
    """What counts as the greatest and as the least of numbers: NaN is both, since nothing is then known."""
    return (f'tl.where({x} != {x}, float("inf"), {x})', f'tl.where({x} != {x}, float("-inf"), {x})') if kind == "tl.float32" else (x, x)


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
