"""What the templates need to know about a plan: which tiles to visit, which program to run on them, in which units.

Tiles where every range and padding condition surely holds are *interior*: they run the program with these conditions replaced
by true, so no mask arithmetic is left there. All others are *edge* tiles: the whole program, then keys past the end are -inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from fa_inductor.facts import HIDDEN, Affine, MaskFacts
from fa_inductor.program import ProgramBuilder, ScoreProgram, dependencies, differentiate
from fa_inductor.program.evaluate import load_axes
from fa_inductor.program.tile_map import conditions
from fa_inductor.request import Plan

from .fold import LOG2E, constant_factor, may_be_minus_infinity, moderate, reads, scaled, score_scale, unscaled, without_factor


@dataclass(frozen=True)
class Flavour:
    """One form of the tile's program. Results: the exponent y, then (backward) dscore without ``factor``, then one per capture load."""

    program: ScoreProgram
    edge: bool
    folded: bool
    """y is in base-2 units: ``exp2(y - …)``."""
    scale: float | None
    """What is missing from y, which then is the score, or that or -inf."""
    minus_infinity: bool
    factor: float = 1.0

    @property
    def name(self) -> str:
        return "edge" if self.edge else "inner"


@dataclass(frozen=True)
class LoadGradient:
    """A capture's gradient at one of its loads: ``result`` is its position in the flavour's results.

    ``letters``: which of b h q k the load's indices depend on; the gradient is summed over the others. ``axes``: as ``load_axes``, or
    None for a load by index expression, whose index values are the results of ``indices``.
    """

    capture: int
    letters: str
    axes: tuple[str | int, ...] | None
    indices: ScoreProgram | None
    result: int

    @property
    def table_dimension(self) -> int | None:
        """The one dimension of a table that is read by position (q, k), if the others depend on the batch and head alone."""
        found = dependencies(self.indices.nodes) if self.indices is not None else ()
        by_position = [d for d, i in enumerate(self.indices.results) if {"q", "k"} & found[i]] if self.indices is not None else []
        return by_position[0] if len(by_position) == 1 else None

    @property
    def key(self) -> tuple[object, ...]:
        """The same load in another flavour has the same key."""
        return (self.capture, self.axes, self.indices)


def _load_gradient(program: ScoreProgram, capture: int, node: int, result: int) -> LoadGradient:
    args = program.nodes[node].args
    found = dependencies(program.nodes)
    letters = "".join(a for a in "bhqk" if any(a in found[i] for i in args))
    axes = load_axes(program, program.nodes[node])
    indices = None
    if axes is None:
        builder = ProgramBuilder.like(program)
        placed = builder.inline(ScoreProgram(program.nodes[:node], args, program.captures, program.n_sizes))
        indices = builder.finish(*(placed[i] for i in args))
    return LoadGradient(capture, letters, axes, indices, result)


def affine(bound: Affine) -> str:
    """Triton source of a bound in the size arguments."""
    return "(" + " + ".join([str(bound.constant), *(f"{c} * Z{i}" for i, c in bound.terms)]) + ")"


@dataclass(frozen=True)
class Traits:
    """Derived from a plan alone, so that equal plans give equal source."""

    plan: Plan

    @property
    def mask(self) -> MaskFacts | None:
        return self.plan.facts.mask

    @property
    def zero_rows(self) -> bool:
        return self.plan.masked_rows == "zero"

    @property
    def dropout(self) -> bool:
        return bool(self.plan.get("dropout"))

    @property
    def rejected_scores(self) -> int | None:
        """Of 2**16 scores, how many the program drops: the chance is rounded to that, like that of a probability. None where it draws nothing."""
        p = self.plan.program.drop_p
        return None if p is None else round(p * 65536)

    @property
    def random(self) -> bool:
        return self.dropout or self.rejected_scores is not None

    def single(self, kernel: str) -> bool:
        """The kernel's loop over tiles surely has one."""
        return bool(self.plan.get(f"{kernel}_single"))

    def edges(self, kernel: str) -> tuple[bool, ...]:
        """Which tiles the kernel has code for: interior (False) and edge (True)."""
        return (True,) if self.single(kernel) else (False, True)

    @property
    def exact_delta(self) -> bool:
        """The output is kept in fp32 for backward too (see ``config.sums_over_keys``)."""
        return bool(self.plan.get("exact_delta"))

    @cached_property
    def captures(self) -> tuple[int, ...]:
        """Captured tensors that a kernel must be given."""
        return tuple(sorted(reads(self.plan.program) | reads(self.plan.post)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        used = {int(n.value) for p in (self.plan.program, self.plan.post) if p for n in p.nodes if n.op == "size"}  # type: ignore[arg-type]
        for term in self.mask.terms if self.mask else ():
            used |= {i for i, _ in term.bound.terms} if term.bound else set()
        return tuple(sorted(used))

    def bound(self, kind: str) -> str | None:
        term = self.mask.term(kind) if self.mask else None  # type: ignore[arg-type]
        return affine(term.bound) if term and term.bound else None

    @property
    def lists(self) -> bool:
        """The kernels walk over lists of tiles that a pass over the mask made (``template_tiles``), not over ranges."""
        return bool(self.plan.get("lists"))

    @cached_property
    def key_terms(self) -> tuple[int, ...]:
        return tuple(t.node for t in self.mask.terms if t.kind == "key") if self.mask else ()

    # -- units and guards ----------------------------------------------------------------------------------------------
    @cached_property
    def natural(self) -> bool:
        """Row maxima are kept in natural units, because some term may be too large for base-2 units."""
        return not moderate(self.plan.program, self.plan.program.result)

    @property
    def precision(self) -> str:
        """How products of fp32 inputs are computed, as an argument of ``tl.dot``; nothing to say in half precision."""
        word = self.plan.get("precision")
        return f', input_precision="{word}"' if word else ""

    @cached_property
    def split_lse(self) -> bool:
        """An lse near a huge fill loses log(l): the rounding error is kept in a second tensor."""
        if not self.natural:
            return False
        mask = self.mask
        return mask is None or not mask.every_row_visible or not moderate(self.interior, self.interior.result)

    @cached_property
    def stored_base2(self) -> bool:
        """Backward needs the lse in base-2 units only."""
        return all(f.folded or f.scale is not None for f, _ in (self.backward_flavour(edge) for edge in (False, True)))

    @cached_property
    def conditions(self) -> ScoreProgram:
        """What must hold for a score to be visible, as the results of one program."""
        mask = self.mask
        predicates = (*(t.node for t in mask.terms), *mask.places) if mask is not None else ()
        return conditions(self.plan.program, predicates, self.plan.facts.hiding_bias if self.plan.get("lists_bias") else None, HIDDEN)

    @property
    def _least(self) -> float | None:
        """The maximum that a row must reach for hidden tiles not to matter; None where nothing is skipped, or every row does."""
        skips = self.lists or bool(self.mask and self.mask.terms)
        return self.plan.facts.skips_above(by_bias=bool(self.plan.get("lists_bias"))) if skips else None

    @cached_property
    def repair(self) -> float | None:
        """Hidden tiles must be visited for rows whose maximum stays below this; None where skipping is always exact."""
        return None if self._least == -math.inf else self._least

    @cached_property
    def flag_below(self) -> float | None:
        """In backward, a head with an lse below this visits every tile (-inf: only lse == -inf counts)."""
        return None if self._least == -math.inf and self.zero_rows else self._least

    # -- programs ------------------------------------------------------------------------------------------------------
    @cached_property
    def interior(self) -> ScoreProgram:
        program = self.plan.program
        if self.mask is None:
            return program
        builder = ProgramBuilder.like(program)
        yes = builder.const(True)
        known = (*(t.node for t in self.mask.terms), *(self.mask.places if self.lists else ()))
        placed = builder.inline(program, dict.fromkeys(known, yes))
        return builder.finish(placed[program.result])

    def _folds(self, program: ScoreProgram) -> bool:
        return moderate(program, program.result) and not (self.natural and may_be_minus_infinity(program, program.result))

    def forward_flavour(self, edge: bool) -> Flavour:
        program = self.plan.program if edge else self.interior
        folded = self._folds(program)
        builder = ProgramBuilder.like(program)
        root = builder.inline(program)[program.result]
        result = builder.finish(self._exponent(builder, root, program, folded))
        return Flavour(result, edge, folded, score_scale(program, program.result), self._minus_infinity(program))

    def _exponent(self, builder: ProgramBuilder, root: int, program: ScoreProgram, folded: bool) -> int:
        """y of a flavour: what is exponentiated, but for a factor of scores that are nothing else."""
        if score_scale(program, program.result) is not None:
            return unscaled(builder, root)
        return scaled(builder, root, LOG2E) if folded else root

    def _minus_infinity(self, program: ScoreProgram) -> bool:
        # two huge fills added overflow to -inf, as they do in eager
        return may_be_minus_infinity(program, program.result) or not moderate(program, program.result)

    def backward_flavour(self, edge: bool, wanted: Iterable[int] = ()) -> tuple[Flavour, tuple[LoadGradient, ...]]:
        """The flavour and the gradients of ``wanted`` captures that its results hold."""
        program = self.plan.program if edge else self.interior
        derived, sites = differentiate(program, sorted(wanted))
        folded = self._folds(program)
        factor = self.factor
        builder = ProgramBuilder.like(derived)
        placed = builder.inline(derived)
        y, dscore, *loads = (placed[r] for r in derived.results)
        y = self._exponent(builder, y, program, folded)
        dscore = without_factor(builder, dscore) if factor != 1.0 else dscore
        flavour = Flavour(builder.finish(y, dscore, *loads), edge, folded, score_scale(program, program.result), self._minus_infinity(program), factor)
        gradients = tuple(_load_gradient(derived, c, n, 2 + i) for i, (c, n) in enumerate(sites))
        return flavour, gradients

    @cached_property
    def factor(self) -> float:
        """Constant factor of dscore, the same on edge and interior tiles: applied once to the finished dQ and dK."""
        found = set()
        for program in (self.plan.program, self.interior):
            derived, _ = differentiate(program)
            found.add(constant_factor(derived, derived.results[1]))
        return found.pop() if len(found) == 1 else 1.0
