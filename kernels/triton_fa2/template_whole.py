"""Source of ``fa2_backward_whole``: the backward pass where a (b, h) has one tile of scores, as in windowed attention.

    delta = rowsum(P * dP)     dV = (P * post * dropout)^T dO     dK = dscore^T Q     dQ = dscore K     dC = sum over (b, h) of dscore dprogram/dC

The scores are computed once for all gradients, and delta in registers (fp32 rows are normalised again, see ``gradient_tile``). A
program walks over the (b, h) that share an entry of the captured tensor whose gradient it sums (see ``fa2_backward_dense``), or has one
(b, h) where there is none.
"""

from __future__ import annotations

from .render import literal
from .template_backward import CONSTANTS, Wanted, gradient_tile, in_base2, kept_heads, program_parameters, reduced_heads, sum_place, tile_setup
from .text import base, kernel, masked, offsets, padded, strided, unspecialized
from .traits import Flavour, LoadGradient, Traits

_STORE_SUM = "tl.store(place + q_rows[None, :] * Lk + k_rows[:, None], acc.to(G0.dtype.element_ty), mask=q_in[None, :] & k_in[:, None])"
_TILES = (("Q", "q_rows", "d_local"), ("DO", "q_rows", "dv_local"), ("K", "k_rows", "d_local"), ("V", "k_rows", "dv_local"))


def whole_parameters(traits: Traits, want: Wanted, gradient: LoadGradient | None) -> list[str]:
    names = [*strided(("Q", "K", "V", "DO")), "LSE", *strided(tuple(f"D{t.upper()}" for t in sorted(want.tensors)))]
    names += ["G0"] if gradient is not None else []
    names += ["LSE_LOW"] if traits.split_lse else []
    return [*names, *program_parameters(traits), "B", "CHUNKS"]


def whole_source(traits: Traits, want: Wanted, gradient: LoadGradient | None) -> str:
    flavour, gradients = traits.backward_flavour(True, want.captures)
    values = [1] if want.tensors & {"q", "k"} else []
    values += [g.result for g in gradients if gradient is not None and g.key == gradient.key]
    hoisted: list[str] = []
    lines, results = gradient_tile(traits, flavour, False, "bh", want, hoisted, values, own_delta=True)
    d_in, dv_in = padded(traits)
    inside = {"q_rows": "q_in[:, None]", "k_rows": "k_in[:, None]", "d_local": d_in, "dv_local": dv_in}
    loads = [f"{t.lower()}_t = {masked(f'{t.lower()}_base + {t.lower()}_off', inside[rows], inside[d])}" for t, rows, d in _TILES]
    loop = [
        *(reduced_heads(gradient) if gradient is not None else ["b = kept // H", "h = kept % H"]),
        "bh = b * H + h",
        *(base(f"{t.lower()}_base", t, "b", "h") for t, _, _ in _TILES),
        *loads,
        *_row_statistics(traits, flavour),
        *hoisted,
        *lines,
        *_products(traits, want, results),
        *([f"acc += {results[-1]}"] if gradient is not None else []),
    ]
    body = [
        "outer = tl.program_id(0)",
        *(kept_heads(gradient) if gradient is not None else ["kept = outer", "begin = outer * 0", "end = begin + 1"]),
        "m0 = tl.full([], 0, tl.int32)",
        "n0 = m0",
        "q_rows = tl.arange(0, BLOCK_M)",
        "k_rows = tl.arange(0, BLOCK_N)",
        "q_in = q_rows < Lq",
        "k_in = k_rows < Lk",
        "q_idx = tl.minimum(q_rows, Lq - 1)[None, :]",
        "k_idx = tl.minimum(k_rows, Lk - 1)[:, None]",
        *tile_setup(traits),
        *(offsets(f"{t.lower()}_off", t, rows, d) for t, rows, d in _TILES),
        *(["acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)"] if gradient is not None else []),
        "for member in tl.range(begin, end, num_stages=1):",
        *(f"    {line}" for line in loop),
        *([sum_place(gradient), _STORE_SUM] if gradient is not None else []),
    ]
    return kernel("fa2_backward_whole", whole_parameters(traits, want, gradient), CONSTANTS, [*unspecialized(traits), "B", "CHUNKS"], body)


def _row_statistics(traits: Traits, flavour: Flavour) -> list[str]:
    """lse of the rows; those past the end get inf, so that P = 0."""
    lines = ["row = bh.to(tl.int64) * Lq + q_rows", 'lse = tl.load(LSE + row, mask=q_in, other=float("inf"))']
    lines += ['lse = tl.where(lse == float("-inf"), float("inf"), lse)'] if traits.zero_rows else []
    lines += ["low = tl.load(LSE_LOW + row, mask=q_in, other=0.0)"] if traits.split_lse else []
    return [*lines, *in_base2(traits, (flavour,))]


def _products(traits: Traits, want: Wanted, results: list[str]) -> list[str]:
    """The gradients of q, k and v, each computed and stored in turn, so that one accumulator lives at a time."""
    d_in, dv_in = padded(traits)
    precision, scaled = traits.precision, f" * {literal(traits.factor)}" if traits.factor != 1.0 else ""
    lines = [f"dscore = ({results[0]}).to(q_t.dtype)"] if want.tensors & {"q", "k"} else []
    for letter, product, rows, local, condition in (
        ("v", f"tl.dot(pv.to(do_t.dtype), do_t{precision})", "k", "dv_local", dv_in),
        ("k", f"tl.dot(dscore, q_t{precision}){scaled}", "k", "d_local", d_in),
        ("q", f"tl.dot(tl.trans(dscore), k_t{precision}){scaled}", "q", "d_local", d_in),
    ):
        if letter in want.tensors:
            tensor = f"D{letter.upper()}"
            inside = " & ".join([f"{rows}_in[:, None]", *([condition] if condition else [])])
            place = f"d{letter}_base + {rows}_rows.to(tl.int64)[:, None] * {tensor}_s2 + {local}[None, :] * {tensor}_s3"
            lines += [base(f"d{letter}_base", tensor, "b", "h"), f"tl.store({place}, ({product}).to({tensor}.dtype.element_ty), mask={inside})"]
    return lines
