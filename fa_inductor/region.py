"""Lifting a whole region, from an output product through the softmax to a score product: an AttentionSite, or what stands in the way.

For the contraction ``out[o] = sum_k P'[o, k] V[o, k]`` the probabilities' side is lifted down to the softmax, the softmax's
input down to ``sum_d Q[o, d] K[k, d]``. Both are done twice: once in the output's own dimensions, to see how they split into
batch, head and query (``digits``), and once in the canonical names b, h, q, k, which is the proof: every index that is read is
then an expression in the names it may depend on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from . import digits as D
from .columns import JOINED, Columns
from .dropped import Dropped, check_draws, check_uses, dropped, kept_score, lone
from .find import Candidate, is_dropout, reachable
from .finite import finite_among
from .graph import GraphContext
from .index import ONE, ZERO, Expr, Space, nonnegative, product, shape_of
from .lift import REINDEXED, Lifter, refuse
from .near_softmax import ALTERED
from .normalize.aliases import storage_keys
from .operands import AxisName, as_view, candidates, chain, covers, group_of, view_of
from .patterns.contraction import Contraction, describe
from .patterns.exponentials import shifts
from .patterns.kept import Mask
from .patterns.nan import without_nan
from .patterns.views import name_of
from .post import factor_of
from .program import ProgramBuilder, ScoreProgram
from .program.bounds import LARGEST, moderate, sums_above, surely_finite
from .quotient import Quotient, truth
from .refusal import Refused, declare
from .site import AttentionSite, Axes, Captured, Column, View4

NOT_ATTENTION = declare("not_attention", "nothing to do, unless a graph break lies between this softmax and a product with values: then remove the break")
OTHER_AXIS = declare(
    "softmax_axis",
    "the matmul must sum over the whole axis that the softmax normalises: check the dim argument, slices, and mixing of heads",
)
NOT_CANONICAL = declare("not_query_times_key", "the score matmul does not pair one query with one key (check permutes, and that no head mixing sits between)")
OPERANDS = declare("operand_layout", "Q, K or V is read through an index that is not a reshape, permute or expand")
MUTATION = declare("mutation", "a tensor that the attention reads is written to between the two matmuls; move the write before or after")
GRAD_MODE = declare(
    "grad_mode",
    "compute scores, softmax and the product with the values under one grad mode; if v alone needs a gradient, detach queries and keys (and biases) instead",
)
EMPTY = declare("empty", "nothing to do: the attention has no elements")
ADDEND = declare("output_addend", "the matmul after the softmax adds another tensor or scales; a plain matmul and a separate addition can be fused")
OVERFLOW = declare("scaled_shift", "subtract the maximum last, or not at all: softmax does it anyway")
DTYPE = declare("dtype", "attention runs fused in float16, bfloat16 and float32")
RENORMALISED = declare("renormalised", "the probabilities are reduced over again (renormalised) before the second matmul")

K, DIM = D.symbol("k"), D.symbol("d")
B, H, Q, DV = (D.symbol(n) for n in ("b", "h", "q", "dv"))
NAMES: dict[sympy.Symbol, str] = {B: "b", H: "h", Q: "q", K: "k"}
_LARGE = 256.0
"""More than this added to scores takes digits from them that count."""
REDUCTIONS = ("sum", "mean", "amax", "max", "norm", "softmax", "_softmax", "topk", "std", "var", "layer_norm")


@dataclass(frozen=True)
class Lifted:
    """One pass over the region: the operands' indices, and the programs if the pass used canonical names."""

    second: Contraction
    probabilities: str  # "lhs" or "rhs"
    first: Contraction
    keys: str
    lifter: Lifter
    score: int
    shifted: tuple[int, ...]
    """Values whose maximum eager subtracts, and which it computes as the program does."""
    factor: int
    zeroed: tuple[int, ...]
    dropouts: tuple[Dropped | None, Dropped | None]
    """Of the scores and of the probabilities."""

    def operand(self, which: str) -> tuple[fx.Node, tuple[Expr, ...]]:
        """(node, index) of "q", "k" or "v"."""
        contraction, side = (self.second, _other(self.probabilities)) if which == "v" else (self.first, self.keys if which == "k" else _other(self.keys))
        return (contraction.lhs, contraction.lhs_index) if side == "lhs" else (contraction.rhs, contraction.rhs_index)


def _other(side: str) -> str:
    return "rhs" if side == "lhs" else "lhs"


@dataclass(frozen=True)
class Part:
    """Some of the places that the output contraction sums over; ``size`` None: all of them."""

    start: Expr = ZERO
    size: Expr | None = None


class Region:
    """The region between one score contraction and one output contraction.

    With ``part`` it is that of a piece of the keys (see ``joined``): what else the softmax runs over is not looked at here.
    """

    key_axis = K
    """What the softmax's axis is called."""

    def __init__(
        self, context: GraphContext, candidate: Candidate, second: fx.Node, first: fx.Node, part: Part | None = None, result: fx.Node | None = None
    ) -> None:
        self.context, self.candidate, self.anchor, self.part = context, candidate, candidate.anchor, part
        self.second, self.first = second, first
        self.result = result or (self.anchor.quotient.node if self.anchor.quotient is not None else second)
        self.traced: set[fx.Node] = set()
        self.reads_scores, self.without_scores = False, False
        self.shifts = {} if self.anchor.terms else shifts(self.anchor.input, self.anchor.dim)
        last = context.order[self.result]
        self.after = reachable(self.anchor.output, last, context.order, {n for n in candidate.contractions if n is not second})
        self.before = reachable(first, context.order[self.anchor.output], context.order)

    # -- the two passes ----------------------------------------------------------------------------------------------------
    def site(self) -> AttentionSite:
        shape = shape_of(self.result.meta["val"])
        digits = D.Digits.of(shape)
        for _ in range(8):
            space = Space({**digits.extent})
            guess = self.lift(space, digits.index(), dict.fromkeys(digits.extent, "b") | {K: "k"})
            if not digits.refine(self._all_indices(guess)):
                break
        failure: Refused | None = None
        for roles in self._roles(digits, guess):
            try:
                return self._prove_roles(digits, roles)
            except Refused as refused:
                failure = failure or refused
        assert failure is not None
        raise failure

    def _prove_roles(self, digits: D.Digits, roles: D.Roles) -> AttentionSite:
        space = Space({B: _extent(digits, roles.batch), H: _extent(digits, roles.heads), Q: _extent(digits, roles.query), DV: _extent(digits, roles.value)})
        names: dict[sympy.Symbol, Expr] = {}
        for axis, members in ((B, roles.batch), (H, roles.heads), (Q, roles.query), (DV, roles.value)):
            names |= D.axis_index(members, digits.extent, axis, space)
        index = tuple(sympy.expand(i.subs(names, simultaneous=True)) if i.free_symbols & set(names) else i for i in digits.index())
        return self.prove(space, index)

    def _all_indices(self, lifted: Lifted) -> list[tuple[Expr, ...]]:
        space = lifted.lifter.space
        found = [lifted.second.lhs_index, lifted.second.rhs_index, self._softmax_index]
        for which in ("q", "k", "v"):
            found.append(list(chain(self.context, space, *lifted.operand(which)))[-1][1])  # below all expansions: what is really read
        return found

    def _roles(self, digits: D.Digits, guess: Lifted) -> list[D.Roles]:
        def free(index: tuple[Expr, ...]) -> set[sympy.Symbol]:
            return set().union(*(i.free_symbols for i in index)) & set(digits.extent)

        smallest = {w: min((free(i) for _, i in chain(self.context, guess.lifter.space, *guess.operand(w))), key=len) for w in ("k", "v")}
        roles = list(D.assignments(digits, guess.second.size, free(self._softmax_index), smallest["k"], smallest["v"]))
        if not roles[0].query and any(x not in smallest["v"] for x in roles[0].batch + roles[0].heads):
            raise refuse(NOT_CANONICAL, "the keys of the score matmul depend on the query's position (scores mixed across heads?)", self.first)
        return roles

    def lift(self, space: Space, index: tuple[Expr, ...], names: dict[sympy.Symbol, str]) -> Lifted:
        """Both contractions and everything between them, read at ``index`` of the output.

        ``names`` gives each symbol its program index; while guessing all are called b, since only the indices are looked at.
        """
        quotient = Quotient(self.context, space, self.anchor.quotient, index) if self.anchor.quotient is not None else None
        second = self.product_with_values(space, quotient.product if quotient is not None else index)
        if second is None:
            raise refuse(NOT_CANONICAL, "this spelling of the second matmul does not sum products of two operands over dimensions that both have", self.second)
        if second.addend is not None and name_of(self.second) == "linear":
            raise refuse(NOT_ATTENTION, "the probabilities go into a Linear layer with a bias: a gate", self.second)
        if (second.addend is not None and second.beta != 0) or second.alpha != 1:
            raise refuse(ADDEND, f"{self.second.target} with alpha={second.alpha}, beta={second.beta}", self.second)
        self._check_addend(second)
        sides = [s for s, n in (("lhs", second.lhs), ("rhs", second.rhs)) if n in self.after]
        if len(sides) != 1:
            raise refuse(NOT_CANONICAL, "both operands of the second matmul come from the probabilities", self.second)
        space.extent[K] = second.size
        builder = ProgramBuilder()
        probability, dropout, after = self._lift_after(space, names, second, sides[0])
        if quotient is not None:
            after.touched |= quotient.sums(self.anchor, self._softmax_index, names)
        score, shifted, lifter, contraction, keys, dropped_scores = self._lift_before(space, names, builder)
        factor, zeroed = _transplant(after, probability, lifter, self.second)
        lifter.touched |= after.touched
        return Lifted(second, sides[0], contraction, keys, lifter, score, shifted, factor, zeroed, (dropped_scores, dropout))

    # -- what a region of another form has in its own way -------------------------------------------------------------------
    def product_with_values(self, space: Space, index: tuple[Expr, ...]) -> Contraction | None:
        """The second contraction, which sums over K."""
        found = describe(self.second, index, (ZERO if self.part is None else self.part.start) + K, self.after)
        return replace(found, size=self.part.size) if found is not None and self.part is not None and self.part.size is not None else found

    def product_of_scores(self, space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Contraction | None:
        """The first contraction, if it is what ``node`` holds."""
        if node is not self.first:
            return None
        found = describe(node, index, DIM)
        if found is None:
            raise refuse(NOT_CANONICAL, "this spelling of the score matmul does not sum products of two operands over dimensions that both have", node)
        return found

    def prepare(self, lifter: Lifter) -> None:
        """Before anything is lifted."""

    def finished(self, lifter: Lifter, score: int) -> int:
        """The softmax's input for each key."""
        return score

    def _check_addend(self, found: Contraction) -> None:
        """An addend times 0 contributes nothing, not even where it is NaN; its gradient in eager is zeros, not absent."""
        if found.addend in self.context.needs_grad and found.beta == 0:
            raise refuse(ADDEND, f"{found.node.target} with beta=0 and an addend that needs a gradient", found.node)

    def _lift_after(self, space: Space, names: dict[sympy.Symbol, str], second: Contraction, side: str) -> tuple[int, Dropped | None, Lifter]:
        reads: list[tuple[Expr, ...]] = []
        drawn: list[Dropped] = []
        self._cleaned = False

        def leaf(lifter: Lifter, node: fx.Node, index: tuple[Expr, ...]) -> int | None:
            if node is self.anchor.output:
                reads.append(index)
                return lifter.builder.score()
            if is_dropout(node):
                drawn.append(dropped(node, index, "probability"))
                return drawn[-1].value(lifter)
            found = without_nan(node)
            value = lifter.element(found[0], index) if found is not None and found[0] in self.after else None
            if found is not None and value is not None and lifter.builder.nodes[value].op == "score":
                self._cleaned = True
                lifter.touched.update(found[1])
                return value
            if name_of(node) in REDUCTIONS:
                raise refuse(RENORMALISED, f"{node.target} over the probabilities stands between the softmax and the second matmul", node)
            return None

        lifter = Lifter(self.context, space, names, leaf, self.after, ProgramBuilder())
        self.prepare(lifter)
        node, index = (second.lhs, second.lhs_index) if side == "lhs" else (second.rhs, second.rhs_index)
        value = lifter.element(node, index)
        if len(set(reads)) != 1:
            raise refuse(REINDEXED, "the probabilities are read at two different places", self.second)
        dropout = lone(drawn)
        self._softmax_index = reads[0]
        self.check_axis(space, reads[0], second)
        return value, dropout, lifter

    def check_axis(self, space: Space, index: tuple[Expr, ...], second: Contraction) -> None:
        shape, dim = shape_of(self.anchor.input.meta["val"]), self.anchor.dim
        self.first_key = _offset(space, index[dim], second.size, shape[dim])
        if self.first_key is None:
            raise refuse(OTHER_AXIS, f"the softmax runs over dimension {dim} of {_words(shape)}, the matmul sums over another", self.second)
        for position, i in enumerate(index):
            if position != dim and K in i.free_symbols:
                raise refuse(OTHER_AXIS, f"the softmax runs over dimension {dim} of {_words(shape)}, the matmul sums over dimension {position}", self.second)

    def _lift_before(
        self, space: Space, names: dict[sympy.Symbol, str], builder: ProgramBuilder
    ) -> tuple[int, tuple[int, ...], Lifter, Contraction, str, Dropped | None]:
        reads: list[Contraction] = []
        shifted: list[int] = []
        drawn: list[Dropped] = []

        def leaf(lifter: Lifter, node: fx.Node, index: tuple[Expr, ...]) -> int | None:
            if node in self.shifts:
                shifted.append(lifter.element(self.shifts[node], index))
                return shifted[-1]
            if is_dropout(node):
                drawn.append(dropped(node, index, "score"))
                return kept_score(lifter, drawn[-1])
            found = self.product_of_scores(space, node, index)
            if found is None:
                return None
            self._check_addend(found)
            reads.append(found)
            value = lifter.builder.score()
            if found.addend is not None:
                value = lifter.builder.emit("mul", value, lifter.builder.convert(lifter.operand(found.alpha, ()), "float"))
                if found.beta != 0:
                    bias = lifter.builder.convert(lifter.element(found.addend, found.addend_index), "float")
                    value = lifter.builder.emit("add", value, lifter.builder.emit("mul", bias, lifter.builder.convert(lifter.operand(found.beta, ()), "float")))
            return value

        lifter = Lifter(self.context, space, names, leaf, self.before, builder)
        self.prepare(lifter)
        score = builder.convert(lifter.element(self.anchor.input, self._softmax_index), "float")
        if self.anchor.factor != 1:
            score = builder.emit("mul", score, builder.const(self.anchor.factor))
        for mask in self.anchor.masks:
            score = self._masked(lifter, score, mask)
        score = self.finished(lifter, score)
        self.without_scores = not reads
        if not reads:
            raise refuse(REINDEXED, "these scores are not among those that the probabilities are made of", self.first)
        if len({(c.lhs_index, c.rhs_index) for c in reads}) != 1:
            raise refuse(REINDEXED, "the scores are read at two different places", self.first)
        first = reads[0]
        self.reads_scores = True
        space.extent[DIM] = first.size
        with_k = [s for s, index in (("lhs", first.lhs_index), ("rhs", first.rhs_index)) if any(K in i.free_symbols for i in index)]
        if space.extent[K] == 1:
            with_k = ["rhs"]  # a single key has no index: either operand may be called the keys
        if len(with_k) != 1:
            raise refuse(NOT_CANONICAL, "the softmax axis belongs to neither or both operands of the score matmul", self.first)
        return score, tuple(shifted), lifter, first, with_k[0], lone(drawn)

    def _masked(self, lifter: Lifter, score: int, mask: Mask) -> int:
        """``score``, and -inf where ``mask`` takes its exponential away; a product hands NaN on to the scores' gradient, a choice does not."""
        if mask.node in self.before:
            raise refuse(ALTERED, "what hides exponentials from the sum depends on the scores", mask.node)
        b = lifter.builder
        value = lifter.operand(mask.node, self._softmax_index)
        if mask.sense == "factor":
            kept = truth(b, value)
            if kept is None:
                raise refuse(ALTERED, "the exponentials are multiplied by what is not known to be 0 or 1", mask.node)
            return b.emit("add", score, b.emit("where", kept, b.const(0.0), b.const(-math.inf)))
        kept = b.convert(value, "bool")
        return b.emit("where", kept if mask.sense == "keep" else b.emit("not", kept), score, b.const(-math.inf))

    def columns(self, gaps: Sequence[tuple[Expr, Expr]], size: Expr) -> tuple[list[Column], set[fx.Node]]:
        """The scores at the places ``gaps`` (start, length), beside ``size`` keys, and the nodes that they are computed by."""

        def leaf(lifter: Lifter, node: fx.Node, index: tuple[Expr, ...]) -> int | None:
            if node in self.shifts:
                return lifter.element(self.shifts[node], index)
            if node is self.first:
                shape, dim = shape_of(self.anchor.input.meta["val"]), self.anchor.dim
                text = f"the matmul sums over {size} of its {shape[dim]} places"
                raise refuse(OTHER_AXIS, f"the softmax runs over dimension {dim} of {_words(shape)}, {text}", self.second)
            return None

        columns = Columns(self.context, self.space, self.anchor, self._softmax_index, NAMES, K)
        found = columns.read(gaps, size, leaf, self.before, self.second)
        if found and self.anchor.masks:
            raise refuse(ALTERED, "exponentials are masked, and some of them are summed without values of their own", self.second)
        return found, columns.touched

    # -- the proof ---------------------------------------------------------------------------------------------------------
    def prove(self, space: Space, index: tuple[Expr, ...]) -> AttentionSite:
        if any(e == 0 for e in space.extent.values()):
            raise refuse(EMPTY, f"the output has shape {_words(shape_of(self.result.meta['val']))}", self.result)
        lifted = self.lift(space, index, NAMES)
        allowed = {"q": {B, H, Q, DIM}, "k": {B, H, K, DIM}, "v": {B, H, K, DV}}
        for which, names in allowed.items():
            node, at = lifted.operand(which)
            below = [index for _, index in chain(self.context, space, node, at)]  # a head that all queries of a group share is expanded to them
            stray = min((set().union(*(i.free_symbols for i in index)) & (set(space.extent) - names) for index in below), key=len)
            if stray:
                words = sorted({"the part of a concatenation" if isinstance(s, sympy.Dummy) else str(s) for s in stray})
                raise refuse(NOT_CANONICAL, f"{which.upper()} is read at an index that depends on {', '.join(words)}", node)
        self.space, columns, touched = space, list[Column](), set[fx.Node]()
        if self.part is None and self.key_axis is K:
            total = shape_of(self.anchor.input.meta["val"])[self.anchor.dim]
            size, first = lifted.second.size, self.first_key
            columns, touched = self.columns([(ZERO, first), (first + size, sympy.expand(total - first - size))], size)
        dtype = self._dtype(lifted)
        views = self._operand_views(space, lifted, dtype)
        output = as_view(space, {B: "b", H: "h", Q: "q", DV: "d"}, self.result, index)
        if output is None:
            raise refuse(OPERANDS, "the output's dimensions do not come apart into batch, head, query and channel", self.second)
        program, post, captures, sizes = self._programs(lifted)
        self._check_overflow(lifted)
        region = frozenset(lifted.lifter.touched | touched | self.traced | {self.first, self.second, self.result, self.anchor.output}) - {
            n for n in self.context.graph.nodes if n.op == "placeholder"
        }
        self.dropped, self.rows = [d for d in lifted.dropouts if d is not None], None
        for one in self.dropped:
            check_draws(space, {B: "b", H: "h", Q: "q", self.key_axis: "k"}, one)
        escapes = self.part is None and self.escapes(region, {self.result})
        if self.part is not None:
            self.rows = self._rows(space)
        chains = {n for w in "qkv" for n, _ in chain(self.context, space, *lifted.operand(w))}
        self._check_modes(region, chains, (*captures, *(c for column in columns for c in column.captures)), views)
        groups = [group_of(space, H, views[w]) for w in "kv"]
        group = groups[1] if groups[0] == space.extent[H] else groups[0]  # the one without a head axis is broadcast to the other's
        axes = Axes(
            space.extent[B], space.extent[H], sympy.cancel(space.extent[H] / group), space.extent[Q], space.extent[K], space.extent[DIM], space.extent[DV]
        )
        return AttentionSite(
            self.anchor, output, views["q"], views["k"], views["v"], axes, program, post, captures, sizes,
            lifted.dropouts[1].p if lifted.dropouts[1] else 0.0, dtype, region, escapes, tuple(columns), self._cleaned,
            tuple(lifted.lifter.builder.finish(z) for z in lifted.zeroed),
        )  # fmt: skip

    def _check_overflow(self, lifted: Lifted) -> None:
        """What is computed from scores without the subtracted maximum must be finite wherever they are, and not swallow what is added."""
        if not self.shifts and self.anchor.factor <= 1:
            return
        builder = lifted.lifter.builder
        program = builder.finish(lifted.score, *lifted.shifted)
        if not surely_finite(program, fill=-math.inf, loads=LARGEST):
            raise refuse(OVERFLOW, "the maximum is subtracted before a factor, without which the scores could overflow", self.anchor.output)
        if lifted.shifted and sums_above(program):
            finite = finite_among(lifted.lifter.captured)
            if not moderate(builder.finish(*lifted.shifted), _LARGE, finite):
                text = "something is added after the maximum is subtracted, and would be lost next to scores as large as a mask makes them"
                raise refuse(OVERFLOW, text, self.anchor.output)

    def _dtype(self, lifted: Lifted) -> torch.dtype:
        scores: torch.dtype = self.first.meta["val"].dtype
        output: torch.dtype = self.second.meta["val"].dtype
        if not {scores, output} <= {torch.float16, torch.bfloat16, torch.float32}:
            kinds = " and ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in (scores, output)))
            raise refuse(DTYPE, f"the matmuls compute in {kinds}", self.first)
        if scores == torch.float32 and output != scores and all(self._widened_from(lifted, w, output) for w in "qk"):
            return output  # products of widened low-precision values are exact in fp32: the kernel computes the same
        if scores == output:
            return output
        return torch.float32

    def _widened_from(self, lifted: Lifted, which: str, dtype: torch.dtype) -> bool:
        return any(n.meta["val"].dtype == dtype for n, _ in chain(self.context, lifted.lifter.space, *lifted.operand(which)))

    def _operand_views(self, space: Space, lifted: Lifted, dtype: torch.dtype) -> dict[str, View4]:
        length: dict[str, dict[sympy.Symbol, AxisName]] = {
            "q": {B: "b", H: "h", Q: "q", DIM: "d"},
            "k": {B: "b", H: "h", K: "k", DIM: "d"},
            "v": {B: "b", H: "h", K: "k", DV: "d"},
        }
        found: dict[str, list[View4]] = {}
        for which, axes in length.items():
            node, index = lifted.operand(which)
            widest = node.meta["val"].dtype.itemsize
            found[which] = [v for v in candidates(self.context, space, axes, node, index) if v.node.meta["val"].dtype.itemsize <= widest]
            if dtype == node.meta["val"].dtype or any(v.node.meta["val"].dtype == dtype for v in found[which]):
                found[which] = [v for v in found[which] if v.node.meta["val"].dtype == dtype] or found[which]
            if not found[which]:
                raise refuse(OPERANDS, f"{which.upper()} is not a reshape, permute or expand of a (batch, head, length, channel) tensor", node)
        heads = space.extent[H]
        for k in found["k"]:
            for v in found["v"]:
                groups = group_of(space, H, k), group_of(space, H, v)
                if groups[0] == groups[1] or (heads in groups and heads != ONE):
                    return {"q": found["q"][0], "k": k, "v": v}
        raise refuse(OPERANDS, "keys and values have different head groups", lifted.operand("k")[0])

    def _programs(self, lifted: Lifted) -> tuple[ScoreProgram, ScoreProgram | None, tuple[Captured, ...], tuple[Expr, ...]]:
        lifter, b = lifted.lifter, lifted.lifter.builder
        program = b.finish(lifted.score)
        unit = b.nodes[lifted.factor].op == "const" and b.nodes[lifted.factor].value == 1.0
        return program, None if unit else b.finish(lifted.factor), lifter.captures(), tuple(lifter.size_symbols)

    def _rows(self, space: Space) -> View4:
        """The softmax's rows in terms of b, h and q."""
        shape, dim = shape_of(self.anchor.input.meta["val"]), self.anchor.dim
        index = self._softmax_index[:dim] + self._softmax_index[dim + 1 :]
        axes: dict[sympy.Symbol, AxisName] = {B: "b", H: "h", Q: "q"}
        found = view_of(space, axes, self.anchor.output, index, shape[:dim] + shape[dim + 1 :])
        if found is None or not covers(space, axes, found):
            raise refuse(JOINED, "the rows of probabilities are not those of the output, one for one", self.second)
        return found

    def escapes(self, region: frozenset[fx.Node], results: set[fx.Node]) -> bool:
        """Are the probabilities used outside ``region`` too, by others than users of ``results``? Refused after a dropout."""
        path = [n for n in region if n in self.after and n not in results]
        for one in self.dropped:
            check_uses(one, self.context.order, region.union(self.anchor.parts), results)
        return any(u not in region for n in path for u in n.users)

    def _check_grad_mode(self, carriers: list[fx.Node]) -> None:
        mode = self.context.grad_mode
        if len({mode[n] for n in carriers}) <= 1:
            return
        made = {n for n in carriers if n in self.before or n in self.anchor.parts}
        modes = {mode[n] for n in made}
        if len(modes) > 1 or len({mode[n] for n in carriers if n not in made}) > 1:
            text = "part of the scores and their softmax is computed under no_grad and part is not"
        elif True in modes:
            text = "the probabilities are computed with gradients, the product with the values under no_grad"
        else:
            text = "the probabilities are computed under no_grad, the product with the values is not"
        raise refuse(GRAD_MODE, text, self.second)

    def _check_modes(self, region: frozenset[fx.Node], chains: set[fx.Node], captures: tuple[Captured, ...], views: dict[str, View4]) -> None:
        """Grad mode is one throughout, and nothing is written to between its first read in the region and the output."""
        order = self.context.order
        carriers = [*(n for n in region if n in self.before or n in self.after), *self.anchor.parts]
        self._check_grad_mode(carriers)
        last = order[self.result]
        read = set(region) | chains
        for node in {*(c.node for c in captures), *(v.node for v in views.values())}:
            write = self.context.written_between({node}, self.context.first_read(node, read, last), last)
            if write is not None:
                raise refuse(MUTATION, f"{write.target} writes to a tensor that the attention reads ({node.name})", write)
        inside = {n for n in carriers if storage_keys(n)} - {self.result}
        write = self.context.written_between(inside, min(order[n] for n in carriers), last)
        if write is not None:
            raise refuse(MUTATION, f"{write.target} changes the scores in place through a view", write)


def _transplant(after: Lifter, probability: int, lifter: Lifter, second: fx.Node) -> tuple[int, tuple[int, ...]]:
    """The factor on the probabilities, and where it is a choice of 0, as values of the score lifter's builder (captures and sizes renumbered)."""
    for node, split in after.splits.items():
        if lifter.splits.setdefault(node, split) != split:
            raise refuse(REINDEXED, "a captured tensor is read through two different views of its dimensions", node)
    lifter.narrowed |= {n: dtype for n, dtype in after.narrowed.items() if n not in lifter.captured}
    numbers = [lifter.number(node, after.builder.captures[i].rank) for i, node in enumerate(after.captured)]
    sizes = [lifter.size(s) for s in after.size_symbols]
    try:
        return factor_of(after.builder, probability, lifter.builder, numbers, sizes)
    except Refused as refused:
        raise refuse(refused.refusal.code, refused.refusal.text, second) from None


def _offset(space: Space, index: Expr, size: Expr, total: Expr) -> Expr | None:
    """The first of the ``size`` places, out of ``total``, that ``index`` runs through as k does; None if it does not."""
    start = sympy.expand(index - K) if K in index.free_symbols else index if size == 1 else None
    if start is None or start.free_symbols & set(space.extent) or not (nonnegative(start) and nonnegative(sympy.expand(total - start - size))):
        return None
    return start


def _extent(digits: D.Digits, members: tuple[sympy.Symbol, ...]) -> Expr:
    return sympy.expand(product([digits.extent[x] for x in members]))


def _words(shape: tuple[Expr, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"
