"""Recognising: score program -> ProgramFacts, by the rules in ``patterns/mask.py`` and ``patterns/score.py``."""

from __future__ import annotations

from collections.abc import Callable

import sympy
import torch

from .facts import Affine, MaskFacts, ProgramFacts
from .index import Expr
from .patterns.mask import HUGE, UNDERFLOW, mask_facts, peel
from .patterns.mask_kinds import kind_of
from .patterns.score import Core, core_of, hiding_bias, looks_like_alibi
from .program import ScoreProgram, dependencies
from .site import AttentionSite


def recognise(program: ScoreProgram, lq: Expr, lk: Expr, sizes: tuple[Expr, ...], dtype: object = torch.float32) -> ProgramFacts:
    """Facts of a program; ``lq``, ``lk`` and ``sizes`` are the (possibly symbolic) lengths and size arguments, ``dtype`` that of the scores."""

    def value(a: Affine) -> Expr:
        return a.constant + sum((c * sizes[p] for p, c in a.terms), sympy.Integer(0))

    def at_least(a: Affine, constant: int) -> bool:
        return bool((sympy.expand(value(a) - constant)).is_nonnegative)

    def square_at_least(a: Affine) -> bool:
        return bool(sympy.expand(lk - lq - value(a)).is_nonnegative)

    peeled = peel(program)
    core = core_of(program, peeled.core)
    mask = mask_facts(program, peeled, _lowest(core, dtype), at_least, square_at_least)
    plain = core.scale is not None and not core.bias
    bias = core.bias[0] if len(core.bias) == 1 else None
    labels = _labels(program, mask, core, square_at_least)
    scale = core.scale if plain or bias is not None else None
    return ProgramFacts(mask, scale, bias, core.softcap, plain and mask is None, labels, hiding_bias(program, peeled.core))


def recognise_site(site: AttentionSite) -> ProgramFacts:
    return recognise(site.program, site.axes.q, site.axes.k, site.size_symbols, site.dtype)


def _lowest(core: Core, dtype: object) -> float:
    """A bound below all unmasked scores. Sums of products in fp32 and bf16 are taken to stay above -1e30; in float16 eager's own
    scores are finite only above -65504, so that is a bound where scaling takes them further from it than a fill's reach."""
    half = torch.finfo(torch.float16).min
    scaled = core.scale is not None and not core.bias and abs(core.scale * half) + UNDERFLOW < -half
    return half if dtype == torch.float16 and scaled else -HUGE


_WORD = {"upper": "causal", "lower": "window", "key": "key padding"}


def _labels(program: ScoreProgram, mask: MaskFacts | None, core: Core, no_further: Callable[[Affine], bool]) -> tuple[str, ...]:
    """``no_further``: proves that a bound of ``k - q`` is at most Lk - Lq, which is still causal (the last query sees the last key)."""
    words: list[str] = []
    if mask is not None:
        ahead = {t for t in mask.terms if t.kind == "upper" and t.bound and not (t.bound.constant <= 0 and not t.bound.terms) and not no_further(t.bound)}
        found = {"window" if t in ahead else _WORD[t.kind] for t in mask.terms}
        words += [w for w in ("causal", "window", "key padding") if w in found]
        words += dict.fromkeys(kind_of(program, node) for node in mask.places)
    if core.softcap is not None:
        words.append(f"soft-cap {core.softcap:g}")
    for bias in core.bias:
        depends = dependencies(program.nodes)[bias]
        words.append("ALiBi" if looks_like_alibi(program, bias) else "bias" if "load" in depends else "position bias")
    if program.drop_p is not None:
        words.append("score dropout")
    elif core.scale is None and core.softcap is None:
        words.append("score function")
    return tuple(words) or ("plain",)
