"""Source of the forward kernel: one program owns a tile of query rows and walks over key tiles.

    S = program(Q K^T),  m = running row maximum,  P = exp(S - m),  l = running row sum,  O = (P * post) V / l

FlashAttention-2 (Dao, arXiv:2307.08691): the output stays unscaled in the loop and only log-sum-exp is kept for backward.
The loop is split into interior tiles, edge tiles and, where a finite fill may decide a row, a repair loop over hidden tiles
that runs only if a row of the tile has seen nothing above the fill.
"""

from __future__ import annotations

import math

from .fold import LOG2E
from .render import Renderer, literal
from .text import (
    base,
    block,
    capture_parameters,
    head_indices,
    in_order,
    indent,
    keep_scores,
    kernel,
    key_scan,
    masked,
    offsets,
    padded,
    post_factor,
    random_parameters,
    random_setup,
    strided,
    tile_loops,
    tile_pointer,
    tile_range,
    unspecialized,
)
from .traits import Flavour, Traits

LN2 = 0.6931471805599453
CONSTANTS = ("BLOCK_M", "BLOCK_N")


def parameters(traits: Traits) -> list[str]:
    names = [*strided(("Q", "K", "V", "O")), "LSE"]
    names += ["LSE_LOW"] if traits.split_lse else []
    names += strided(("O32",)) if traits.exact_delta else []
    names += ["WALK"] if traits.lists else []
    return [*names, *random_parameters(traits), *capture_parameters(traits), *(f"Z{i}" for i in traits.sizes), "H", "Lq", "Lk"]


def forward_source(traits: Traits) -> str:
    """The kernel ``fa2_forward``."""
    hoisted: list[str] = []
    tiles = {edge: _tile(traits, traits.forward_flavour(edge), hoisted) for edge in traits.edges("fwd")}
    d_in, dv_in = padded(traits)
    plan = traits.plan
    body = [
        "tiles_m = (Lq + BLOCK_M - 1) // BLOCK_M",
        "tiles_n = (Lk + BLOCK_N - 1) // BLOCK_N",
        *head_indices("tiles_m", "m_id", "H", reverse=traits.bound("upper") is not None),
        *in_order(traits, rows=True),
        f"kv_h = h // {plan.get('group')}",
        "m0 = m_id * BLOCK_M",
        "m_end = tl.minimum(m0 + BLOCK_M, Lq)",
        "q_rows = m0 + tl.arange(0, BLOCK_M)",
        "q_in = q_rows < Lq",
        "q_idx = tl.minimum(q_rows, Lq - 1)[:, None]",
        "n_local = tl.arange(0, BLOCK_N)",
        "zero = tl.full([], 0, tl.int64)",
        f"d_local = tl.arange(0, {block(int(plan.get('d')))})",
        f"dv_local = tl.arange(0, {block(int(plan.get('dv')))})",
        base("q_base", "Q", "b", "h"),
        base("k_base", "K", "b", "kv_h"),
        base("v_base", "V", "b", "kv_h"),
        offsets("k_off", "K", "n_local", "d_local"),
        offsets("v_off", "V", "n_local", "dv_local"),
        f"q_t = {masked(tile_pointer('q_base', 'Q', 'q_rows', 'd_local'), 'q_in[:, None]', d_in)}",
        *random_setup(traits),
        *tile_range(True, traits, "fwd", key_scan(traits)),
        *hoisted,
        *_accumulators(traits),
        *tile_loops(tiles.get(False, []), tiles[True], traits, "fwd"),
        *_repair(traits, tiles[True]),
        *_epilogue(traits, dv_in),
    ]
    return kernel("fa2_forward", parameters(traits), CONSTANTS, unspecialized(traits), body)


def _accumulators(traits: Traits) -> list[str]:
    if traits.single("fwd"):
        return []
    return [
        'm = tl.full([BLOCK_M], float("-inf"), tl.float32)',
        "l = tl.zeros([BLOCK_M], tl.float32)",
        f"acc = tl.zeros([BLOCK_M, {block(int(traits.plan.get('dv')))}], tl.float32)",
    ]


def _tile(traits: Traits, flavour: Flavour, hoisted: list[str]) -> list[str]:
    """Statements of one key tile."""
    d_in, dv_in = padded(traits)
    rows = "k_in[:, None]" if flavour.edge else None
    precision = traits.precision
    names = {"score": "s", "keep": keep_scores(traits, False), "b": "b", "h": "h", "q": "q_idx", "k": "k_idx"}
    ragged = {"k": ("k_rows[None, :]", "k_in[None, :]")} if flavour.edge else {}
    renderer = Renderer(flavour.program, names, ("k",), flavour.name[0], ragged)
    y = renderer.within(flavour.program.result, ("k_rows[None, :]", "Lk"), -math.inf) if flavour.edge else renderer.value(flavour.program.result)
    post_hoisted, post_lines, factor = post_factor(traits, "k", f"p{flavour.name[0]}")
    hoisted += [*renderer.hoisted, *post_hoisted]
    lines = ["n0 = t * BLOCK_N", "k_rows = n0 + n_local"]
    lines += ["k_in = k_rows < Lk"] if flavour.edge else []
    lines += [
        f"k_idx = {'tl.minimum(k_rows, Lk - 1)' if flavour.edge else 'k_rows'}[None, :]",
        f"k_t = {masked('k_base + (zero + n0) * K_s2 + k_off', rows, d_in)}",
    ]
    at = len(lines)
    lines += [
        f"s = tl.dot(q_t, tl.trans(k_t){precision})",
        *renderer.lines,
    ]
    if "score" not in flavour.program.depends_on(flavour.program.result):
        lines += [f"y = {y} + tl.zeros([BLOCK_M, BLOCK_N], tl.float32)"]
        y = "y"
    single = traits.single("fwd")
    lines += [*_softmax(traits, flavour, y), "l = tl.sum(p, 1)" if single else "l = l * alpha + tl.sum(p, 1)"]
    lines += [*post_lines, f"p = p * {factor}"] if factor else []
    if traits.dropout:
        lines += ["p = tl.where(fa2_keep(m0, n0, bh, seed, offset, threshold, BLOCK_M, BLOCK_N, False), p, 0.0)"]
    values = f"v_t = {masked('v_base + (zero + n0) * V_s2 + v_off', rows, dv_in)}"
    if single:  # all loads first: none waits for another
        return [*lines[:at], values, *lines[at:], f"acc = tl.dot(p.to(v_t.dtype), v_t{precision})"]
    return [*lines, values, "acc = acc * alpha[:, None]", f"acc = tl.dot(p.to(v_t.dtype), v_t, acc{precision})", "m = m_new"]


def _softmax(traits: Traits, flavour: Flavour, y: str) -> list[str]:
    """New row maximum, ``p`` and the factor ``alpha`` of what was accumulated before."""
    natural = traits.natural
    top = f"tl.max({y}, 1)"
    if flavour.scale is not None:
        top = f"{top} * {literal(flavour.scale * (1.0 if natural else LOG2E))}"
    elif flavour.folded and natural:
        top = f"{top} * {LN2!r}"
    single = traits.single("fwd")
    used = "m" if single else "m_new"
    lines = [f"m = {top}" if single else f"m_new = tl.maximum(m, {top})"]
    if flavour.minus_infinity:
        lines += [f'm_use = tl.where({used} == float("-inf"), 0.0, {used})']
        used = "m_use"
    if flavour.scale is not None or flavour.folded:
        exponent = f"{y} * {literal(flavour.scale * LOG2E)}" if flavour.scale is not None else y
        lines += [f"p = tl.exp2({exponent} - {f'({used} * {LOG2E!r})' if natural else used}[:, None])"]
    else:
        lines += [f"p = tl.exp2(({y} - {used}[:, None]) * {LOG2E!r})"]
    if single:
        return lines
    return [*lines, f"alpha = tl.exp2((m - {used}) * {LOG2E!r})" if natural else f"alpha = tl.exp2(m - {used})"]


def _repair(traits: Traits, edge: list[str]) -> list[str]:
    if traits.repair is None or traits.single("fwd"):
        return []
    least = traits.repair if traits.natural else traits.repair * LOG2E
    low = f"low_rows = tl.max(tl.where(q_in & (m < {literal(least)}), 1, 0), 0)"
    if traits.lists:
        return [low, "for e in tl.range(n_seen, n_seen + low_rows * (tiles_n - n_seen), num_stages=1):", *indent(["t = tl.load(walk + e)", *edge])]
    return [
        low,
        "for e in tl.range(0, low_rows * (t_lo + tiles_n - t_hi), num_stages=1):",
        *indent(["t = tl.where(e < t_lo, e, e - t_lo + t_hi)", *edge]),
    ]


def _epilogue(traits: Traits, dv_in: str | None) -> list[str]:
    scale = "keep_scale" if traits.dropout else "1.0"
    inverse = f"tl.where(l == 0.0, 0.0, {scale} / l)" if traits.zero_rows else f"{scale} / l"
    lines = [f"acc = acc * ({inverse})[:, None]", "log_l = tl.log(l)", f"lse = {'m' if traits.natural else f'm * {LN2!r}'} + log_l"]
    lines += ["row = bh.to(tl.int64) * Lq + q_rows", "tl.store(LSE + row, lse, mask=q_in)"]
    if traits.split_lse:
        lines += ['low = tl.where(lse == float("-inf"), 0.0, log_l - (lse - m))', "tl.store(LSE_LOW + row, low, mask=q_in)"]
    inside = " & ".join(["q_in[:, None]", *([dv_in] if dv_in else [])])
    if traits.exact_delta:
        lines += [base("o32_base", "O32", "b", "h"), f"tl.store({tile_pointer('o32_base', 'O32', 'q_rows', 'dv_local')}, acc, mask={inside})"]
    return [
        *lines,
        base("o_base", "O", "b", "h"),
        f"tl.store({tile_pointer('o_base', 'O', 'q_rows', 'dv_local')}, acc.to(O.dtype.element_ty), mask={inside})",
    ]
