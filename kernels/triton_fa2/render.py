"""Score program -> Triton source on one tile of scores.

Every node becomes one Triton value whose shape follows from broadcasting: the query indices are [M, 1] (or [1, M] in the
transposed orientation of the dK/dV kernel), the key indices [1, N], so that whatever depends on only one of them stays a
vector and whatever depends on neither a scalar. Nodes that do not depend on the loop's index are emitted before the loop.

Integers are 64 bit in the program. Here they are 32 bit wherever interval arithmetic proves that nothing is lost, given that
lengths, indices and sizes stay below 2**30 in magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from fa_inductor.program import ScoreProgram
from fa_inductor.program.ir import COMPARISONS, Node

from .choices import PREFIX
from .fold import LOG2E, choice_of, depends

Interval = tuple[int, int]
_LENGTH = 1 << 30
_INT32: Interval = (-(1 << 31), (1 << 31) - 1)
_ANY: Interval = (-(1 << 63), (1 << 63) - 1)
_LOADED: dict[str, Interval] = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-(1 << 15), (1 << 15) - 1), "int32": _INT32, "int64": _ANY}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "and": "&", "or": "|"}
_FORMATS = {"f16": "tl.float16", "bf16": "tl.bfloat16"}


def literal(value: object) -> str:
    """Triton source of a constant."""
    if isinstance(value, float):
        return f'float("{value}")' if math.isinf(value) or math.isnan(value) else repr(value)
    return repr(value)


def _interval(node: Node, args: list[Interval], program: ScoreProgram) -> Interval:
    """Bounds of an integer node; Python's integers do not overflow."""
    if node.op == "const":
        return (int(node.value), int(node.value))  # type: ignore[arg-type]
    if node.op == "index":
        return (0, _LENGTH)
    if node.op == "size":
        return (-_LENGTH, _LENGTH)
    if node.op == "load":
        return _LOADED[program.captures[int(node.value)].dtype]  # type: ignore[arg-type]
    if node.op == "where":
        args = args[1:]
    if node.op == "add":
        return (args[0][0] + args[1][0], args[0][1] + args[1][1])
    if node.op == "sub":
        return (args[0][0] - args[1][1], args[0][1] - args[1][0])
    if node.op == "mul":
        corners = [x * y for x in args[0] for y in args[1]]
        return (min(corners), max(corners))
    if node.op == "neg":
        return (-args[0][1], -args[0][0])
    if node.op == "abs":
        return (0, max(abs(args[0][0]), abs(args[0][1])))
    if node.op in ("min", "max", "where"):
        return (min(a[0] for a in args), max(a[1] for a in args))
    if node.op == "mod":
        largest = max(abs(args[1][0]), abs(args[1][1]))
        return (-largest if args[1][0] < 0 else 0, largest)
    if node.op == "floordiv":
        largest = max(abs(args[0][0]), abs(args[0][1]))
        return (0, args[0][1]) if args[0][0] >= 0 and args[1][0] > 0 else (-largest - 1, largest)
    return _ANY


class Renderer:
    """Emits the values of one program once each; ``lines`` receives statements, ``hoisted`` those that precede the loop.

    Args:
        names: Triton expressions of the leaves ``score``, ``grad``, ``keep``, ``b``, ``h``, ``q``, ``k``; ``score`` and ``grad`` may be set
            later, before the nodes that need them are asked for.
        loop: which of these change inside the loop.
        prefix: of variable names, unique in the kernel.
        ragged: of an index that its name keeps below the length: the position itself, and the condition that it is inside. Vectors are read there, so
            that their addresses are constants apart.
    """

    def __init__(
        self, program: ScoreProgram, names: Mapping[str, str], loop: Iterable[str], prefix: str, ragged: Mapping[str, tuple[str, str]] | None = None
    ) -> None:
        self.ragged = dict(ragged or {})
        self.program, self.names, self.prefix = program, dict(names), prefix
        self.loop = frozenset(loop)
        self.lines: list[str] = []
        self.hoisted: list[str] = []
        self.depends = depends(program)
        self._placed: dict[int, str] = {}
        self._wide: dict[int, bool] = {}
        self._intervals: list[Interval] = []
        for node in program.nodes:
            self._intervals.append(_interval(node, [self._intervals[a] for a in node.args], program) if node.type == "int" else _ANY)

    def value(self, i: int) -> str:
        """The Triton expression (a variable or literal) of node ``i``."""
        if i not in self._placed:
            choice = self._choice(i)
            if choice is None:
                for a in self.program.nodes[i].args:
                    self.value(a)
            self._placed[i] = self._emit(i) if choice is None else self._assign(i, choice)
        return self._placed[i]

    def within(self, i: int, inside: tuple[str, str], otherwise: float) -> str:
        """A new variable: the value of float node ``i`` where the first position is less than the second, else a constant."""
        split = choice_of(self.program, i, otherwise)
        words, operands = [], []
        if split is not None and i not in self._placed and self._compares(split[0]):
            words, operands = self._condition(split[0])
            words += ["not"] if split[2] else []
            i = split[1]
        shown = self.value(i)
        name = f"{self.prefix}{i}_in"
        self.lines.append(f"{name} = {_chosen([*words, 'lt', *(['and'] if words else [])], [shown, literal(otherwise), *operands, *inside])}")
        return name

    def _emit(self, i: int) -> str:
        node = self.program.nodes[i]
        self._wide[i] = node.type == "int" and not _fits(self._intervals[i])
        if node.op == "const":
            return literal(node.value)
        if node.op in ("score", "grad"):
            return self.names[node.op]
        if node.op == "index":
            return self.names[str(node.value)]
        if node.op == "keep":
            return self._assign(i, self.names["keep"])
        if node.op == "size":
            return self._assign(i, f"tl.full([], 0, tl.int32) + Z{node.value}")  # a tensor even where the size arrives as a constant
        return self._assign(i, self._load(node) if node.op == "load" else self._expression(i, node))

    def _assign(self, i: int, expression: str, suffix: str = "") -> str:
        name = f"{self.prefix}{i}{suffix}"
        invariant = not self.depends[i] & (self.loop | {"score", "grad"})
        line, place = f"{name} = {expression}", self.hoisted if invariant else self.lines
        if line not in place:  # what a choice compares may be named before
            place.append(line)
        return name

    # -- choices -------------------------------------------------------------------------------------------------------
    def _choice(self, i: int) -> str | None:
        """A choice between floats by a condition that differs within a tile, as a function of ``choices``."""
        node = self.program.nodes[i]
        if node.op != "where" or node.type != "float" or not self.depends[node.args[0]] & {"q", "k"} or not self._compares(node.args[0]):
            return None
        words, operands = self._condition(node.args[0])
        return _chosen(words, [self.value(node.args[1]), self.value(node.args[2]), *operands])

    def _compares(self, i: int) -> bool:
        """The condition is made of comparisons of integers, and of captured conditions."""
        node = self.program.nodes[i]
        if node.op in ("and", "or", "not"):
            return all(self._compares(a) for a in node.args)
        return (node.op == "load" and node.type == "bool") or (node.op in COMPARISONS and all(self.program.nodes[a].type == "int" for a in node.args))

    def _condition(self, i: int) -> tuple[list[str], list[str]]:
        """The words of ``choices`` for a condition, and its operands."""
        node = self.program.nodes[i]
        if node.op in ("and", "or", "not"):
            parts = [self._condition(a) for a in node.args]
            return [w for words, _ in parts for w in words] + [node.op], [o for _, operands in parts for o in operands]
        if node.op == "load":
            for a in node.args:
                self.value(a)
            return ["on"], [self._assign(i, self._load(node, as_number=True), "n")]
        sides, narrow = self._sides(node)
        return [node.op if narrow else f"{node.op}64"], sides

    def _sides(self, node: Node) -> tuple[list[str], bool]:
        """The two numbers of a comparison, and whether 32 bits hold them.

        Of x - y <= c, with c the same for all: x and y + c, which is computed once.
        """
        left, right = node.args
        nodes, bounds = self.program.nodes, self._intervals
        if nodes[left].op == "sub" and not self.depends[right] & {"q", "k"}:
            x, y = nodes[left].args
            moved = (bounds[y][0] + bounds[right][0], bounds[y][1] + bounds[right][1])
            if all(map(_fits, (moved, *(bounds[n] for n in (left, right, x, y))))):
                for n in (x, y, right):
                    self.value(n)
                by_nothing = nodes[right].op == "const" and nodes[right].value == 0
                return [self._placed[x], self._placed[y] if by_nothing else self._assign(y, f"{self._tensor(y)} + {self._placed[right]}", f"_{right}")], True
        for a in node.args:
            self.value(a)
        return [self._placed[a] for a in node.args], _fits(bounds[left]) and _fits(bounds[right])

    # -- loads ---------------------------------------------------------------------------------------------------------
    def _load(self, node: Node, as_number: bool = False) -> str:
        capture = int(node.value)  # type: ignore[arg-type]
        dtype = self.program.captures[capture].dtype
        order = sorted(range(len(node.args)), key=lambda d: (("k" in self.depends[node.args[d]]), "q" in self.depends[node.args[d]]))
        pointer, inside = f"C{capture}", []
        ragged = self.ragged if sum(bool(self.depends[a] & {"q", "k"}) for a in node.args) == 1 else {}
        for d in order:  # scalars first, then rows, then columns: one addition per element is left
            index = self.program.nodes[node.args[d]]
            position, condition = ragged.get(str(index.value), ("", "")) if index.op == "index" else ("", "")
            inside += [condition] if condition else []
            pointer += f" + {f'({position}).to(tl.int64)' if position else self.address(node.args[d], f'C{capture}_n{d}')} * C{capture}_s{d}"
        mask = f", mask={' & '.join(inside)}, other=0" if inside else ""
        if as_number:
            return f"tl.load(({pointer}).to(tl.pointer_type(tl.int8), bitcast=True){mask}).to(tl.int32)"
        loaded = f"tl.load({pointer}{mask})"
        if dtype in ("float16", "bfloat16"):
            return f"{loaded}.to(tl.float32)"
        return f"{loaded}.to(tl.int32)" if dtype in ("int8", "uint8", "int16") else f"({loaded} != 0)" if dtype == "bool" else loaded

    def address(self, i: int, length: str) -> str:
        """Node ``i``, an index along a dimension of ``length`` entries, counted from the start."""
        low, _ = self._intervals[i]
        index = self._placed[i]
        if self.program.nodes[i].op == "const":
            value = int(self.program.nodes[i].value)  # type: ignore[arg-type]
            return str(value) if value >= 0 else f"({length} + {value})"
        if low < 0:
            index = f"tl.where({index} < 0, {index} + {length}, {index})"
        return f"({index}).to(tl.int64)"

    # -- operations ----------------------------------------------------------------------------------------------------
    def _tensor(self, i: int) -> str:
        """The argument as a tensor, for functions that do not take Python numbers."""
        node = self.program.nodes[i]
        kind = {"float": "tl.float32", "int": "tl.int64", "bool": "tl.int1"}[node.type]
        return f"tl.full([1, 1], {self._placed[i]}, {kind})" if node.op == "const" else self._placed[i]

    def _expression(self, i: int, node: Node) -> str:
        nodes, args = self.program.nodes, [self._placed[a] for a in node.args]
        if node.args and all(nodes[a].op == "const" for a in node.args):
            args[0] = self._tensor(node.args[0])
        if node.type == "int" and self._wide[i] and node.op in ("add", "sub", "mul", "neg", "abs"):
            args = [a if self._wide[n] or nodes[n].op == "const" else f"{self._tensor(n)}.to(tl.int64)" for a, n in zip(args, node.args, strict=True)]
        if node.op == "div" and nodes[node.args[1]].op == "const" and nodes[node.args[1]].value:
            inverse = 1.0 / float(nodes[node.args[1]].value)  # type: ignore[arg-type]
            if math.isfinite(inverse) and abs(inverse) > 1e-30:
                return f"{args[0]} * {literal(inverse)}"
        if node.op in _INFIX:
            return f"{args[0]} {_INFIX[node.op]} {args[1]}"
        if node.op in ("floordiv", "mod"):
            return self._integer_division(node, args)
        return _FUNCTIONS[node.op](self, node, args)

    def _integer_division(self, node: Node, args: list[str]) -> str:
        x, y = args
        (low, _), (divisor_low, divisor_high) = (self._intervals[a] for a in node.args)
        if divisor_low == divisor_high and divisor_low > 0 and divisor_low & (divisor_low - 1) == 0:
            return f"{x} >> {divisor_low.bit_length() - 1}" if node.op == "floordiv" else f"{x} & {divisor_low - 1}"
        if low >= 0 and divisor_low > 0:
            return f"{x} // {y}" if node.op == "floordiv" else f"{x} % {y}"
        # Triton truncates; PyTorch rounds down
        rest = f"(({x} % {y} != 0) & (({x} < 0) != ({y} < 0)))"
        return f"{x} // {y} - {rest}.to(tl.int32)" if node.op == "floordiv" else f"{x} % {y} + {rest}.to(tl.int32) * {y}"


def _fits(interval: Interval) -> bool:
    return _INT32[0] <= interval[0] and interval[1] <= _INT32[1]


def _chosen(words: list[str], arguments: list[str]) -> str:
    return f"{PREFIX}{'_'.join(words)}({', '.join(arguments)})"


def _minimum(function: str) -> Callable[[Renderer, Node, list[str]], str]:
    def render(r: Renderer, node: Node, args: list[str]) -> str:
        nan = ", propagate_nan=tl.PropagateNan.ALL" if node.type == "float" else ""
        return f"tl.{function}({args[0]}, {args[1]}{nan})"

    return render


def _call(function: str) -> Callable[[Renderer, Node, list[str]], str]:
    return lambda r, node, args: f"{function}({r._tensor(node.args[0])})"


def _convert(kind: str) -> Callable[[Renderer, Node, list[str]], str]:
    return lambda r, node, args: f"{r._tensor(node.args[0])}.to({kind})"


def _tanh(r: Renderer, node: Node, args: list[str]) -> str:
    return f"fa2_tanh({r._tensor(node.args[0])})"


def _to_int(r: Renderer, node: Node, args: list[str]) -> str:
    wide = r.program.nodes[node.args[0]].type == "float"
    return f"{r._tensor(node.args[0])}.to({'tl.int64' if wide else 'tl.int32'})"


_FUNCTIONS: dict[str, Callable[[Renderer, Node, list[str]], str]] = {
    "min": _minimum("minimum"),
    "max": _minimum("maximum"),
    "neg": lambda r, node, args: f"-{args[0]}",
    "abs": _call("tl.abs"),
    "exp": lambda r, node, args: f"tl.exp2({r._tensor(node.args[0])} * {LOG2E!r})",
    "exp2": _call("tl.exp2"),
    "expm1": _call("fa2_expm1"),
    "log": _call("tl.log"),
    "log1p": _call("fa2_log1p"),
    "erf": _call("tl.erf"),
    "sin": _call("tl.sin"),
    "cos": _call("tl.cos"),
    "sqrt": _call("tl.sqrt"),
    "sigmoid": lambda r, node, args: f"1.0 / (1.0 + tl.exp2({r._tensor(node.args[0])} * {-LOG2E!r}))",
    "tanh": _tanh,
    "not": lambda r, node, args: f"({r._tensor(node.args[0])} == 0)",
    "where": lambda r, node, args: f"tl.where({args[0]}, {args[1]}, {args[2]})",
    "to_float": _convert("tl.float32"),
    "to_int": _to_int,
    "to_bool": lambda r, node, args: f"({r._tensor(node.args[0])} != 0)",
    "round": lambda r, node, args: f"{r._tensor(node.args[0])}.to({_FORMATS[str(node.value)]}).to(tl.float32)",
}
