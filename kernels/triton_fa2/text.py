"""Assembling Triton source: indentation, parameter lists, and the pieces that several kernels share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .intervals import letters
from .render import Renderer
from .traits import Traits

TENSORS = {"Q": 4, "K": 4, "V": 4, "O": 4, "O32": 4, "DO": 4, "DQ": 4, "DK": 4, "DV": 4}
"""Tensors of rank 4 and arbitrary strides; every other tensor of a kernel is contiguous."""


def indent(lines: Iterable[str], levels: int = 1) -> list[str]:
    return ["    " * levels + line if line else "" for line in lines]


def strided(names: Sequence[str]) -> list[str]:
    """Parameters of rank-4 tensors: the pointer, then its strides."""
    return [p for name in names for p in (name, *(f"{name}_s{d}" for d in range(TENSORS[name])))]


def indirect(traits: Traits) -> frozenset[int]:
    """Captures with an index that may be negative: their lengths are parameters too."""
    found = set()
    for program in (traits.plan.program, traits.plan.post):
        for node in program.nodes if program else ():
            if node.op == "load" and any(not _plainly_positive(program.nodes[a].op, program.nodes[a].value) for a in node.args):
                found.add(int(node.value))  # type: ignore[arg-type]
    return frozenset(found)


def _plainly_positive(op: str, value: object) -> bool:
    return op == "index" or (op == "const" and isinstance(value, int) and value >= 0)


def capture_parameters(traits: Traits) -> list[str]:
    out = []
    for c in traits.captures:
        rank = traits.plan.program.captures[c].rank
        out += [f"C{c}", *(f"C{c}_s{d}" for d in range(rank))]
        if c in indirect(traits):
            out += [f"C{c}_n{d}" for d in range(rank)]
    return out


def unspecialized(traits: Traits) -> list[str]:
    """Head counts, lengths and sizes: one compiled kernel serves every value."""
    return [
        "H",
        "Lq",
        "Lk",
        *(f"Z{i}" for i in traits.sizes),
        *(f"C{c}_n{d}" for c in sorted(indirect(traits)) for d in range(traits.plan.program.captures[c].rank)),
    ]


def kernel(name: str, parameters: Sequence[str], constants: Sequence[str], fixed: Sequence[str], body: Sequence[str]) -> str:
    """A complete kernel definition; ``fixed`` parameters are not specialised on their values."""
    quoted = ", ".join(f'"{p}"' for p in fixed)
    lines = [f"@triton.jit(do_not_specialize=[{quoted}])" if fixed else "@triton.jit", f"def {name}("]
    lines += indent(_wrap([*parameters, *(f"{c}: tl.constexpr" for c in constants)]))
    return "\n".join([*lines, "):", *indent(body)]) + "\n"


def _wrap(words: Sequence[str], width: int = 120) -> list[str]:
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += f"{word}, "
    return [line.rstrip() for line in lines]


def head_indices(tiles: str, tile: str, heads: str, reverse: bool) -> list[str]:
    """Program id -> (tile, b, h); ``reverse`` starts with the last tile, which has the most work under a causal mask."""
    own = f"pid % {tiles}"
    return [
        "pid = tl.program_id(0)",
        f"{tile} = {tiles} - 1 - {own}" if reverse else f"{tile} = {own}",
        f"bh = pid // {tiles}",
        f"b = bh // {heads}",
        f"h = bh % {heads}",
    ]


def base(pointer: str, tensor: str, batch: str, head: str) -> str:
    return f"{pointer} = {tensor} + {batch}.to(tl.int64) * {tensor}_s0 + {head}.to(tl.int64) * {tensor}_s1"


def tile_pointer(pointer: str, tensor: str, rows: str, columns: str) -> str:
    """Pointers to [rows, columns] of a (b, h) slice; rows may be past 2**31 elements away."""
    return f"{pointer} + {rows}.to(tl.int64)[:, None] * {tensor}_s2 + {columns}[None, :] * {tensor}_s3"


def offsets(name: str, tensor: str, rows: str, columns: str) -> str:
    """Offsets of a tile from its first row, constant through a loop."""
    return f"{name} = {rows}.to(tl.int64)[:, None] * {tensor}_s2 + {columns}[None, :] * {tensor}_s3"


def masked(pointer: str, *conditions: str | None) -> str:
    """A load that gives 0 where a condition fails."""
    present = [c for c in conditions if c]
    return f"tl.load({pointer}, mask={' & '.join(present)}, other=0.0)" if present else f"tl.load({pointer})"


def padded(traits: Traits) -> tuple[str | None, str | None]:
    """Conditions on the head dimension where it is padded to a power of two: for D and for Dv."""
    conditions = []
    for name, local in (("d", "d_local"), ("dv", "dv_local")):
        size = int(traits.plan.get(name))
        conditions.append(None if size == block(size) else f"({local} < {size})[None, :]")
    return conditions[0], conditions[1]


def block(size: int) -> int:
    """Head dimension as a tile: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def tile_range(rows: bool, traits: Traits, kernel: str, predicate: Sequence[str] = ()) -> list[str]:
    """Bounds ``t_lo <= f_lo <= f_hi <= t_hi`` of the loop's tiles: outside [t_lo, t_hi) all is hidden, [f_lo, f_hi) is interior.

    Nothing where there is one tile: it is always visited, which is what eager does.

    Args:
        rows: the program owns query rows [m0, m_end) and loops over keys; otherwise keys [n0, n_end) over queries.
        predicate: statements that narrow ``lo hi full_lo full_hi`` further (the scan of padding conditions).
    """
    if traits.single(kernel):
        return []
    if traits.lists:
        return _listed(traits, rows)
    upper, lower = traits.bound("upper"), traits.bound("lower")
    length, size, tiles = ("Lk", "BLOCK_N", "tiles_n") if rows else ("Lq", "BLOCK_M", "tiles_m")
    # sums with a tensor, because a length of 1 may arrive as a constant, which a loop cannot carry
    lines = ["none = tl.full([], 0, tl.int32)", "lo = none", f"hi = {length} + none", "full_lo = none", f"full_hi = {length} + none"]
    if rows:
        if upper:
            lines += [f"hi = tl.minimum(hi, m_end + {upper})", f"full_hi = tl.minimum(full_hi, m0 + {upper} + 1)"]
        if lower:
            lines += [f"lo = tl.maximum(lo, m0 + {lower})", f"full_lo = tl.maximum(full_lo, m_end - 1 + {lower})"]
    else:
        if upper:
            lines += [f"lo = tl.maximum(lo, n0 - {upper})", f"full_lo = tl.maximum(full_lo, n_end - 1 - {upper})"]
        if lower:
            lines += [f"hi = tl.minimum(hi, n_end - {lower})", f"full_hi = tl.minimum(full_hi, n0 - {lower} + 1)"]
    return [
        *lines,
        *predicate,
        f"t_lo = tl.minimum(lo // {size}, {tiles})",
        f"t_hi = tl.maximum((tl.maximum(hi, 0) + {size} - 1) // {size}, t_lo)",
        f"f_lo = tl.minimum((full_lo + {size} - 1) // {size}, t_hi)",
        "f_lo = tl.maximum(f_lo, t_lo)",
        f"f_hi = tl.minimum(tl.maximum(full_hi, 0) // {size}, t_hi)",
        "f_hi = tl.maximum(f_hi, f_lo)",
    ]


BESIDE = 6
"""Columns of a list beside its tiles: two numbers in front, four behind."""

_MAPS = {"bh": "bh", "b": "b", "h": "h", "": "0"}
"""The number of the map of (b, h), by what the mask depends on."""


def in_order(traits: Traits, rows: bool) -> list[str]:
    """The program's own tile, where there are lists, and how its list begins: the tiles with most to visit come first."""
    if not traits.lists:
        return []
    own, tiles, others = _sides(rows)
    lines = [f"front = WALK + {_listed_row(traits, tiles, f'pid % {tiles}', others)} + {others} + 2", f"{own} = tl.load(front)"]
    return [*lines, *(f"front_{name} = tl.load(front + {i})" for i, name in enumerate(("full", "seen", "tile"), 1))] if _one_list(traits, rows) else lines


def _listed(traits: Traits, rows: bool) -> list[str]:
    """``walk``: this program's list of tiles, ``n_full`` full ones first, then the others of ``n_seen``."""
    own, tiles, others = _sides(rows)
    lines = [f"walk = WALK + {_listed_row(traits, tiles, own, others)} + 2"]
    sources = [f"front_{name}" for name in ("full", "seen", "tile")] if _one_list(traits, rows) else ["tl.load(walk - 2)", "tl.load(walk - 1)", "tl.load(walk)"]
    return [*lines, *(f"{name} = {source}" for name, source in zip(("n_full", "n_seen", "t_next"), sources, strict=True))]


def _one_list(traits: Traits, rows: bool) -> bool:
    """The heads that a program walks over, one or a group of them, have the same list."""
    return rows or int(traits.plan.get("group")) == 1 or "h" not in letters(traits.conditions)


def _sides(rows: bool) -> tuple[str, str, str]:
    return ("m_id", "tiles_m", "tiles_n") if rows else ("n_id", "tiles_n", "tiles_m")


def _listed_row(traits: Traits, tiles: str, own: str, others: str) -> str:
    return f"({_MAPS[letters(traits.conditions)]} * {tiles} + {own}).to(tl.int64) * ({others} + {BESIDE})"


def key_scan(traits: Traits) -> list[str]:
    """Narrow the key range to the first and last key that the padding conditions let through (one pass over their tensor)."""
    if not traits.key_terms or traits.lists:
        return []
    renderer = Renderer(traits.plan.program, {"b": "b", "h": "h", "k": "scan_k"}, ("k",), "s")
    visible = " & ".join(renderer.value(t) for t in traits.key_terms)
    return [
        *renderer.hoisted,
        "first = Lk + none",
        "last = none",
        "seen = none",
        "for scan in tl.range(lo // 256 * 256, hi, 256, num_stages=1):",
        *indent(
            [
                "scan_rows = scan + tl.arange(0, 256)",
                "scan_k = tl.minimum(scan_rows, Lk - 1)[None, :]",
                *renderer.lines,
                f"scan_seen = ({visible}) & ((scan_rows < hi) & (scan_rows >= lo))[None, :]",
                "first = tl.minimum(first, tl.min(tl.where(scan_seen, scan_rows[None, :], Lk)))",
                "last = tl.maximum(last, tl.max(tl.where(scan_seen, scan_rows[None, :] + 1, 0)))",
                "seen += tl.sum(scan_seen.to(tl.int32))",
            ]
        ),
        "lo = tl.maximum(lo, first)",
        "hi = tl.minimum(hi, last)",
        "full_lo = tl.maximum(full_lo, first)",
        "full_hi = tl.where(seen == last - first, tl.minimum(full_hi, last), 0)",
    ]


def tile_loops(inner: Sequence[str], edge: Sequence[str], traits: Traits, kernel: str) -> list[str]:
    """The interior loop, then one loop over the edge tiles on both of its sides; the edge tile alone where there is one tile."""
    if traits.single(kernel):
        return ["t = 0", *edge]
    if traits.lists:
        return [
            "for e in tl.range(0, n_full):",
            *indent(["t = t_next", "t_next = tl.load(walk + e + 1)", *inner]),
            "for e in tl.range(n_full, n_seen):",
            *indent(["t = t_next", "t_next = tl.load(walk + e + 1)", *edge]),
        ]
    masked_loops = bool(traits.mask and traits.mask.terms)
    stages = "" if masked_loops else ", num_stages=1"  # without a mask the edge is at most one ragged tile
    return [
        "for t in tl.range(f_lo, f_hi):",
        *indent(inner),
        f"for e in tl.range(0, f_lo - t_lo + t_hi - f_hi{stages}):",
        *indent(["t = tl.where(t_lo + e < f_lo, t_lo + e, f_hi + e - (f_lo - t_lo))", *edge]),
    ]


def post_factor(traits: Traits, loop: str, prefix: str) -> tuple[list[str], list[str], str | None]:
    """Hoisted statements, loop statements and expression of the factor that multiplies the probabilities."""
    if traits.plan.post is None:
        return [], [], None
    renderer = Renderer(traits.plan.post, {"b": "b", "h": "h", "q": "q_idx", "k": "k_idx"}, (loop,), prefix)
    value = renderer.value(traits.plan.post.result)
    return renderer.hoisted, renderer.lines, value


def random_parameters(traits: Traits) -> list[str]:
    return [*(["SEED"] if traits.random else []), *(["dropout_p"] if traits.dropout else [])]


def random_setup(traits: Traits) -> list[str]:
    """What ``fa2_keep`` is given."""
    lines = ["offset = tl.load(SEED + 1)", "seed = tl.load(SEED)"] if traits.random else []
    if traits.rejected_scores is not None:
        lines += [f"score_threshold = tl.full([], {traits.rejected_scores}, tl.uint32) << 16"]
    return [*lines, *(_DROPOUT_SETUP if traits.dropout else [])]


def keep_scores(traits: Traits, transposed: bool) -> str:
    """Which scores the program keeps: a stream of random numbers beside that of the probabilities, whose ``bh`` is never negative."""
    if traits.rejected_scores == 1 << 16:
        return "tl.full([1, 1], 0, tl.int1)"
    return f"fa2_keep(m0, n0, ~bh, seed, offset, score_threshold, BLOCK_M, BLOCK_N, {transposed})"


_DROPOUT_SETUP = [
    "rejected = (tl.full([], 65536.0, tl.float32) * dropout_p + 0.5).to(tl.int32)",
    "threshold = rejected.to(tl.uint32) << 16",
    "keep_scale = tl.where(rejected >= 65536, 0.0, 65536.0 / tl.maximum(65536 - rejected, 1).to(tl.float32))",
]
"""16 random bits an element: the probability is rounded to a multiple of 2**-16, and so is the scale that undoes it."""
