"""Building score programs: hash-consing, constant folding and the few simplifications that keep programs canonical.

Only simplifications that hold for every finite and non-finite value are made: ``x + 0`` and ``x * 1`` go, ``x * 0`` stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from .ir import CONVERSIONS, LEAVES, Capture, Node, ProgramError, ScoreProgram, Type, Value, capture_type, dependencies, literal_type, operation_type, verify

_SIGN: dict[str, Callable[..., bool | None]] = {
    "ge": lambda c: True if c <= 0 else None,
    "gt": lambda c: True if c < 0 else None,
    "lt": lambda c: False if c <= 0 else None,
    "le": lambda c: False if c < 0 else None,
}
"""Comparisons of a non-negative index with the literal c that are known whatever the index."""
_REFLEXIVE = {"eq": True, "le": True, "ge": True, "ne": False, "lt": False, "gt": False}
_OVERFLOW = (2 - 2**-24) * 2.0**127
"""Magnitudes from here on round to infinity in fp32."""
_OPPOSITE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
_WITHIN = {"lt": "and", "le": "and", "gt": "or", "ge": "or"}
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_COMMUTATIVE = frozenset({"add", "mul", "min", "max", "and", "or", "eq", "ne"})


class ProgramBuilder:
    """Appends nodes and returns their positions; equal nodes get the same position."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.captures: list[Capture] = []
        self.n_sizes = 0
        self._known: dict[tuple[object, ...], int] = {}

    @classmethod
    def like(cls, program: ScoreProgram) -> ProgramBuilder:
        """An empty builder with the captures and sizes of ``program``."""
        builder = cls()
        builder.captures, builder.n_sizes = list(program.captures), program.n_sizes
        return builder

    # -- leaves --------------------------------------------------------------------------------------------------------
    def const(self, value: bool | int | float) -> int:
        kind = literal_type(value)
        if kind is None:
            raise ProgramError(f"constant {value!r} is not a bool, int or float")
        if kind == "float" and math.isfinite(value) and abs(value) >= _OVERFLOW:
            value = math.copysign(math.inf, value)  # as in fp32
        return self._add(Node("const", kind, (), value))

    def score(self) -> int:
        return self._add(Node("score", "float"))

    def grad(self) -> int:
        return self._add(Node("grad", "float"))

    def keep(self, p: float) -> int:
        return self._add(Node("keep", "bool", (), p))

    def index(self, name: str) -> int:
        return self._add(Node("index", "int", (), name))

    def size(self, position: int) -> int:
        self.n_sizes = max(self.n_sizes, position + 1)
        return self._add(Node("size", "int", (), position))

    def capture(self, dtype: str, rank: int) -> int:
        """Declare a captured tensor; returns its number (captures are never merged)."""
        if capture_type(dtype) is None:
            raise ProgramError(f"a tensor of dtype {dtype} cannot be read inside a kernel")
        self.captures.append(Capture(dtype, rank))
        return len(self.captures) - 1

    def load(self, capture: int, indices: Sequence[int]) -> int:
        kind = capture_type(self.captures[capture].dtype)
        assert kind is not None
        return self._add(Node("load", kind, tuple(indices), capture))

    # -- operations ----------------------------------------------------------------------------------------------------
    def emit(self, op: str, *args: int, value: Value = None) -> int:
        """Append ``op``; folds constants. Types of ``args`` must already agree (see ``convert``)."""
        nodes = [self.nodes[a] for a in args]
        kind = self._type(op, tuple(n.type for n in nodes))
        folded = _fold(op, nodes)
        if folded is not None:
            return self.const(folded)
        simpler = self._simplify(op, args)
        if simpler is not None:
            return simpler
        if op in _COMMUTATIVE and value is None and nodes[0].op == "const" and nodes[1].op != "const":
            args = (args[1], args[0])  # constants to the right, so that one spelling is left
        return self._add(Node(op, kind, tuple(args), value))

    def convert(self, node: int, kind: Type) -> int:
        """``node`` as a value of type ``kind``."""
        return node if self.nodes[node].type == kind else self.emit(f"to_{kind}", node)

    def inline(self, program: ScoreProgram, leaves: dict[int, int] | None = None) -> list[int]:
        """Append the nodes of ``program`` (same captures and sizes); ``leaves`` maps its positions to replacements."""
        placed: list[int] = []
        self.n_sizes = max(self.n_sizes, program.n_sizes)
        for i, node in enumerate(program.nodes):
            if leaves and i in leaves:
                placed.append(leaves[i])
            elif node.op in LEAVES:
                placed.append(self._add(Node(node.op, node.type, tuple(placed[a] for a in node.args), node.value)))
            else:
                placed.append(self.emit(node.op, *(placed[a] for a in node.args), value=node.value))
        return placed

    def finish(self, *results: int) -> ScoreProgram:
        """The program of ``results``, without dead nodes, verified. Captures and sizes keep their numbers."""
        live = set(results)
        for i in range(len(self.nodes) - 1, -1, -1):
            if i in live:
                live.update(self.nodes[i].args)
        order = sorted(live)
        place = {old: new for new, old in enumerate(order)}
        nodes = tuple(Node(n.op, n.type, tuple(place[a] for a in n.args), n.value) for n in (self.nodes[i] for i in order))
        return verify(ScoreProgram(nodes, tuple(place[r] for r in results), tuple(self.captures), self.n_sizes))

    def depends_on(self, node: int) -> frozenset[str]:
        return dependencies(tuple(self.nodes[: node + 1]))[node]

    # -- internals -----------------------------------------------------------------------------------------------------
    def _add(self, node: Node) -> int:
        key = node.key()
        if key not in self._known:
            self._known[key] = len(self.nodes)
            self.nodes.append(node)
        return self._known[key]

    def _type(self, op: str, args: tuple[Type, ...]) -> Type:
        kind: Type | None
        if op in CONVERSIONS:
            kind = CONVERSIONS[op]
        elif op == "round":
            kind = "float"
        elif op == "where":
            kind = args[1] if len(args) == 3 and args[0] == "bool" and args[1] == args[2] else None
        elif op == "not":
            kind = "bool" if args == ("bool",) else None
        else:
            kind = operation_type(op, args)
        if kind is None:
            raise ProgramError(f"{op} does not take arguments of types {args}")
        return kind

    def _simplify(self, op: str, args: tuple[int, ...]) -> int | None:
        nodes = [self.nodes[a] for a in args]
        if op == "where" and nodes[0].op == "const":
            return args[1] if nodes[0].value else args[2]
        if op == "where" and args[1] == args[2]:
            return args[1]
        if op == "not":
            return self._negate(nodes[0])
        if op == "where" and self._literal_first(nodes):
            return self.emit("where", self.emit("not", args[0]), args[2], args[1])
        if op == "sub" and nodes[0].op == "const" and nodes[0].value == 1 and nodes[1].op == "to_float" and self.nodes[nodes[1].args[0]].type == "bool":
            return self.emit("to_float", self.emit("not", nodes[1].args[0]))  # 1 - [p] = [not p]
        if op == "mul" and (choice := self._choice(args)) is not None:
            return choice
        if (pushed := self._into_choice(op, args)) is not None:
            return pushed
        if op in _WITHIN and nodes[0].op == "abs" and nodes[0].type == "int" and nodes[1].op == "const":
            inner, limit = nodes[0].args[0], int(nodes[1].value or 0)  # |x| <= c is x <= c and x >= -c
            return self.emit(_WITHIN[op], self.emit(op, inner, args[1]), self.emit(_MIRRORED[op], inner, self.const(-limit)))
        if op in ("and", "or"):
            for a, other in ((0, 1), (1, 0)):
                if nodes[a].op == "const":
                    absorbs = (op == "or") == bool(nodes[a].value)
                    return args[a] if absorbs else args[other]
            return args[0] if args[0] == args[1] else None
        if len(args) == 2 and args[0] == args[1] and nodes[0].type != "float" and op in _REFLEXIVE:
            return self.const(_REFLEXIVE[op])
        if nodes[0].op == "index" and len(nodes) == 2 and nodes[1].op == "const" and op in _SIGN:
            known = _SIGN[op](nodes[1].value)  # indices are never negative
            return None if known is None else self.const(known)
        if op == "mul":
            return self._neutral(args, 1)
        if op == "add":
            return self._neutral(args, 0)
        if op in ("sub", "div", "floordiv") and nodes[1].op == "const" and nodes[1].value == (0 if op == "sub" else 1):
            return args[0]
        return None

    def _negate(self, node: Node) -> int | None:
        """Negation pushed inwards, so that predicates are spelled one way: by De Morgan, and through integer comparisons."""
        if node.op == "not":
            return node.args[0]
        if node.op in ("and", "or"):
            return self.emit("or" if node.op == "and" else "and", *(self.emit("not", a) for a in node.args))
        if node.op in _OPPOSITE and self.nodes[node.args[0]].type == "int":  # not for floats: NaN compares false both ways
            return self.emit(_OPPOSITE[node.op], *node.args)
        return None

    def _literal_first(self, nodes: list[Node]) -> bool:
        """``where(p, literal, x)``, or both literals with the more negative one first: turned round."""
        x, y = nodes[1], nodes[2]
        if x.op != "const" or x.type == "bool":
            return False
        return y.op != "const" or float(x.value or 0) < float(y.value or 0)

    def _choice(self, args: tuple[int, ...]) -> int | None:
        """``[p] * c`` for a finite literal c is a choice between c and 0 (0 * inf is NaN, so not for infinite c)."""
        for flag, literal in (args, args[::-1]):
            bit, c = self.nodes[flag], self.nodes[literal]
            if bit.op == "to_float" and self.nodes[bit.args[0]].type == "bool" and c.op == "const" and math.isfinite(float(c.value or 0)):
                return self.emit("where", bit.args[0], literal, self.const(0.0))
        return None

    def _into_choice(self, op: str, args: tuple[int, ...]) -> int | None:
        """``op`` on a choice between two literals (``[p]`` is one of 1 and 0) and literals: a choice between the two results."""
        chosen = [a for a in args if self._literals(a) is not None]
        if len(chosen) != 1 or op == "where" or any(a not in chosen and self.nodes[a].op != "const" for a in args):
            return None
        found = self._literals(chosen[0])
        assert found is not None
        predicate, *literals = found
        results = [_fold(op, [literal if a == chosen[0] else self.nodes[a] for a in args]) for literal in literals]
        if any(r is None or r != r for r in results):
            return None
        if self._type(op, tuple(self.nodes[a].type for a in args)) == "bool":
            same = results[0] == results[1]
            return self.const(bool(results[0])) if same else predicate if results[0] else self.emit("not", predicate)
        return self.emit("where", predicate, *(self.const(r if r or r is False else abs(r)) for r in results if r is not None))  # no -0.0

    def _literals(self, at: int) -> tuple[int, Node, Node] | None:
        """(p, x, y) of ``where(p, x, y)`` with literals x and y, and of a converted predicate ``[p]``."""
        node = self.nodes[at]
        if node.op == "where" and all(self.nodes[a].op == "const" for a in node.args[1:]):
            return node.args[0], self.nodes[node.args[1]], self.nodes[node.args[2]]
        if node.op in ("to_int", "to_float") and self.nodes[node.args[0]].type == "bool":
            one, zero = (1.0, 0.0) if node.type == "float" else (1, 0)
            return node.args[0], Node("const", node.type, (), one), Node("const", node.type, (), zero)
        return None

    def _neutral(self, args: tuple[int, ...], neutral: int) -> int | None:
        for a, other in ((0, 1), (1, 0)):
            node = self.nodes[args[a]]
            if node.op == "const" and node.value == neutral:
                return args[other]
        return None


def pruned(program: ScoreProgram, *results: int) -> ScoreProgram:
    """The part of ``program`` that the nodes ``results`` need; captures and sizes keep their numbers."""
    builder = ProgramBuilder.like(program)
    placed = builder.inline(program)
    return builder.finish(*(placed[r] for r in results))


def _fold(op: str, nodes: list[Node]) -> bool | int | float | None:
    """Value of an operation whose arguments are all literals, or None where it must stay in the program."""
    if not nodes or any(n.op != "const" for n in nodes):
        return None
    values = [n.value for n in nodes]
    try:
        return _FOLD[op](*values) if op in _FOLD else None
    except (OverflowError, ValueError, ZeroDivisionError):
        return None  # left to the kernel, which gives IEEE results


_FOLD: dict[str, Callable[..., bool | int | float]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "floordiv": lambda x, y: x // y,
    "mod": lambda x, y: x % y,
    "min": lambda x, y: math.nan if x != x or y != y else min(x, y),
    "max": lambda x, y: math.nan if x != x or y != y else max(x, y),
    "neg": lambda x: -x,
    "abs": lambda x: abs(x),
    "exp": math.exp,
    "sqrt": math.sqrt,
    "tanh": math.tanh,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "and": lambda x, y: x and y,
    "or": lambda x, y: x or y,
    "not": lambda x: not x,
    "where": lambda c, x, y: x if c else y,
    "to_float": float,
    "to_bool": bool,
    "to_int": int,
}
