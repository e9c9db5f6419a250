"""Source of the backward kernels. With delta = rowsum(dO * O) and P = exp(S - lse) recomputed tile by tile:

    dP = (dO V^T) * post * dropout     dS = P * (dP - delta)     dscore = dS * dprogram/dscore
    dV = (P * post * dropout)^T dO     dK = dscore^T Q           dQ = dscore K

``fa2_delta`` prepares delta. ``fa2_backward_columns`` owns a tile of keys and walks over queries (dK, dV, gradients of captures
indexed by k); ``fa2_backward_rows`` owns a tile of queries (dQ, gradients of captures not indexed by k). No atomics anywhere.
The columns kernel works on transposed scores, so that P^T and dS^T are already the left operands of its products.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

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
from .traits import Flavour, LoadGradient, Traits

CONSTANTS = ("BLOCK_M", "BLOCK_N")
ROW_PAD = 128
"""Statistics of rows are stored for multiples of so many queries in each head: no tile is larger."""


@dataclass(frozen=True)
class Wanted:
    """What one backward kernel computes: names among ``q k v``, and the captured tensors."""

    tensors: frozenset[str] = frozenset()
    captures: tuple[int, ...] = ()

    @property
    def needs_dscore(self) -> bool:
        return bool(self.captures) or bool(self.tensors & {"q", "k"})


def common_parameters(traits: Traits, outputs: Iterable[str], partials: Iterable[LoadGradient], walks: bool = False) -> list[str]:
    """``walks``: the kernel follows a list of tiles, where there are lists."""
    names = [*strided(("Q", "K", "V", "DO")), *statistics(traits), *strided(tuple(outputs)), *(f"G{i}" for i, _ in enumerate(partials))]
    names += ["FLAG"] if traits.flag_below is not None else []
    names += ["WALK"] if walks and traits.lists else []
    return [*names, *program_parameters(traits)]


def program_parameters(traits: Traits) -> list[str]:
    """What the score program reads."""
    return [*random_parameters(traits), *capture_parameters(traits), *(f"Z{i}" for i in traits.sizes), "H", "Lq", "Lk"]


# -- statistics of rows --------------------------------------------------------------------------------------------------
_PADDED = f"((Lq + {ROW_PAD - 1}) // {ROW_PAD} * {ROW_PAD})"


def statistics(traits: Traits) -> list[str]:
    """What ``fa2_delta`` writes for each row, in the form that the other kernels use, with room behind each head for whole tiles: they need no mask."""
    return ["DELTA", "ROW_LSE", *(["ROW_LOW"] if traits.split_lse and not traits.stored_base2 else [])]


def delta_parameters(traits: Traits, lse_gradient: bool) -> list[str]:
    names = [*strided(("O", "DO")), *statistics(traits), "LSE", *(["LSE_LOW"] if traits.split_lse else []), *(["DLSE"] if lse_gradient else [])]
    return [*names, *(["FLAG"] if traits.flag_below is not None else []), "H", "Lq"]


def delta_source(traits: Traits, lse_gradient: bool) -> str:
    """``fa2_delta``: delta of every row and its lse; where hidden tiles may matter, a flag per head that has such a row.

    ``lse_gradient``: the lse has a gradient too, which adds P dlse to dS = P (dP - delta). Rows past the end get lse = inf, so that P = 0.
    """
    _, dv_in = padded(traits)
    load = "tl.load({pointer}, mask={mask}, other=0.0).to(tl.float32)"
    mask = " & ".join(["q_in[:, None]", *([dv_in] if dv_in else [])])
    infinite = 'float("inf")'
    body = [
        f"tiles_m = {_PADDED} // BLOCK_M",
        *head_indices("tiles_m", "m_id", "H", reverse=False),
        "q_rows = m_id * BLOCK_M + tl.arange(0, BLOCK_M)",
        "q_in = q_rows < Lq",
        f"dv_local = tl.arange(0, {block(int(traits.plan.get('dv')))})",
        base("o_base", "O", "b", "h"),
        base("do_base", "DO", "b", "h"),
        f"o_t = {load.format(pointer=tile_pointer('o_base', 'O', 'q_rows', 'dv_local'), mask=mask)}",
        f"do_t = {load.format(pointer=tile_pointer('do_base', 'DO', 'q_rows', 'dv_local'), mask=mask)}",
        "row = bh.to(tl.int64) * Lq + q_rows",
        _STORED_ROW,
        "delta = tl.sum(o_t * do_t, 1)",
        *(["delta -= tl.load(DLSE + row, mask=q_in, other=0.0)"] if lse_gradient else []),
        "tl.store(DELTA + stored_row, delta)",
        f"lse = tl.load(LSE + row, mask=q_in, other={infinite})",
        f"stored = {f'tl.where(lse == float({chr(34)}-inf{chr(34)}), {infinite}, lse)' if traits.zero_rows else 'lse'}",
        *(["low = tl.load(LSE_LOW + row, mask=q_in, other=0.0)"] if traits.split_lse else []),
    ]
    if traits.stored_base2:
        body += [f"stored = stored * {LOG2E!r}" + (f" + low * {LOG2E!r}" if traits.split_lse else "")]
    elif traits.split_lse:
        body += ["tl.store(ROW_LOW + stored_row, low)"]
    body += ["tl.store(ROW_LSE + stored_row, stored)"]
    least = traits.flag_below
    if least is not None:
        body += [
            # a row of NaN too reaches all keys
            f"low_rows = tl.max(tl.where(lse {'==' if least == float('-inf') else '>='} {literal(least)}, {'1, 0' if least == float('-inf') else '0, 1'}), 0)",
            "tl.store(FLAG + bh, 1, mask=low_rows > 0)  # every writer writes the same value",
        ]
    return kernel("fa2_delta", delta_parameters(traits, lse_gradient), ("BLOCK_M",), ("H", "Lq"), body)


_STORED_ROW = f"stored_row = bh.to(tl.int64) * {_PADDED} + q_rows"


def row_statistics(traits: Traits, flavours: Iterable[Flavour]) -> list[str]:
    """Load delta and lse of the query rows: in base 2 where all flavours use that."""
    lines = [_STORED_ROW, f"{'lse2' if traits.stored_base2 else 'lse'} = tl.load(ROW_LSE + stored_row)", "delta = tl.load(DELTA + stored_row)"]
    if traits.stored_base2:
        return lines
    lines += ["low = tl.load(ROW_LOW + stored_row)"] if traits.split_lse else []
    return [*lines, *in_base2(traits, flavours)]


def in_base2(traits: Traits, flavours: Iterable[Flavour]) -> list[str]:
    needed = any(f.folded or f.scale is not None for f in flavours)
    return [f"lse2 = lse * {LOG2E!r}" + (f" + low * {LOG2E!r}" if traits.split_lse else "")] if needed else []


# -- one tile ------------------------------------------------------------------------------------------------------------
def gradient_tile(
    traits: Traits, flavour: Flavour, rows: bool, loop: str, want: Wanted, hoisted: list[str], values: list[int], own_delta: bool = False
) -> tuple[list[str], list[str]]:
    """Statements that define ``pv`` (what multiplies dO) and ``ds``; and the expressions of the results ``values``.

    Expects ``q_t k_t v_t do_t lse low delta q_idx k_idx`` and, on edge tiles, the column condition ``k_in`` (and ``q_in``).
    ``own_delta``: the tile holds whole rows, so that delta = rowsum(P dP) is computed here, and fp32 rows are made to sum to 1:
    the rounding of an lse of 300 alone changes a row's sum by 1e-5, and dP - delta then no longer cancels where one key takes all.
    """
    precision = traits.precision
    along_q, along_k, shape = ("[:, None]", "[None, :]", "[BLOCK_M, BLOCK_N]") if rows else ("[None, :]", "[:, None]", "[BLOCK_N, BLOCK_M]")
    dot = (lambda q, k: f"tl.dot({q}, tl.trans({k}){precision})") if rows else (lambda q, k: f"tl.dot({k}, tl.trans({q}){precision})")
    name = flavour.name[0]
    names = {"score": "s", "grad": "ds", "keep": keep_scores(traits, not rows), "b": "b", "h": "h", "q": "q_idx", "k": "k_idx"}
    axis, along = ("k", along_k) if rows else ("q", along_q)
    ragged = {axis: (f"{axis}_rows{along}", f"{axis}_in{along}")} if flavour.edge else {}
    renderer = Renderer(flavour.program, names, (loop,), name, ragged)
    root = flavour.program.results[0]
    y = renderer.within(root, (f"k_rows{along_k}", "Lk"), -math.inf) if flavour.edge else renderer.value(root)
    lines = [f"s = {dot('q_t', 'k_t')}", *renderer.lines]
    renderer.lines.clear()
    if "score" not in flavour.program.depends_on(root):
        lines += [f"y = {y} + tl.zeros({shape}, tl.float32)"]
        y = "y"
    lines += [_probabilities(traits, flavour, y, along_q)]
    if own_delta and traits.precision:
        lines += [f"total = tl.sum(p, {1 if rows else 0})", f"p = p * tl.where(total > 0, 1.0 / total, 1.0){along_q}"]
    post_hoisted, post_lines, factor = post_factor(traits, loop, f"p{name}")
    lines += post_lines
    weight = factor
    if traits.dropout:
        keep = f"tl.where(fa2_keep(m0, n0, bh, seed, offset, threshold, BLOCK_M, BLOCK_N, {not rows}), keep_scale, 0.0)"
        weight = f"({keep}) * {factor}" if factor else keep
    if weight:
        lines += [f"w = {weight}"]
    if "v" in want.tensors:
        lines += ["pv = p * w" if weight else "pv = p"]
    results: list[str] = []
    if want.needs_dscore:
        lines += [f"dp = {dot('do_t', 'v_t')}", *(["dp = dp * w"] if weight else [])]
        lines += [f"delta = tl.sum(p * dp, {1 if rows else 0})"] if own_delta else []
        lines += [f"ds = p * (dp - delta{along_q})"]
        inside = (f"k_rows{along_k}", "Lk") if rows else (f"q_rows{along_q}", "Lq")
        results = [(renderer.within(n, inside, 0.0) if flavour.edge else renderer.value(n)) for n in (flavour.program.results[i] for i in values)]
        lines += renderer.lines
    hoisted += [*renderer.hoisted, *post_hoisted]
    return lines, results


def _probabilities(traits: Traits, flavour: Flavour, y: str, along_q: str) -> str:
    if flavour.scale is not None or flavour.folded:
        exponent = f"{y} * {literal(flavour.scale * LOG2E)}" if flavour.scale is not None else y
        return f"p = tl.exp2({exponent} - lse2{along_q})"
    low = f" - low{along_q}" if traits.split_lse else ""
    return f"p = tl.exp2(({y} - lse{along_q}{low}) * {LOG2E!r})"


def _flagged(traits: Traits, tiles: str, kernel: str) -> list[str]:
    """A head with a row that hidden tiles decide visits all tiles."""
    if traits.flag_below is None or traits.single(kernel):
        return []
    if traits.lists:
        return [f"n_seen = tl.where(tl.load(FLAG + bh) != 0, {tiles}, n_seen)"]
    return ["whole = tl.load(FLAG + bh) != 0", "t_lo = tl.where(whole, 0, t_lo)", f"t_hi = tl.where(whole, {tiles}, t_hi)"]


def _positions(
    traits: Traits, flavour_gradients: tuple[LoadGradient, ...], wanted: tuple[LoadGradient, ...], captures: tuple[int, ...]
) -> list[tuple[int, int]]:
    """(position among the kernel's partial sums, result of the flavour) for the gradients that this flavour has."""
    index = {g.key: i for i, g in enumerate(wanted)}
    known = {g.key for g in traits.backward_flavour(True, captures)[1]}
    assert all(g.key in known for g in flavour_gradients), "an interior tile reads a captured tensor as no edge tile does"
    return [(index[g.key], g.result) for g in flavour_gradients if g.key in index]


# -- dQ ------------------------------------------------------------------------------------------------------------------
def rows_source(traits: Traits, want: Wanted, partials: tuple[LoadGradient, ...]) -> str:
    """``fa2_backward_rows``."""
    plan = traits.plan
    d_in, dv_in = padded(traits)
    hoisted: list[str] = []
    tiles, flavours = {}, []
    for edge in traits.edges("rows"):
        flavour, gradients = traits.backward_flavour(edge, want.captures)
        flavours.append(flavour)
        tiles[edge] = _rows_tile(traits, flavour, want, _positions(traits, gradients, partials, want.captures), hoisted)
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
        *tile_setup(traits),
        base("k_base", "K", "b", "kv_h"),
        base("v_base", "V", "b", "kv_h"),
        base("q_base", "Q", "b", "h"),
        base("do_base", "DO", "b", "h"),
        "n_local = tl.arange(0, BLOCK_N)",
        offsets("k_off", "K", "n_local", "d_local"),
        offsets("v_off", "V", "n_local", "dv_local"),
        f"q_t = {masked(tile_pointer('q_base', 'Q', 'q_rows', 'd_local'), 'q_in[:, None]', d_in)}",
        f"do_t = {masked(tile_pointer('do_base', 'DO', 'q_rows', 'dv_local'), 'q_in[:, None]', dv_in)}",
        "row = bh.to(tl.int64) * Lq + q_rows",
        *row_statistics(traits, flavours),
        *tile_range(True, traits, "rows", key_scan(traits)),
        *_flagged(traits, "tiles_n", "rows"),
        *hoisted,
        *([f"dq = tl.zeros([BLOCK_M, {block(int(plan.get('d')))}], tl.float32)"] if "q" in want.tensors else []),
        *(f"g{i} = tl.zeros([BLOCK_M], tl.float32)" for i, _ in enumerate(partials)),
        *tile_loops(tiles.get(False, []), tiles[True], traits, "rows"),
    ]
    if "q" in want.tensors:
        inside = " & ".join(["q_in[:, None]", *([d_in] if d_in else [])])
        scaled = f"dq * {literal(traits.factor)}" if traits.factor != 1.0 else "dq"
        body += [
            base("dq_base", "DQ", "b", "h"),
            f"tl.store({tile_pointer('dq_base', 'DQ', 'q_rows', 'd_local')}, ({scaled}).to(DQ.dtype.element_ty), mask={inside})",
        ]
    body += [f"tl.store(G{i} + row, g{i}, mask=q_in)" for i, _ in enumerate(partials)]
    outputs = ["DQ"] if "q" in want.tensors else []
    return kernel("fa2_backward_rows", common_parameters(traits, outputs, partials, walks=True), CONSTANTS, unspecialized(traits), body)


def tile_setup(traits: Traits) -> list[str]:
    return [
        "zero = tl.full([], 0, tl.int64)",
        f"d_local = tl.arange(0, {block(int(traits.plan.get('d')))})",
        f"dv_local = tl.arange(0, {block(int(traits.plan.get('dv')))})",
        *random_setup(traits),
    ]


def _rows_tile(traits: Traits, flavour: Flavour, want: Wanted, sums: list[tuple[int, int]], hoisted: list[str]) -> list[str]:
    d_in, dv_in = padded(traits)
    condition = "k_in[:, None]" if flavour.edge else None
    want_dq = "q" in want.tensors
    values = [*([1] if want_dq else []), *(r for _, r in sums)]
    lines, results = gradient_tile(traits, flavour, True, "k", want, hoisted, values)
    out = ["n0 = t * BLOCK_N", "k_rows = n0 + n_local"]
    out += ["k_in = k_rows < Lk"] if flavour.edge else []
    out += [
        f"k_idx = {'tl.minimum(k_rows, Lk - 1)' if flavour.edge else 'k_rows'}[None, :]",
        f"k_t = {masked('k_base + (zero + n0) * K_s2 + k_off', condition, d_in)}",
        f"v_t = {masked('v_base + (zero + n0) * V_s2 + v_off', condition, dv_in)}",
        *lines,
    ]
    if want_dq:
        out += [f"dq = tl.dot(({results.pop(0)}).to(k_t.dtype), k_t, dq{traits.precision})"]
    return [*out, *(f"g{i} += tl.sum({r}, 1)" for (i, _), r in zip(sums, results, strict=True))]


# -- dK, dV --------------------------------------------------------------------------------------------------------------
def columns_source(traits: Traits, want: Wanted, partials: tuple[LoadGradient, ...]) -> str:
    """``fa2_backward_columns``: the loop over the query heads of a group is inside, so that grouped heads need no atomics."""
    plan = traits.plan
    d_in, dv_in = padded(traits)
    group = int(plan.get("group"))
    hoisted: list[str] = []
    tiles = {}
    for edge in traits.edges("columns"):
        flavour, gradients = traits.backward_flavour(edge, want.captures)
        tiles[edge] = _columns_tile(traits, flavour, want, _positions(traits, gradients, partials, want.captures), hoisted)
    head = [
        "bh = b * H + h",
        base("q_base", "Q", "b", "h"),
        base("do_base", "DO", "b", "h"),
        *tile_range(False, traits, "columns", _key_tile(traits)),
        *_flagged(traits, "tiles_m", "columns"),
        *hoisted,
        *(f"g{i} = tl.zeros([BLOCK_N], tl.float32)" for i, _ in enumerate(partials)),
        *tile_loops(tiles.get(False, []), tiles[True], traits, "columns"),
        *(f"tl.store(G{i} + bh.to(tl.int64) * Lk + k_rows, g{i}, mask=k_in)" for i, _ in enumerate(partials)),
    ]
    heads = [f"for member in tl.range(0, {group}, num_stages=1):", *indent([f"h = kv_h * {group} + member", *head])] if group > 1 else ["h = kv_h", *head]
    body = [
        "tiles_m = (Lq + BLOCK_M - 1) // BLOCK_M",
        "tiles_n = (Lk + BLOCK_N - 1) // BLOCK_N",
        f"kv_heads = H // {group}",
        "pid = tl.program_id(0)",
        "n_id = pid % tiles_n",
        "b = (pid // tiles_n) // kv_heads",
        "kv_h = (pid // tiles_n) % kv_heads",
        *([f"h = kv_h * {group}", "bh = b * H + h", *in_order(traits, rows=False)] if traits.lists else []),
        "n0 = n_id * BLOCK_N",
        "n_end = tl.minimum(n0 + BLOCK_N, Lk)",
        "k_rows = n0 + tl.arange(0, BLOCK_N)",
        "k_in = k_rows < Lk",
        "k_idx = tl.minimum(k_rows, Lk - 1)[:, None]",
        *tile_setup(traits),
        base("k_base", "K", "b", "kv_h"),
        base("v_base", "V", "b", "kv_h"),
        "m_local = tl.arange(0, BLOCK_M)",
        offsets("q_off", "Q", "m_local", "d_local"),
        offsets("do_off", "DO", "m_local", "dv_local"),
        f"k_t = {masked(tile_pointer('k_base', 'K', 'k_rows', 'd_local'), 'k_in[:, None]', d_in)}",
        *([f"v_t = {masked(tile_pointer('v_base', 'V', 'k_rows', 'dv_local'), 'k_in[:, None]', dv_in)}"] if want.needs_dscore else []),
        *([f"dk = tl.zeros([BLOCK_N, {block(int(plan.get('d')))}], tl.float32)"] if "k" in want.tensors else []),
        *([f"dv = tl.zeros([BLOCK_N, {block(int(plan.get('dv')))}], tl.float32)"] if "v" in want.tensors else []),
        *heads,
    ]
    outputs = []
    for letter, local, condition, scale in (("k", "d_local", d_in, traits.factor), ("v", "dv_local", dv_in, 1.0)):
        if letter in want.tensors:
            tensor = f"D{letter.upper()}"
            outputs.append(tensor)
            inside = " & ".join(["k_in[:, None]", *([condition] if condition else [])])
            value = f"(d{letter} * {literal(scale)})" if scale != 1.0 else f"d{letter}"
            body += [
                base(f"d{letter}_base", tensor, "b", "kv_h"),
                f"tl.store({tile_pointer(f'd{letter}_base', tensor, 'k_rows', local)}, {value}.to({tensor}.dtype.element_ty), mask={inside})",
            ]
    return kernel("fa2_backward_columns", common_parameters(traits, outputs, partials, walks=True), CONSTANTS, unspecialized(traits), body)


def _key_tile(traits: Traits) -> list[str]:
    """Narrow the query range by the padding conditions on the program's own keys; a ragged key tile has no interior."""
    lines: list[str] = []
    if traits.key_terms:
        renderer = Renderer(traits.plan.program, {"b": "b", "h": "h", "k": "k_idx"}, (), "s")
        visible = " & ".join(renderer.value(t) for t in traits.key_terms)
        lines = [
            *renderer.hoisted,
            f"key_seen = tl.max(tl.where(({visible}) & k_in[:, None], 1, 0))",
            f"key_all = tl.min(tl.where({visible}, 1, 0))",
            "hi = tl.where(key_seen > 0, hi, 0)",
            "full_hi = tl.where(key_all > 0, full_hi, 0)",
        ]
    return [*lines, "full_hi = tl.where(n0 + BLOCK_N <= Lk, full_hi, 0)"]


def _columns_tile(traits: Traits, flavour: Flavour, want: Wanted, sums: list[tuple[int, int]], hoisted: list[str]) -> list[str]:
    d_in, dv_in = padded(traits)
    condition = "q_in[:, None]" if flavour.edge else None
    values = [*([1] if "k" in want.tensors else []), *(r for _, r in sums)]
    lines, results = gradient_tile(traits, flavour, False, "q", want, hoisted, values)
    precision = traits.precision
    out = ["m0 = t * BLOCK_M", "q_rows = m0 + m_local"]
    out += ["q_in = q_rows < Lq"] if flavour.edge else []
    out += [
        f"q_idx = {'tl.minimum(q_rows, Lq - 1)' if flavour.edge else 'q_rows'}[None, :]",
        f"q_t = {masked('q_base + (zero + m0) * Q_s2 + q_off', condition, d_in)}",
        f"do_t = {masked('do_base + (zero + m0) * DO_s2 + do_off', condition, dv_in)}",
        *row_statistics(traits, (flavour,)),
        *lines,
    ]
    if "v" in want.tensors:
        out += [f"dv = tl.dot(pv.to(do_t.dtype), do_t, dv{precision})"]
    if "k" in want.tensors:
        out += [f"dk = tl.dot(({results.pop(0)}).to(q_t.dtype), q_t, dk{precision})"]
    return [*out, *(f"g{i} += tl.sum({r}, 1)" for (i, _), r in zip(sums, results, strict=True))]


# -- captures indexed by both q and k ------------------------------------------------------------------------------------
def dense_source(traits: Traits, gradient: LoadGradient, table: bool = False) -> str:
    """``fa2_backward_dense``: one tile of a capture's gradient, summed in registers over the (b, h) that read it.

    Programs with the same tile split these (b, h) into CHUNKS parts, each with its own output: no atomics. ``fa2_backward_table``: the
    capture is a table read by index; the tile is summed over the places that read one entry, and one atomic addition made for each.
    """
    plan = traits.plan
    d_in, dv_in = padded(traits)
    flavour, gradients = traits.backward_flavour(True, (gradient.capture,))
    hoisted: list[str] = []
    result = next(g.result for g in gradients if g.key == gradient.key)
    lines, (value,) = gradient_tile(traits, flavour, True, "bh", Wanted(captures=(gradient.capture,)), hoisted, [result])
    loop = [
        *reduced_heads(gradient),
        "bh = b * H + h",
        f"kv_h = h // {plan.get('group')}",
        base("q_base", "Q", "b", "h"),
        base("do_base", "DO", "b", "h"),
        base("k_base", "K", "b", "kv_h"),
        base("v_base", "V", "b", "kv_h"),
        f"q_t = {masked('q_base + q_off', 'q_in[:, None]', d_in)}",
        f"do_t = {masked('do_base + do_off', 'q_in[:, None]', dv_in)}",
        f"k_t = {masked('k_base + k_off', 'k_in[:, None]', d_in)}",
        f"v_t = {masked('v_base + v_off', 'k_in[:, None]', dv_in)}",
        *row_statistics(traits, (flavour,)),
        *hoisted,
        *lines,
        f"acc += {value}",
    ]
    body = [
        "tiles_m = (Lq + BLOCK_M - 1) // BLOCK_M",
        "tiles_n = (Lk + BLOCK_N - 1) // BLOCK_N",
        "pid = tl.program_id(0)",
        "n0 = pid % tiles_n * BLOCK_N",
        "m0 = pid // tiles_n % tiles_m * BLOCK_M",
        "outer = pid // (tiles_n * tiles_m)",
        *kept_heads(gradient),
        "q_rows = m0 + tl.arange(0, BLOCK_M)",
        "k_rows = n0 + tl.arange(0, BLOCK_N)",
        "q_in = q_rows < Lq",
        "k_in = k_rows < Lk",
        "q_idx = tl.minimum(q_rows, Lq - 1)[:, None]",
        "k_idx = tl.minimum(k_rows, Lk - 1)[None, :]",
        *tile_setup(traits),
        *(
            offsets(f"{t.lower()}_off", t, r, d)
            for t, r, d in (("Q", "q_rows", "d_local"), ("DO", "q_rows", "dv_local"), ("K", "k_rows", "d_local"), ("V", "k_rows", "dv_local"))
        ),
        "acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)",
        *_visible_tile(traits),
        "for member in tl.range(begin, end, num_stages=1):",
        *indent(loop),
    ]
    body += (
        _table_entries(gradient)
        if table
        else [
            sum_place(gradient),
            "tl.store(place + q_rows.to(tl.int64)[:, None] * Lk + k_rows[None, :], acc.to(G0.dtype.element_ty), mask=q_in[:, None] & k_in[None, :])",
        ]
    )
    parameters = [*common_parameters(traits, (), (gradient,)), "B", "CHUNKS"]
    return kernel(f"fa2_backward_{'table' if table else 'dense'}", parameters, CONSTANTS, [*unspecialized(traits), "B", "CHUNKS"], body)


def _table_entries(gradient: LoadGradient) -> list[str]:
    """Add ``acc`` to the entries of G0, a table of the capture's shape, that its elements read. A tile reads few different entries."""
    program, by_position = gradient.indices, gradient.table_dimension
    assert program is not None and by_position is not None
    kept = {"bh": ("kept // H", "kept % H"), "b": ("kept", "0"), "h": ("0", "kept")}.get("".join(x for x in "bh" if x in gradient.letters), ("0", "0"))
    renderer = Renderer(program, {"b": "kept_b", "h": "kept_h", "q": "q_idx", "k": "k_idx"}, (), "i")
    for result in program.results:
        renderer.value(result)
    lengths = [f"C{gradient.capture}_n{d}" for d in range(len(program.results))]
    places = [renderer.address(result, length) for result, length in zip(program.results, lengths, strict=True)]
    strides = [" * ".join(lengths[d + 1 :]) or "1" for d in range(len(places))]
    others = [f"{place} * ({strides[d]})" for d, place in enumerate(places) if d != by_position]
    return [
        f"kept_b = {kept[0]}",
        f"kept_h = {kept[1]}",
        *renderer.hoisted,
        *renderer.lines,
        "inside = q_in[:, None] & k_in[None, :]",
        f"entry = {places[by_position]}.to(tl.int32) + tl.zeros([BLOCK_M, BLOCK_N], tl.int32)",
        f"place = {' + '.join(['G0', *others])}",
        "first = tl.min(tl.where(inside, entry, 2147483647))",
        "last = tl.where(begin < end, tl.max(tl.where(inside, entry, -1)), -1)",
        "for at in tl.range(first, last + 1, num_stages=1):",
        "    total = tl.sum(tl.where(inside & (entry == at), acc, 0.0))",
        f"    tl.atomic_add(place + at * ({strides[by_position]}), total)",
    ]


def kept_heads(gradient: LoadGradient) -> list[str]:
    """``kept``: the (b, h) part of the output that this program writes; ``begin, end``: the members it sums."""
    both, letters = {"b", "h"} <= set(gradient.letters), gradient.letters
    if both:
        return ["kept = outer", "chunk = outer * 0", "begin = outer * 0", "end = begin + 1"]
    kept_count, members = ("H", "B") if "h" in letters else ("B", "H") if "b" in letters else ("1", "B * H")
    return [
        f"kept_count = {kept_count}",
        f"members = {members}",
        "kept = outer % kept_count",
        "chunk = outer // kept_count",
        "share = (members + CHUNKS - 1) // CHUNKS",
        "begin = tl.minimum(chunk * share, members)",
        "end = tl.minimum(begin + share, members)",
    ]


def sum_place(gradient: LoadGradient) -> str:
    """``place``: where the (q, k) sums of this program's heads and chunk begin."""
    outer = {2: "kept", 1: "chunk.to(tl.int64) * kept_count + kept", 0: "chunk"}[len(set(gradient.letters) & {"b", "h"})]
    return f"place = G0 + ({outer}).to(tl.int64) * Lq * Lk"


def reduced_heads(gradient: LoadGradient) -> list[str]:
    letters = gradient.letters
    if "b" in letters and "h" in letters:
        return ["b = kept // H", "h = kept % H"]
    if "h" in letters:
        return ["b = member + kept * 0", "h = kept"]
    return ["b = kept", "h = member + kept * 0"] if "b" in letters else ["b = (member + kept * 0) // H", "h = (member + kept * 0) % H"]


def _visible_tile(traits: Traits) -> list[str]:
    """Skip a tile that the range conditions hide, where hidden scores certainly have no gradient."""
    upper, lower = traits.bound("upper"), traits.bound("lower")
    if traits.flag_below is not None or not (upper or lower):
        return []
    tests = [f"(n0 <= tl.minimum(m0 + BLOCK_M, Lq) - 1 + {upper})"] if upper else []
    tests += [f"(tl.minimum(n0 + BLOCK_N, Lk) - 1 >= m0 + {lower})"] if lower else []
    return [f"end = tl.where({' & '.join(tests)}, end, begin)"]


SUM = """
@triton.jit(do_not_specialize=["CHUNKS", "elements"])
def fa2_sum(PARTS, OUT, elements, CHUNKS, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    total = tl.zeros([BLOCK], tl.float32)
    for chunk in tl.range(0, CHUNKS):
        total += tl.load(PARTS + (at * 0 + chunk) * elements + at, mask=inside, other=0.0)
    tl.store(OUT + at, total.to(OUT.dtype.element_ty), mask=inside)
"""
"""Adds up the chunks of a dense gradient."""
