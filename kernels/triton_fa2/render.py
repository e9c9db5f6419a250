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
from fa_inductor.program.ir import Node

from .fold import LOG2E, depends

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
    """

    def __init__(self, program: ScoreProgram, names: Mapping[str, str], loop: Iterable[str], prefix: str) -> None:
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
            for a in self.program.nodes[i].args:
                self.value(a)
            self._placed[i] = self._emit(i)
        return self._placed[i]

    def _emit(self, i: int) -> str:
        node = self.program.nodes[i]
        self._wide[i] = node.type == "int" and (self._intervals[i][0] < _INT32[0] or self._intervals[i][1] > _INT32[1])
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

    def _assign(self, i: int, expression: str) -> str:
        name = f"{self.prefix}{i}"
        invariant = not self.depends[i] & (self.loop | {"score", "grad"})
        (self.hoisted if invariant else self.lines).append(f"{name} = {expression}")
        return name

    # -- loads ---------------------------------------------------------------------------------------------------------
    def _load(self, node: Node) -> str:
        capture = int(node.value)  # type: ignore[arg-type]
        dtype = self.program.captures[capture].dtype
        order = sorted(range(len(node.args)), key=lambda d: (("k" in self.depends[node.args[d]]), "q" in self.depends[node.args[d]]))
        pointer = f"C{capture}"
        for d in order:  # scalars first, then rows, then columns: one addition per element is left
            pointer += f" + {self.address(node.args[d], f'C{capture}_n{d}')} * C{capture}_s{d}"
        loaded = f"tl.load({pointer})"
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
