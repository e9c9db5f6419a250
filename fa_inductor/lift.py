"""Lifting: a graph region as a function of one element's index.

``Lifter.element(node, index)`` is the score-program value of ``node[index]``: views only change the index, pointwise ops
become program operations, index generators (arange, full, tril …) become arithmetic on the index, and the *leaf* node
becomes ``score``. Anything else that does not depend on the leaf is read from memory (a captured tensor), at the place of the
graph where least has to be stored; anything else that does depend on it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv, Mod

from .graph import GraphContext
from .index import Expr, Space, as_expr, broadcast_index, equal, mixed_radix, product, shape_of
from .location import frames_of, location_of
from .patterns import generators, joins, overwrites, pointwise, views
from .patterns.cell import Cell, kind_of, rounded
from .program import ProgramBuilder
from .program.ir import capture_type
from .refusal import Refusal, Refused, declare
from .site import Captured

UNSUPPORTED_OP = declare("unsupported_op", "a fused kernel sees one score at a time; move this op out of the path from matmul to softmax to matmul")
NO_RULE = declare("no_rule", "an elementwise op, or a form of one, that is not known yet: write it with others (arithmetic, where, exp …), or open an issue")
WHOLE_NUMBERS = declare(
    "whole_numbers",
    "a kernel rounds scores in its own way, and whole numbers made of them jump with the last bit: make them of something else than the scores",
)
DETACHED = declare(
    "detached",
    "remove the detach (or no_grad) between the two matmuls, put both of them under it, or detach queries and keys (and biases) before the first instead",
)
HOOKED = declare("gradient_hook", "a fused kernel never holds the gradient of scores or probabilities: register the hook on q, k, v or the output instead")
REINDEXED = declare("scores_reindexed", "a fused kernel sees one score at a time; here scores are read at two places (transposed, shifted or gathered)")

Leaf = Callable[["Lifter", fx.Node, tuple[Expr, ...]], "int | None"]


def refuse(code: str, text: str, node: fx.Node) -> Refused:
    return Refused(Refusal(code, text, node.name, location_of(node)))


class Straddles(Refused):
    """``node``, a concatenation, is read at an index that may lie in several of its parts."""

    def __init__(self, node: fx.Node, index: tuple[Expr, ...], space: Space) -> None:
        super().__init__(refuse(REINDEXED, "several parts of a concatenation are read as one", node).refusal)
        self.node, self.index, self.space = node, index, space


class Lifter:
    """Builds program values for elements of graph nodes.

    Args:
        names: sympy symbol -> program index name (b, h, q, k) for the symbols that may appear in indices.
        leaf: called first on every node that depends on the anchor; returns its program value or None to look inside.
        carriers: the nodes that depend on the leaf (and must therefore be lifted, not captured).
    """

    def __init__(
        self, context: GraphContext, space: Space, names: dict[sympy.Symbol, str], leaf: Leaf, carriers: set[fx.Node], builder: ProgramBuilder
    ) -> None:
        self.context = context
        self.space = space
        self.names = names
        self.leaf = leaf
        self.carriers = carriers
        self.builder = builder
        self.captured: list[fx.Node] = []
        self.splits: dict[fx.Node, tuple[tuple[Expr, ...], ...] | None] = {}
        self.orders: dict[fx.Node, tuple[int, ...] | None] = {}
        self.size_symbols: list[Expr] = []
        self.touched: set[fx.Node] = set()
        self.arms: tuple[joins.Arm, ...] = ()
        self._known: dict[tuple[fx.Node, tuple[Expr, ...], tuple[joins.Arm, ...]], int] = {}
        self._locals: dict[sympy.Symbol, int] = {}
        self._cuts = Cuts(context)
        self._capture_numbers: dict[fx.Node, int] = {}
        self.narrowed: dict[fx.Node, str] = {}
        self.known: dict[fx.Node, Leaf] = {}
        """Nodes that do not depend on the scores, of which something is known that says what their elements are."""

    # -- elements --------------------------------------------------------------------------------------------------------
    def element(self, node: fx.Node, index: tuple[Expr, ...]) -> int:
        key = (node, index, self.arms)
        if key not in self._known:
            self._known[key] = self._element(node, index)
        return self._known[key]

    def _element(self, node: fx.Node, index: tuple[Expr, ...]) -> int:
        told = self.known[node](self, node, index) if node in self.known else None
        if told is not None:
            return told
        if node in self.carriers:
            return self._carrier(node, index)
        if isinstance(node.meta.get("val"), (torch.SymInt, int)):
            return self.size(as_expr(node.meta["val"]))
        mask = self.context.stored_mask(node)
        if mask is not None:
            return self.context.stored.element(node, mask, self, index)
        if self._cuts.captured_here(node):
            return self._capture(node, index)
        self.touched.add(node)
        return self._inside(node, index)

    def _carrier(self, node: fx.Node, index: tuple[Expr, ...]) -> int:
        self.touched.add(node)
        value = self.leaf(self, node, index)
        if value is not None:
            return value
        if views.name_of(node) == "detach":
            raise refuse(DETACHED, "the scores are detached on their way to the output, so eager gets no gradient through them", node)
        if not liftable(node) or kind_of(node.meta["val"].dtype) == "int":  # whole numbers of scores depend on their rounding
            raise unsupported(node, "is applied to the scores or probabilities")
        return self._inside(node, index)

    def _inside(self, node: fx.Node, index: tuple[Expr, ...]) -> int:
        below = views.step(self.space, node, index) or joins.step(self.space, node, index)
        if below is not None:
            if views.name_of(node) == "getitem":
                self.touched.update(node.all_input_nodes)
            return self.element(*joins.rejoined(self.space, self.arms, node, below))
        if views.name_of(node) in joins.NAMES:
            return self._joined(node, index)
        if views.name_of(node) in overwrites.NAMES:
            return self._overwritten(node, index)
        generated = generators.RULES.get(views.name_of(node))
        if generated is not None:
            value = generated(self, node, index)
            if value is not None:
                return value
        rule = pointwise.RULES.get(views.name_of(node))
        value = rule(Cell(self.builder, node, lambda x: self.operand(x, index))) if rule else None
        if value is None:
            raise unsupported(node, "is read between the matmuls")
        return self.rounded(node, value)

    def _joined(self, node: fx.Node, index: tuple[Expr, ...]) -> int:
        """A concatenation by a choice; not along the keys, whose parts are products of their own."""
        place = index[joins.parts(node)[1]]
        if any(self.names.get(s) == "k" for s in place.free_symbols):
            raise Straddles(node, index, self.space)
        value = joins.choice(self, node, index)
        if value is None:
            raise refuse(UNSUPPORTED_OP, "the parts of a concatenation are different functions of the scores, which may have no finite derivative", node)
        return value

    def _overwritten(self, node: fx.Node, index: tuple[Expr, ...]) -> int:
        value = overwrites.read(self, node, index) if overwrites.accepts(node) else None
        if value is None:
            raise refuse(UNSUPPORTED_OP, f"this form of {_op(node)} cannot be expressed per element", node)
        return self.rounded(node, value)

    def local(self, extent: Expr, value: int) -> sympy.Symbol:
        """A new symbol for places within a part of a concatenation, with its program value."""
        symbol = sympy.Dummy("part", integer=True, nonnegative=True)
        self.space.extent[symbol] = extent
        self.bind(symbol, value)
        return symbol

    def bind(self, symbol: sympy.Symbol, value: int) -> None:
        """``symbol`` in an index has this program value."""
        self._locals[symbol] = value

    def rounded(self, node: fx.Node, value: int) -> int:
        """Low-precision results keep their rounding, except on the path of the scores, which is computed in fp32."""
        dtype, b = node.meta["val"].dtype, self.builder
        fmt = {torch.float16: "f16", torch.bfloat16: "bf16"}.get(dtype)
        cell = b.nodes[value]
        if fmt is None or (cell.op == "round" and cell.value == fmt):
            return value
        literal = [b.nodes[a].op == "const" for a in cell.args[1:]]
        if cell.op == "const":
            return self._literal(value, dtype)
        if cell.op == "where" and any(literal):  # -1e9 is -inf in float16, among the scores too
            arms = (self._literal(a, dtype) if known else a for a, known in zip(cell.args[1:], literal))
            value = b.emit("where", cell.args[0], *arms)
        return value if node in self.carriers or (all(literal) and cell.op == "where") else b.emit("round", value, value=fmt)

    def _literal(self, value: int, dtype: torch.dtype) -> int:
        """The literal at ``value`` rounded to ``dtype``."""
        return self.builder.const(rounded(self.builder.nodes[value].value, dtype))  # type: ignore[arg-type]

    def operand(self, x: Any, index: tuple[Expr, ...]) -> int:
        """Argument of a pointwise op read at the element ``index`` of its (broadcast) result."""
        if isinstance(x, fx.Node):
            value = x.meta["val"]
            if isinstance(value, torch.Tensor):
                return self.element(x, broadcast_index(shape_of(value), index))
            return self.scalar(x)
        if isinstance(x, (bool, int, float)):
            return self.builder.const(x)
        raise TypeError(f"argument {x!r} is neither a tensor nor a number")

    def scalar(self, node: fx.Node) -> int:
        """A SymInt as a size expression; a SymFloat as a captured 0-d tensor."""
        value = node.meta["val"]
        if isinstance(value, torch.SymInt):
            return self.size(as_expr(value))
        if isinstance(value, (bool, int, float)):
            return self.builder.const(value)
        return self._capture(node, ())

    # -- leaves ----------------------------------------------------------------------------------------------------------
    def _capture(self, node: fx.Node, index: tuple[Expr, ...]) -> int:
        """Read ``node`` from memory. A dimension that merges several axes (b*H + h) is read as these axes."""
        if not isinstance(node.meta["val"], torch.Tensor):
            return self._load(node, [])
        split, places = [], []
        for i, size in zip(index, shape_of(node.meta["val"])):
            digits = mixed_radix(self.space, i, size)
            apart = digits is not None and len(digits) > 1 and all(x in self.names for x, _ in digits)
            split.append(tuple(e for _, e in digits) if digits and apart else (size,))
            places += [x for x, _ in digits] if digits and apart else [i]
        self.splits.setdefault(node, tuple(split) if len(places) > len(index) else None)
        if self.splits[node] != (tuple(split) if len(places) > len(index) else None):
            raise refuse(REINDEXED, "a captured tensor is read through two different views of its dimensions", node)
        self.orders.setdefault(node, self._order(node, places))
        return self._load(node, [self.size(i) for i in places])

    def _order(self, node: fx.Node, places: list[Expr]) -> tuple[int, ...] | None:
        """Dimensions of a copy in which neighbouring keys are neighbours in memory (threads of a GPU read along the keys).

        None: ``node`` is read as it is, since it is so already, no plain tensor of positions, or nothing that Inductor would compute in that order.
        """
        axes = [self.names.get(i) for i in places]
        strides = node.meta["val"].stride()
        named = [a for a in axes if a is not None]
        plain = len(set(named)) == len(named) and {"q", "k"} <= set(named) and all(isinstance(s, int) and s > 0 for s in strides)
        if node.op != "call_function" or not plain or not liftable(node):
            return None
        parts = self.splits[node] or tuple((size,) for size in shape_of(node.meta["val"]))
        apart = [(product(list(dimension[at + 1 :])) * stride) for dimension, stride in zip(parts, strides) for at in range(len(dimension))]
        order = tuple(sorted(range(len(axes)), key=lambda d: "bhqk".index(axes[d] or "b")))
        return None if all(equal(apart[order[-1]], s) or (apart[order[-1]] - s).is_negative for s in apart) else order

    def _load(self, node: fx.Node, places: list[int]) -> int:
        order = self.orders.setdefault(node, None)
        return self.builder.load(self.number(node, len(places)), places if order is None else [places[d] for d in order])

    def number(self, node: fx.Node, rank: int) -> int:
        """Capture number of ``node``, declared at its first use."""
        if node not in self._capture_numbers:
            value = node.meta["val"]
            dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "float32"
            dtype = self.narrowed.get(node, dtype)
            if capture_type(dtype) is None:
                raise refuse(UNSUPPORTED_OP, f"a {dtype} tensor cannot be read inside a kernel", node)
            self._capture_numbers[node] = self.builder.capture(dtype, rank)
            self.captured.append(node)
        return self._capture_numbers[node]

    def gather(self, node: fx.Node, places: list[int]) -> int:
        """``node`` read from memory at integer program values."""
        if self.splits.setdefault(node, None) is not None:
            raise refuse(REINDEXED, "a captured tensor is read through two different views of its dimensions", node)
        return self._load(node, places)

    def place(self, node: Any, index: tuple[Expr, ...], entries: Expr) -> int:
        """Where to read a table of ``entries`` entries: computed in the kernel, or stored for each (q, k) in as few bytes as will do."""
        below = self._cuts.leaves(node) if isinstance(node, fx.Node) else frozenset()
        stored = [n for n in below if isinstance(n.meta["val"], torch.Tensor) and elements(n) >= elements(node)]
        if not stored or node in self._capture_numbers or not entries.is_Integer or node.meta["val"].dtype != torch.int64:
            return self.builder.convert(self.operand(node, index), "int")
        self.narrowed[node] = "int8" if entries <= 127 else "int16" if entries <= 32767 else "int32"
        return self._capture(node, broadcast_index(shape_of(node.meta["val"]), index))

    def captures(self) -> tuple[Captured, ...]:
        return tuple(Captured(n, self.splits.get(n), self.narrowed.get(n), self.orders.get(n)) for n in self.captured)

    def size(self, expr: Expr) -> int:
        """Integer program value of an index or size expression."""
        b = self.builder
        expr = sympy.expand(expr)
        if expr.is_Integer:
            return b.const(int(expr))
        if expr in self.names:
            return b.index(self.names[expr])
        if expr in self._locals:
            return self._locals[expr]
        if expr in self.space.extent:
            raise Refused(Refusal(UNSUPPORTED_OP, "a mask or factor depends on the channel of the values or on a batch dimension that only they have"))
        if isinstance(expr, sympy.Symbol):
            if expr not in self.size_symbols:
                self.size_symbols.append(expr)
            return b.size(self.size_symbols.index(expr))
        if isinstance(expr, (FloorDiv, Mod)):
            return b.emit("floordiv" if isinstance(expr, FloorDiv) else "mod", self.size(expr.args[0]), self.size(expr.args[1]))
        if expr.is_Add or expr.is_Mul:
            parts = [self.size(a) for a in sorted(expr.args, key=str)]
            result = parts[0]
            for part in parts[1:]:
                result = b.emit("add" if expr.is_Add else "mul", result, part)
            return result
        if expr.is_Pow and expr.args[1].is_Integer and expr.args[1] > 0:
            base, result = self.size(expr.args[0]), b.const(1)
            for _ in range(int(expr.args[1])):
                result = b.emit("mul", result, base)
            return result
        raise Refused(Refusal(UNSUPPORTED_OP, f"the index expression {expr} is not integer arithmetic"))


def _op(node: fx.Node) -> str:
    """The op for a message: of an item of a pair, the op that made the pair."""
    source = node.args[0] if views.name_of(node) == "getitem" else node
    return str(source.target) if isinstance(source, fx.Node) else str(node.target)


def hooked(node: fx.Node) -> bool:
    """A hook on a gradient, which Dynamo made an autograd function of before it had an operator for it."""
    name = getattr(node.target, "__name__", "")
    return name == "register_hook" or (name == "autograd_function_apply" and any("register_hook(" in f.source for f in frames_of(node)))


def unsupported(node: fx.Node, where: str) -> Refused:
    """The refusal of an op that is not lifted: one without a rule, or one that no rule can serve."""
    if hooked(node):
        return refuse(HOOKED, f"a gradient hook {where}", node)
    if views.name_of(node) in _STEPS or node.kwargs.get("rounding_mode") is not None or (liftable(node) and not node.meta["val"].dtype.is_floating_point):
        return refuse(WHOLE_NUMBERS, f"{_op(node)}, which makes whole numbers, {where}", node)
    if pointwise.elementwise(node):
        form = " in this form" if views.name_of(node) in pointwise.RULES else ""
        return refuse(NO_RULE, f"{_op(node)}, which is elementwise, but has no rule{form}, {where}", node)
    known = getattr(node.target, "namespace", "") == "aten" or views.name_of(node) == "getitem"
    return refuse(UNSUPPORTED_OP, f"{_op(node)}, {'which is not elementwise' if known else 'of which nothing is known'}, {where}", node)


def _may_wrap(node: fx.Node, inputs: list[fx.Node]) -> bool:
    """32-bit integers wrap around: arithmetic on them, and casts to them from 64 bits, are not program arithmetic."""
    if node.meta["val"].dtype != torch.int32:
        return False
    return views.name_of(node) not in generators.RULES and any(n.meta["val"].dtype in (torch.int32, torch.int64) for n in inputs)


def liftable(node: fx.Node) -> bool:
    """Can the op be expressed per element at all?"""
    name = views.name_of(node)
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if name in views.RULES:
        return views.step(_UNKNOWN, node, tuple(sympy.Symbol(f"i{d}", integer=True, nonnegative=True) for d in range(node.meta["val"].dim()))) is not None
    if name in joins.NAMES:
        return True
    if name in overwrites.NAMES:
        return overwrites.accepts(node)
    return pointwise.accepts(node) if name in pointwise.RULES else generators.accepts(node)


_UNKNOWN = Space({})


_EXPENSIVE = frozenset(
    {"exp", "log", "log2", "log10", "tanh", "sigmoid", "sqrt", "rsqrt", "pow", "reciprocal", "sin", "cos", "gelu", "softplus", "log_sigmoid"}
)
_EXPENSIVE |= {"mish", "elu", "selu", "celu", "logaddexp", *(prefix + name for name in ("exp2", "expm1", "log1p", "erf") for prefix in ("", "special_"))}
"""Ops that a kernel would repeat for every head and query tile: computed inside only where that saves much memory."""


SMALL_BIAS = 1 << 20
"""A learned bias of fewer elements is read as the tensor that it is: with no memory to save, its table costs more launches than it spares
(Swin's windows of 49 x 49, H200). Above it, the table is read by index in the kernel (T5 at 2048: 4 times faster training)."""
LONG = 14
"""A fixed value of fewer than ``SMALL_BIAS`` elements that takes more operations (the mask of Swin's shifted windows: 18) is stored: a kernel would
repeat them for every head and batch. Masks that hide whole ranges of keys take fewer (10 in transformers), and stay visible to the kernel."""
_EXACT = frozenset(
    {"add", "sub", "rsub", "mul", "neg", "abs", "minimum", "maximum", "clamp", "clamp_min", "clamp_max", "where", "masked_fill", "to", "_to_copy"}
)
"""Ops on floats that every implementation rounds alike."""
_STEPS = frozenset({"floor", "ceil", "round", "trunc", "sign", "sgn", "fix", "floor_divide", "remainder", "fmod"})
"""Ops that jump at whole numbers."""


def _discrete(node: fx.Node) -> bool:
    """Does the result jump where an input changes by a last bit: a comparison, a conversion to an integer, a floor?"""
    return not node.meta["val"].dtype.is_floating_point or views.name_of(node) in _STEPS


class Cuts:
    """Where to stop lifting values that do not depend on the scores: at the node where the least has to be in memory."""

    def __init__(self, context: GraphContext) -> None:
        self.context = context
        self._leaves: dict[fx.Node, frozenset[fx.Node]] = {}

    def captured_here(self, node: fx.Node) -> bool:
        return node in self.leaves(node)

    def leaves(self, node: fx.Node) -> frozenset[fx.Node]:
        """The nodes to capture for ``node``: itself, or those of its inputs when they are no larger together."""
        if node not in self._leaves:
            self._leaves[node] = frozenset({node})  # cycles cannot occur; this is the default
            self._leaves[node] = self._decide(node)
        return self._leaves[node]

    def _decide(self, node: fx.Node) -> frozenset[fx.Node]:
        here = frozenset({node})
        if not self._open(node):
            return here
        below = frozenset().union(*(self.leaves(n) for n in generators.reads(node) if not isinstance(n.meta.get("val"), (torch.SymInt, int))))
        if any(not self._readable(n) for n in below):
            return here
        cost = sum(elements(n) for n in below if self.context.stored_mask(n) is None) * (8 if views.name_of(node) in _EXPENSIVE else 1)
        return below if views.is_view(node) or (cost <= elements(node) and not self._better_stored(node, below)) else here

    def _better_stored(self, node: fx.Node, below: frozenset[fx.Node]) -> bool:
        """Is it small, fixed, and more work to compute than to read?"""
        if elements(node) >= SMALL_BIAS or node in self.context.needs_grad or not self._readable(node):
            return False
        seen, queue = {node}, [node]
        while queue and len(seen) <= 2 * LONG:
            inputs = [n for n in queue.pop().all_input_nodes if n not in below and n not in seen and isinstance(n.meta.get("val"), torch.Tensor)]
            seen.update(inputs)
            queue += inputs
        return sum(views.name_of(n) in pointwise.RULES for n in seen) > LONG

    def _open(self, node: fx.Node) -> bool:
        """May be computed inside the kernel instead of being read."""
        if not liftable(node) or node.op != "call_function" or views.name_of(node) in joins.NAMES or views.name_of(node) in overwrites.NAMES:
            return False
        value = node.meta["val"]
        inputs = [n for n in generators.reads(node) if isinstance(n.meta.get("val"), torch.Tensor)]
        if not views.is_view(node) and (value.dtype in (torch.int8, torch.uint8, torch.int16, torch.float64) or _may_wrap(node, inputs)):
            return False
        if views.name_of(node) in ("embedding", "index") and value.dtype.is_floating_point and elements(node) < SMALL_BIAS:
            return False
        if _discrete(node) and any(self._rounds(n) for n in inputs):
            return False  # a last bit decides: it must be PyTorch's own
        if self.context.is_written(node) and not (views.is_view(node) and not any(self.context.copies_and_changes(node, n) for n in inputs)):
            return False  # it does not hold what its op computed
        if any(n.meta["val"].device != value.device and n.meta["val"].dim() > 0 for n in inputs):
            return False
        mode = self.context.grad_mode[node]
        return not any(n in self.context.needs_grad and self.context.grad_mode[n] != mode for n in inputs if n.op not in ("placeholder", "get_attr")) and not (
            not mode and any(n in self.context.needs_grad for n in inputs)
        )

    def _rounds(self, node: fx.Node) -> bool:
        """Would a kernel compute ``node``, a float, by an op whose last bit differs from one implementation to the next?"""
        if not node.meta["val"].dtype.is_floating_point or self.captured_here(node):
            return False
        inputs = [n for n in generators.reads(node) if isinstance(n.meta.get("val"), torch.Tensor)]
        exact = views.is_view(node) or views.name_of(node) in _EXACT or views.name_of(node) in generators.RULES
        return not exact or any(map(self._rounds, inputs))

    def _readable(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return isinstance(value, (float, torch.SymFloat))
        return capture_type(str(value.dtype).removeprefix("torch.")) is not None


def elements(node: fx.Node) -> int:
    """Number of elements (by hint where symbolic)."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 1
    count = 1
    for size in value.shape:
        count *= hint(size)
    return count


def hint(size: Any) -> int:
    """An example value of a size, without a guard."""
    if isinstance(size, torch.SymInt):
        known = size.node.hint
        return 4096 if known is None else int(known)
    return int(size)
