"""Source text of the Triton kernels: units, exact rewrites, integer widths, and one kernel in full."""

from __future__ import annotations

import math
import re

import expecttest
import pytest
import torch
from kernel_cases import CASES, Case, Dims, problem

from fa_inductor.kernels.triton_fa2 import KERNEL
from fa_inductor.kernels.triton_fa2.codegen import load_module, module_text
from fa_inductor.kernels.triton_fa2.config import choose, estimate, shared_memory
from fa_inductor.kernels.triton_fa2.fold import moderate, scaled
from fa_inductor.kernels.triton_fa2.render import Renderer
from fa_inductor.kernels.triton_fa2.template_forward import forward_source
from fa_inductor.kernels.triton_fa2.template_tiles import map_source
from fa_inductor.kernels.triton_fa2.traits import Traits
from fa_inductor.program import Coordinates, ProgramBuilder, evaluate
from fa_inductor.request import AttentionRequest


def request_of(form: str, dtype: torch.dtype = torch.bfloat16, **dims: int) -> AttentionRequest:
    from dataclasses import replace

    return replace(problem(Case("render", form, Dims(**dims), dtype)).request(), device="cuda", capability=(9, 0))


def traits_of_form(form: str) -> Traits:
    return Traits(KERNEL.plan(request_of(form)))


def body(source: str, first: str, last: str) -> str:
    return source[source.index(first) : source.index(last)]


def test_interior_tiles_have_no_mask() -> None:
    source = forward_source(traits_of_form("causal_inf"))
    interior = body(source, "for t in tl.range(f_lo, f_hi)", "for e in")
    assert "tl.where" not in interior and "<" not in interior
    assert "tl.where" in source[source.index("for e in") :]


def test_scale_and_log2e_are_one_constant() -> None:
    source = forward_source(traits_of_form("plain"))
    assert f"tl.exp2(s * {math.log2(math.e) / math.sqrt(32)!r} - m_new[:, None])" in source


@pytest.mark.parametrize(
    ("form", "natural", "split", "repair"),
    [
        ("plain", False, False, False),
        ("causal_inf", False, False, False),
        ("causal_min", True, False, False),
        ("bottom_right_min", True, True, True),
        ("padding_add_min", True, True, True),
        ("padding_replace_inf", False, False, False),
        ("bias_hqk_grad", True, True, False),
        ("alibi_grad", False, False, False),
    ],
)
def test_units(form: str, natural: bool, split: bool, repair: bool) -> None:
    t = traits_of_form(form)
    assert (t.natural, t.split_lse, t.repair is not None) == (natural, split, repair)


@pytest.mark.parametrize("form", ["plain", "softcap", "alibi_grad", "causal_inf", "window_inf", "temperature_grad"])
def test_scaled_program_is_the_multiple(form: str) -> None:
    p = problem(Case("fold", form, Dims(2, 2, 2, 9, 11, 8, 8)))
    builder = ProgramBuilder()
    builder.captures = list(p.form.program.captures)
    root = builder.inline(p.form.program)[p.form.program.result]
    multiple = builder.finish(scaled(builder, root, 3.5))
    score = torch.randn(2, 2, 9, 11, dtype=torch.float64)
    box = Coordinates((0, 2), (0, 2), (0, 9), (0, 11))
    one, many = (
        evaluate(x, box, score=score, captures=p.captures, sizes=p.form.sizes, device=score.device, dtype=torch.float64)[0] for x in (p.form.program, multiple)
    )
    torch.testing.assert_close(many, one * 3.5)


def test_huge_terms_are_not_moderate() -> None:
    for value, expected in ((-1e9, False), (-math.inf, True), (-5.0, True)):
        b = ProgramBuilder()
        program = b.finish(b.emit("add", b.score(), b.emit("where", b.emit("le", b.index("k"), b.index("q")), b.const(0.0), b.const(value))))
        assert moderate(program, program.result) is expected


def test_a_mask_times_a_huge_constant_is_not_moderate() -> None:
    b = ProgramBuilder()
    hidden = b.emit("sub", b.const(1.0), b.convert(b.load(b.capture("int64", 2), (b.index("b"), b.index("k"))), "float"))
    program = b.finish(b.emit("add", b.score(), b.emit("mul", hidden, b.const(torch.finfo(torch.float32).min))))
    assert not moderate(program, program.result)


def test_integers_widen_only_where_they_may_overflow() -> None:
    b = ProgramBuilder()
    q, k = b.index("q"), b.index("k")
    difference, product = b.emit("sub", k, q), b.emit("mul", q, k)
    program = b.finish(b.emit("add", b.score(), b.convert(b.emit("add", difference, product), "float")))
    renderer = Renderer(program, {"score": "s", "q": "q_idx", "k": "k_idx"}, ("k",), "x")
    renderer.value(program.result)
    lines = [line for line in renderer.lines if line.startswith("x")]
    assert any(re.search(r"= k_idx - q_idx$", line) for line in lines), lines
    assert any("q_idx.to(tl.int64) * k_idx.to(tl.int64)" in line or "k_idx.to(tl.int64) * q_idx.to(tl.int64)" in line for line in lines), lines


def test_floor_division_rounds_down() -> None:
    """Executed as Python on plain numbers, with C's truncation in the place of ``//`` and ``%``."""
    b = ProgramBuilder()
    difference, seven = b.emit("sub", b.index("k"), b.index("q")), b.const(7)
    program = b.finish(
        b.emit("floordiv", difference, seven),
        b.emit("mod", difference, seven),
        b.emit("floordiv", difference, b.const(8)),
        b.emit("mod", difference, b.const(8)),
    )
    renderer = Renderer(program, {"q": "q", "k": "k"}, ("k",), "x")
    results = [renderer.value(r) for r in program.results]

    class Truncating(int):
        def __floordiv__(self, other: int) -> Truncating:
            return Truncating(math.trunc(int(self) / int(other)))

        def __mod__(self, other: int) -> Truncating:
            return Truncating(math.fmod(int(self), int(other)))

        def __sub__(self, other: int) -> Truncating:
            return Truncating(int(self) - int(other))

        def __add__(self, other: int) -> Truncating:
            return Truncating(int(self) + int(other))

    text = "\n".join(renderer.lines).replace(").to(tl.int32)", ")")
    for k in range(-20, 21):
        scope: dict[str, object] = {"q": Truncating(0), "k": Truncating(k)}
        exec(text, scope)
        assert [int(scope[r]) for r in results] == [k // 7, k % 7, k // 8, k % 8], k  # type: ignore[call-overload]


def test_modules_are_shared_by_content(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    text = module_text(traits_of_form("plain"), forward_source(traits_of_form("plain")))
    assert load_module(text) is load_module(text)
    assert load_module(text) is not load_module(text + "# other\n")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_configurations_fit(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    from dataclasses import replace

    from fa_inductor.kernels.triton_fa2.config import Launch
    from fa_inductor.kernels.triton_fa2.text import block

    for d in (1, 16, 40, 64, 80, 128, 192, 256):
        config = dict(choose(replace(request_of("plain", dtype, d=d, dv=d), capability=capability)))
        for name in ("fwd", "rows", "columns", "dense"):
            launch = Launch(*(int(config[f"{name}_{field}"]) for field in ("m", "n", "warps", "stages")))
            assert launch.m >= 16 and launch.n >= 16
            assert estimate(name, launch, block(d), block(d), dtype.itemsize) <= shared_memory(capability)


@pytest.mark.parametrize(
    ("dtype", "dims", "single", "whole"),
    [
        (torch.bfloat16, {"lq": 49, "lk": 49, "hq": 2, "hkv": 2}, ("fwd", "rows", "columns"), True),
        (torch.bfloat16, {"lq": 64, "lk": 64, "hq": 2, "hkv": 2}, ("fwd", "rows", "columns"), True),
        (torch.bfloat16, {"lq": 65, "lk": 49, "hq": 2, "hkv": 2}, ("fwd", "rows"), False),
        (torch.bfloat16, {"lq": 49, "lk": 65, "hq": 2, "hkv": 2}, ("columns",), False),
        (torch.bfloat16, {"lq": 49, "lk": 49, "hq": 2, "hkv": 1}, ("fwd", "rows", "columns"), False),
        (torch.bfloat16, {"lq": 49, "lk": 49, "hq": 2, "hkv": 2, "d": 80, "dv": 80}, ("fwd", "rows"), False),
        (torch.float32, {"lq": 33, "lk": 32, "hq": 2, "hkv": 2}, ("fwd", "rows"), False),
        (torch.float32, {"lq": 32, "lk": 32, "hq": 2, "hkv": 2}, ("fwd", "rows", "columns"), True),
    ],
)
def test_one_tile(dtype: torch.dtype, dims: dict[str, int], single: tuple[str, ...], whole: bool) -> None:
    """Where one tile surely holds all keys (or queries) there is no loop; where one holds all scores, one kernel computes every gradient."""
    plan = KERNEL.plan(request_of("causal_inf", dtype, **dims))
    assert tuple(n for n in ("fwd", "rows", "columns") if plan.get(f"{n}_single")) == single
    assert plan.get("whole") is whole
    assert ("tl.range" in forward_source(Traits(plan))) is ("fwd" not in single)


def test_refusals() -> None:
    from dataclasses import replace

    request = request_of("plain")
    assert KERNEL.why_not(request) == []
    wide = replace(request.q, shape=(*request.q.shape[:3], 257))
    cases = {
        "triton-device": replace(request, device="cpu", capability=None),
        "triton-capability": replace(request, capability=(7, 5)),
        "triton-dtype": replace(request, q=replace(request.q, dtype=torch.float64)),
        "triton-empty": replace(request, k=replace(request.k, shape=(2, 2, 0, 32)), v=replace(request.v, shape=(2, 2, 0, 32))),
        "triton-head-dim": replace(request, q=wide, k=wide),
        "triton-post-gradient": request_of("post_dense_grad"),
    }
    for code, refused in cases.items():
        assert [r.code for r in KERNEL.why_not(refused)] == [code]


def test_every_form_renders_the_same_twice() -> None:
    for form in sorted({case.form for case in CASES.values()}):
        assert forward_source(traits_of_form(form)) == forward_source(traits_of_form(form))


class TestGolden(expecttest.TestCase):
    def test_causal_forward(self) -> None:
        self.assertExpectedInline(
            forward_source(traits_of_form("causal_inf")),
            """\
@triton.jit(do_not_specialize=["H", "Lq", "Lk"])
def fa2_forward(
    Q, Q_s0, Q_s1, Q_s2, Q_s3, K, K_s0, K_s1, K_s2, K_s3, V, V_s0, V_s1, V_s2, V_s3, O, O_s0, O_s1, O_s2, O_s3, LSE, H, Lq,
    Lk, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    tiles_m = (Lq + BLOCK_M - 1) // BLOCK_M
    tiles_n = (Lk + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    m_id = tiles_m - 1 - pid % tiles_m
    bh = pid // tiles_m
    b = bh // H
    h = bh % H
    kv_h = h // 1
    m0 = m_id * BLOCK_M
    m_end = tl.minimum(m0 + BLOCK_M, Lq)
    q_rows = m0 + tl.arange(0, BLOCK_M)
    q_in = q_rows < Lq
    q_idx = tl.minimum(q_rows, Lq - 1)[:, None]
    n_local = tl.arange(0, BLOCK_N)
    zero = tl.full([], 0, tl.int64)
    d_local = tl.arange(0, 32)
    dv_local = tl.arange(0, 32)
    q_base = Q + b.to(tl.int64) * Q_s0 + h.to(tl.int64) * Q_s1
    k_base = K + b.to(tl.int64) * K_s0 + kv_h.to(tl.int64) * K_s1
    v_base = V + b.to(tl.int64) * V_s0 + kv_h.to(tl.int64) * V_s1
    k_off = n_local.to(tl.int64)[:, None] * K_s2 + d_local[None, :] * K_s3
    v_off = n_local.to(tl.int64)[:, None] * V_s2 + dv_local[None, :] * V_s3
    q_t = tl.load(q_base + q_rows.to(tl.int64)[:, None] * Q_s2 + d_local[None, :] * Q_s3, mask=q_in[:, None], other=0.0)
    none = tl.full([], 0, tl.int32)
    lo = none
    hi = Lk + none
    full_lo = none
    full_hi = Lk + none
    hi = tl.minimum(hi, m_end + (0))
    full_hi = tl.minimum(full_hi, m0 + (0) + 1)
    t_lo = tl.minimum(lo // BLOCK_N, tiles_n)
    t_hi = tl.maximum((tl.maximum(hi, 0) + BLOCK_N - 1) // BLOCK_N, t_lo)
    f_lo = tl.minimum((full_lo + BLOCK_N - 1) // BLOCK_N, t_hi)
    f_lo = tl.maximum(f_lo, t_lo)
    f_hi = tl.minimum(tl.maximum(full_hi, 0) // BLOCK_N, t_hi)
    f_hi = tl.maximum(f_hi, f_lo)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 32], tl.float32)
    for t in tl.range(f_lo, f_hi):
        n0 = t * BLOCK_N
        k_rows = n0 + n_local
        k_idx = k_rows[None, :]
        k_t = tl.load(k_base + (zero + n0) * K_s2 + k_off)
        s = tl.dot(q_t, tl.trans(k_t))
        m_new = tl.maximum(m, tl.max(s, 1) * 0.25503486164919736)
        p = tl.exp2(s * 0.25503486164919736 - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        v_t = tl.load(v_base + (zero + n0) * V_s2 + v_off)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v_t.dtype), v_t, acc)
        m = m_new
    for e in tl.range(0, f_lo - t_lo + t_hi - f_hi):
        t = tl.where(t_lo + e < f_lo, t_lo + e, f_hi + e - (f_lo - t_lo))
        n0 = t * BLOCK_N
        k_rows = n0 + n_local
        k_in = k_rows < Lk
        k_idx = tl.minimum(k_rows, Lk - 1)[None, :]
        k_t = tl.load(k_base + (zero + n0) * K_s2 + k_off, mask=k_in[:, None], other=0.0)
        s = tl.dot(q_t, tl.trans(k_t))
        e0_in = fa2_where_le_lt_and(s, float("-inf"), k_idx, q_idx, k_rows[None, :], Lk)
        m_new = tl.maximum(m, tl.max(e0_in, 1) * 0.25503486164919736)
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(e0_in * 0.25503486164919736 - m_use[:, None])
        alpha = tl.exp2(m - m_use)
        l = l * alpha + tl.sum(p, 1)
        v_t = tl.load(v_base + (zero + n0) * V_s2 + v_off, mask=k_in[:, None], other=0.0)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v_t.dtype), v_t, acc)
        m = m_new
    acc = acc * (1.0 / l)[:, None]
    log_l = tl.log(l)
    lse = m * 0.6931471805599453 + log_l
    row = bh.to(tl.int64) * Lq + q_rows
    tl.store(LSE + row, lse, mask=q_in)
    o_base = O + b.to(tl.int64) * O_s0 + h.to(tl.int64) * O_s1
    tl.store(o_base + q_rows.to(tl.int64)[:, None] * O_s2 + dv_local[None, :] * O_s3, acc.to(O.dtype.element_ty), mask=q_in[:, None])
""",
        )


class MapSource(expecttest.TestCase):
    def test_documents(self) -> None:
        """The conditions of packed documents on whole tiles: each number is a pair of bounds."""
        text = map_source(traits_of_form("documents_inf").conditions).partition("@triton.jit(do_not")[2]
        self.assertExpectedInline(
            text,
            """\
_specialize=["H", "Lq", "Lk"])
def fa2_map(
    STATE, C0, C0_s0, C0_s1, H, Lq, Lk, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr,
):
    pid = tl.program_id(0)
    tiles_q = (Lq + TILE_Q - 1) // TILE_Q
    tiles_k = (Lk + TILE_K - 1) // TILE_K
    chunks = (tiles_k + 15) // 16
    outer = pid // (chunks * tiles_q)
    b = outer
    h = outer * 0
    q0 = pid // chunks % tiles_q * TILE_Q
    tile = pid % chunks * 16 + tl.arange(0, 16)
    k0 = tile * TILE_K
    b_low = b.to(tl.float64) + tl.zeros([1], tl.float64)
    b_high = b_low
    h_low = h.to(tl.float64) + tl.zeros([1], tl.float64)
    h_high = h_low
    q_low = q0.to(tl.float64) + tl.zeros([1], tl.float64)
    q_high = (tl.minimum(q0 + TILE_Q, Lq) - 1).to(tl.float64) + tl.zeros([1], tl.float64)
    k_low = k0.to(tl.float64)
    k_high = (tl.minimum(k0 + TILE_K, Lk) - 1).to(tl.float64)
    q_at = (q0 + tl.arange(0, TILE_Q)).to(tl.int64)[None, None, :]
    q_in = q_at < Lq
    k_at = (k0[:, None] + tl.arange(0, TILE_K)[None, :]).to(tl.int64)[None, :, :]
    k_in = k_at < Lk
    inner = (q0 + TILE_Q <= Lq) & ((pid % chunks + 1) * 16 * TILE_K <= Lk)
    l3, u3 = k_low, k_high
    l1, u1 = q_low, q_high
    l6, u6 = fa2_sub(l3, u3, l1, u1)
    l6, u6 = fa2_whole_number(l6, u6, (fa2_anything(l3, u3) | fa2_anything(l1, u1)))
    l7, u7 = tl.full([1], 0.0, tl.float64), tl.full([1], 0.0, tl.float64)
    n8 = (fa2_anything(l6, u6) | fa2_anything(l7, u7))
    m8 = (l6 <= u7) | n8
    a8 = (u6 <= l7) & ~n8
    x2 = tl.load(C0 + b.to(tl.int64) * C0_s0 + q_at * C0_s1, mask=q_in, other=0).to(tl.float64) + tl.zeros([1, 1, 1], tl.int8)
    l2 = tl.min(tl.min(tl.where(q_in, x2, float("inf")), 0), 1).to(tl.float64)
    u2 = tl.max(tl.max(tl.where(q_in, x2, float("-inf")), 0), 1).to(tl.float64)
    l2, u2 = fa2_known(l2, u2, tl.full([], 4503599627370496.0, tl.float64))
    x4 = tl.load(C0 + b.to(tl.int64) * C0_s0 + k_at * C0_s1, mask=k_in, other=0).to(tl.float64) + tl.zeros([1, 1, 1], tl.int8)
    l4 = tl.min(tl.min(tl.where(k_in, x4, float("inf")), 0), 1).to(tl.float64)
    u4 = tl.max(tl.max(tl.where(k_in, x4, float("-inf")), 0), 1).to(tl.float64)
    l4, u4 = fa2_known(l4, u4, tl.full([], 4503599627370496.0, tl.float64))
    n5 = (fa2_anything(l2, u2) | fa2_anything(l4, u4))
    m5 = ((l2 <= u4) & (l4 <= u2)) | n5
    a5 = ((l2 == u2) & (l4 == u4) & (l2 == l4)) & ~n5
    may = (tile >= 0) & m8 & m5
    every = may & a8 & a5
    at = (outer.to(tl.int64) * tiles_q + pid // chunks % tiles_q) * tiles_k + tile
    tl.store(STATE + at, (may.to(tl.int32) + 2 * every.to(tl.int32)).to(tl.int8), mask=tile < tiles_k)
""",
        )
