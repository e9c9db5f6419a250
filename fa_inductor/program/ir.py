"""The score program: what happens to one attention score between the two matrix products.

A program is a frozen list of SSA nodes over one element ``(b, h, q, k)`` of the score tensor::

    score(b, h, q, k) = sum_d Q[b, h, q, d] K[b, h, k, d]          (fp32)
    P = softmax_k(program(score, b, h, q, k, captured tensors, sizes))

It is the single value that drives recognition, kernel choice, code generation, the reference and every dump. Values have
one of three types: ``float`` (computed in fp32), ``int`` (64 bit) and ``bool``.

Operations
    leaves       ``score``, ``grad`` (only in gradient programs), ``const``, ``index`` (value: one of b h q k),
                 ``keep`` (value: p; a bool drawn for each (b, h, q, k), false with chance p, the same in forward and backward),
                 ``size`` (value: position in the size arguments), ``load`` (value: capture number; args: one int node per
                 dimension of the captured tensor)
    arithmetic   ``add sub mul div min max neg abs`` on floats; ``add sub mul floordiv mod min max neg abs`` on ints
                 ``min max`` may carry a value that says who gets the gradient of a tie: "first" (clamp: the clamped value),
                 "second" (relu: the bound); without one it is split evenly, as torch.minimum and torch.maximum do
    functions    ``exp exp2 expm1 log log1p tanh sigmoid sqrt erf sin cos`` on floats
    comparisons  ``lt le gt ge eq ne`` -> bool
    logic        ``and or not`` on bools, ``where`` (bool, x, y)
    conversions  ``to_float to_int to_bool`` (int conversion truncates), ``round`` (value: "f16" or "bf16"; rounds a float
                 to that format and back: only found on values that do not depend on ``score``)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Union

Type = Literal["float", "int", "bool"]
Value = Union[bool, int, float, str, None]

INDICES = ("b", "h", "q", "k")
LEAVES = frozenset({"score", "grad", "keep", "const", "index", "size", "load"})
FLOAT_UNARY = frozenset({"exp", "exp2", "expm1", "log", "log1p", "tanh", "sigmoid", "sqrt", "erf", "sin", "cos"})
NUMBER_UNARY = frozenset({"neg", "abs"})
NUMBER_BINARY = frozenset({"add", "sub", "mul", "min", "max"})
FLOAT_BINARY = frozenset({"div"})
INT_BINARY = frozenset({"floordiv", "mod"})
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
LOGIC = frozenset({"and", "or"})
CONVERSIONS: dict[str, Type] = {"to_float": "float", "to_int": "int", "to_bool": "bool"}
ROUNDINGS = ("f16", "bf16")
TIES = ("first", "second")


@dataclass(frozen=True)
class Node:
    """One SSA value. ``args`` are positions of earlier nodes; ``value`` is the literal that some leaves carry."""

    op: str
    type: Type
    args: tuple[int, ...] = ()
    value: Value = None

    def key(self) -> tuple[object, ...]:
        """Identity for hash-consing: 0.0 and -0.0, True and 1, and every NaN must stay apart or together as floats do."""
        return (self.op, self.type, self.args, type(self.value).__name__, repr(self.value))


@dataclass(frozen=True)
class Capture:
    """A tensor that a program reads: element dtype name (``float32``, ``bool``, ``int64`` …) and rank."""

    dtype: str
    rank: int


@dataclass(frozen=True, eq=False)
class ScoreProgram:
    """Nodes in topological order, the captured tensors they read, and the node(s) that are the result(s)."""

    nodes: tuple[Node, ...]
    results: tuple[int, ...]
    captures: tuple[Capture, ...] = ()
    n_sizes: int = 0

    @property
    def result(self) -> int:
        """The only result of a single-valued program."""
        (only,) = self.results
        return only

    def _identity(self) -> tuple[object, ...]:
        return (tuple(n.key() for n in self.nodes), self.results, self.captures, self.n_sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScoreProgram) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __str__(self) -> str:
        from .text import to_text

        return to_text(self)

    def reads(self) -> frozenset[int]:
        """Numbers of the captured tensors that some node loads; simplification may leave others unread."""
        return frozenset(int(n.value) for n in self.nodes if n.op == "load")  # type: ignore[arg-type]

    @property
    def drop_p(self) -> float | None:
        """The chance with which its ``keep`` is false; None where the program draws nothing."""
        return next((float(n.value) for n in self.nodes if n.op == "keep"), None)  # type: ignore[arg-type]

    def depends_on(self, node: int) -> frozenset[str]:
        """Which of ``score grad b h q k`` and ``load`` (any captured tensor) the value of ``node`` depends on."""
        return dependencies(self.nodes)[node]


def dependencies(nodes: tuple[Node, ...]) -> tuple[frozenset[str], ...]:
    """For each node the set of ``score grad b h q k load`` that reach it."""
    out: list[frozenset[str]] = []
    for node in nodes:
        own: frozenset[str] = frozenset()
        if node.op in ("score", "grad", "load"):
            own = frozenset({node.op})
        elif node.op == "index":
            own = frozenset({str(node.value)})
        elif node.op == "keep":
            own = frozenset(INDICES)
        out.append(own.union(*(out[a] for a in node.args)))
    return tuple(out)


class ProgramError(ValueError):
    """A score program that breaks the rules above; the message names the node and the rule."""


def verify(program: ScoreProgram) -> ScoreProgram:
    """Check operations, argument counts, types and references; return the program unchanged or raise ProgramError."""
    nodes = program.nodes
    for i, node in enumerate(nodes):
        if any(not 0 <= a < i for a in node.args):
            raise ProgramError(f"%{i} {node.op}: arguments {node.args} must be earlier nodes")
        expected = _result_type(node, tuple(nodes[a].type for a in node.args), program)
        if expected is None:
            raise ProgramError(f"%{i} {node.op}: wrong argument types {[nodes[a].type for a in node.args]} or value {node.value!r}")
        if expected != node.type:
            raise ProgramError(f"%{i} {node.op}: declared {node.type}, is {expected}")
    if len({node.value for node in nodes if node.op == "keep"}) > 1:
        raise ProgramError("a program draws one mask: its keeps must have the same chance")
    if not program.results or any(not 0 <= r < len(nodes) for r in program.results):
        raise ProgramError(f"results {program.results} must name nodes 0..{len(nodes) - 1}")
    return program


def _result_type(node: Node, args: tuple[Type, ...], program: ScoreProgram) -> Type | None:
    """The type that ``node`` must have, or None where its arguments or literal break the rules."""
    if node.op in LEAVES:
        return _leaf_type(node, args, program)
    if node.op in CONVERSIONS and len(args) == 1:
        return CONVERSIONS[node.op]
    if node.op == "round":
        return "float" if args == ("float",) and node.value in ROUNDINGS else None
    if node.op == "where":
        return args[1] if len(args) == 3 and args[0] == "bool" and args[1] == args[2] else None
    if node.op == "not":
        return "bool" if args == ("bool",) else None
    if node.op in ("min", "max") and node.value not in (None, *TIES):
        return None
    return operation_type(node.op, args)


def operation_type(op: str, args: tuple[Type, ...]) -> Type | None:
    """Result type of an arithmetic, comparison or logic operation, or None where the argument types do not fit."""
    if len(set(args)) != 1:
        return None
    kind, count = args[0], len(args)
    if op in FLOAT_UNARY:
        return "float" if count == 1 and kind == "float" else None
    if op in NUMBER_UNARY:
        return kind if count == 1 and kind != "bool" else None
    if count != 2:
        return None
    if op in NUMBER_BINARY:
        return kind if kind != "bool" else None
    if op in FLOAT_BINARY:
        return "float" if kind == "float" else None
    if op in INT_BINARY:
        return "int" if kind == "int" else None
    if op in COMPARISONS:
        return "bool"
    if op in LOGIC:
        return "bool" if kind == "bool" else None
    return None


def _leaf_type(node: Node, args: tuple[Type, ...], program: ScoreProgram) -> Type | None:
    value = node.value
    if node.op == "load":
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(program.captures):
            return None
        capture = program.captures[value]
        return capture_type(capture.dtype) if args == ("int",) * capture.rank else None
    if args:
        return None
    if node.op in ("score", "grad"):
        return "float" if value is None else None
    if node.op == "keep":
        return "bool" if isinstance(value, float) and 0 < value < 1 else None
    if node.op == "index":
        return "int" if value in INDICES else None
    if node.op == "size":
        return "int" if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < program.n_sizes else None
    return literal_type(value)


def literal_type(value: Value) -> Type | None:
    """Type of a Python literal: bool before int, since True is an int in Python."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int"
    return "float" if isinstance(value, float) else None


def capture_type(dtype: str) -> Type | None:
    """Program type of a captured tensor's element dtype (``float64`` is not readable inside a kernel)."""
    if dtype in ("float32", "float16", "bfloat16"):
        return "float"
    if dtype in ("int64", "int32", "int16", "int8", "uint8"):
        return "int"
    return "bool" if dtype == "bool" else None


def is_minus_infinity(value: Value) -> bool:
    """True for a float literal -inf."""
    return isinstance(value, float) and math.isinf(value) and value < 0
