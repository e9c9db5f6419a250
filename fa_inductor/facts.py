"""What the recognise rules prove about a score program: inputs of kernel choice and of tile skipping.

Bounds are affine in the size arguments, so that one plan serves every length: ``constant + sum(coefficient * sizes[i])``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TermKind = Literal["upper", "lower", "key"]


@dataclass(frozen=True)
class Affine:
    """``constant + sum(c * sizes[i] for i, c in terms)``."""

    constant: int = 0
    terms: tuple[tuple[int, int], ...] = ()

    def value(self, sizes: Sequence[int]) -> int:
        result = self.constant
        for position, coefficient in self.terms:
            result = result + coefficient * sizes[position]
        return result


@dataclass(frozen=True)
class MaskTerm:
    """One conjunct of the visibility predicate.

    Kinds:
        ``upper``  true exactly where ``k - q <= bound`` (causal: bound 0; bottom-right causal: Lk - Lq)
        ``lower``  true exactly where ``k - q >= bound`` (sliding window)
        ``key``    depends on (b, h, k) and captured tensors only (padding)
    """

    kind: TermKind
    node: int
    """The boolean node of the score program."""
    bound: Affine | None = None


@dataclass(frozen=True)
class MaskFacts:
    """A score is visible where all terms (and the unclassified rest) hold; elsewhere it is hidden.

    ``hidden="replace"``: a hidden element of the program's result is exactly ``fill``.
    ``hidden="add"``: it is ``x + fill`` with x depending on the score (only reported for ``fill`` <= -1e30 or -inf).
    ``hidden="mixed"``: the one or the other, by what hides it; a score that is replaced has no gradient, one that is added to has.

    A tile of hidden elements cannot change a row whose running maximum is at least ``skip_above`` (its exponentials are
    exactly 0 in fp32): skipping is then exact. ``every_row_visible`` says that each row provably has a visible key, so the
    check can be dropped. With ``fill = -inf`` hidden tiles never matter (``skip_above = -inf``): a row without a visible key
    is NaN in eager whether or not they are visited.
    """

    fill: float
    hidden: Literal["replace", "add", "mixed"]
    terms: tuple[MaskTerm, ...]
    every_row_visible: bool
    skip_above: float
    every_row_keeps_a_key: bool = False
    """No row is hidden as a whole by this mask, of -inf, nor by another of -inf; finite fills may hide all keys of a row (``every_row_visible``)."""
    places: tuple[int, ...] = ()
    """The other conjuncts that tell a tile by its place, or by tensors that are read there (``program/tile_map.py``)."""

    @property
    def only_these_terms(self) -> bool:
        """The predicate is exactly the conjunction of ``terms``: where they all hold, the mask is off."""
        return not self.places

    def term(self, kind: TermKind) -> MaskTerm | None:
        """The first term of that kind."""
        return next((t for t in self.terms if t.kind == kind), None)


HIDDEN = -1e38
"""A number at or below this, added to a score, hides it from every row whose maximum is at least a tenth of it: -inf and the least numbers of
fp32 and bf16, so that no other bias of a sane size brings it back."""


@dataclass(frozen=True)
class ProgramFacts:
    """``mask`` as above; the rest describes the program with the mask taken off.

    ``scale``: the unmasked program is ``scale * score + bias``; None if it is not of that form (soft-cap …).
    ``bias``: the bias node (independent of the score), None without a bias or when ``scale`` is None.
    ``softcap``: cap of ``cap * tanh(scale * score / cap)``.
    ``plain``: exactly ``scale * score``.
    ``hiding_bias``: a captured tensor of (b, q, k) that is added to the scores, and may be a mask: where it is at most ``HIDDEN``.
    ``labels``: words for the report, e.g. ("causal", "key padding", "soft-cap 50", "ALiBi").
    """

    mask: MaskFacts | None = None
    scale: float | None = None
    bias: int | None = None
    softcap: float | None = None
    plain: bool = False
    labels: tuple[str, ...] = ()
    hiding_bias: int | None = None

    def skips_above(self, by_bias: bool) -> float | None:
        """The running maximum from which hidden tiles do not matter to a row; None where every row surely reaches it.

        Args:
            by_bias: tiles that the bias hides are skipped too.
        """
        mask = self.mask
        least = [mask.skip_above] if mask is not None and not mask.every_row_visible else []
        if by_bias and self.hiding_bias is not None:
            least += [HIDDEN / 10, *([mask.skip_above] if mask is not None else [])]
        return max(least, default=None)
