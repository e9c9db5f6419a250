"""Arithmetic of bounds as Triton device functions: what ``intervals`` calls. Two numbers in and out, the least and the greatest, in fp64."""

from __future__ import annotations

from fa_inductor.program.tile_map import EXACT

RULES = f"""
@triton.jit
def fa2_known(low, high, limit):
    # bounds that are no numbers, or beyond what is exact, are not known
    none = tl.full([], float("inf"), tl.float64)
    low = tl.where((low != low) | (low < -limit) | (low > limit), -none, low)
    high = tl.where((high != high) | (high > limit) | (high < -limit), none, high)
    return low, high


@triton.jit
def fa2_anything(low, high):
    return (low == float("-inf")) & (high == float("inf"))


@triton.jit
def fa2_whole_number(low, high, anything):
    none = tl.full([], float("inf"), tl.float64)
    return fa2_known(tl.where(anything, -none, low), tl.where(anything, none, high), tl.full([], {EXACT!r}, tl.float64))


@triton.jit
def fa2_rounded(low, high, anything, MARGIN: tl.constexpr):
    none = tl.full([], float("inf"), tl.float64)
    low = tl.where(anything, -none, low)
    high = tl.where(anything, none, high)
    if MARGIN > 0:
        low = low - tl.abs(low) * MARGIN
        high = high + tl.abs(high) * MARGIN
    return fa2_known(low.to(tl.float32).to(tl.float64), high.to(tl.float32).to(tl.float64), none)


@triton.jit
def fa2_add(al, au, bl, bu):
    return al + bl, au + bu


@triton.jit
def fa2_sub(al, au, bl, bu):
    return al - bu, au - bl


@triton.jit
def fa2_neg(al, au):
    return -au, -al


@triton.jit
def fa2_min(al, au, bl, bu):
    return tl.minimum(al, bl), tl.minimum(au, bu)


@triton.jit
def fa2_max(al, au, bl, bu):
    return tl.maximum(al, bl), tl.maximum(au, bu)


@triton.jit
def fa2_abs(al, au):
    low = tl.minimum(tl.abs(al), tl.abs(au))
    return tl.where((al <= 0) & (au >= 0), low * 0, low), tl.maximum(tl.abs(al), tl.abs(au))


@triton.jit
def fa2_ends(w, x, y, z, known):
    # a function that is monotone in each argument has its extremes at the ends; 0 times infinity is not among them
    none = tl.full([], float("inf"), tl.float64)
    low = tl.minimum(tl.minimum(w, x), tl.minimum(y, z))
    high = tl.maximum(tl.maximum(w, x), tl.maximum(y, z))
    return tl.where(known, low, -none), tl.where(known, high, none)


@triton.jit
def fa2_finite(al, au, bl, bu):
    none = tl.full([], float("inf"), tl.float64)
    return (tl.abs(al) < none) & (tl.abs(au) < none) & (tl.abs(bl) < none) & (tl.abs(bu) < none)


@triton.jit
def fa2_mul(al, au, bl, bu):
    return fa2_ends(al * bl, al * bu, au * bl, au * bu, fa2_finite(al, au, bl, bu))


@triton.jit
def fa2_div(al, au, bl, bu):
    return fa2_ends(al / bl, al / bu, au / bl, au / bu, fa2_finite(al, au, bl, bu) & (bl > 0))


@triton.jit
def fa2_floordiv(al, au, bl, bu):
    low, high = fa2_div(al, au, bl, bu)
    return tl.floor(low), tl.floor(high)


@triton.jit
def fa2_mod(al, au, bl, bu):
    # of one positive number: within one period the rest grows as the number does
    none = tl.full([], float("inf"), tl.float64)
    one = (bl > 0) & (bl == bu)
    first = tl.floor(al / bl)
    last = tl.floor(au / bl)
    low = tl.where(first == last, al - first * bl, 0.0)
    high = tl.where(first == last, au - last * bl, bl - 1)
    return tl.where(one, low, -none), tl.where(one, high, none)


@triton.jit
def fa2_where(m, a, xl, xu, yl, yu):
    low = tl.where(a, xl, tl.where(m, tl.minimum(xl, yl), yl))
    high = tl.where(a, xu, tl.where(m, tl.maximum(xu, yu), yu))
    return low, high
"""
