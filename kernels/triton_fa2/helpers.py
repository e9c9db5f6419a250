"""Device functions in the generated modules: functions that Triton lacks and the dropout mask."""

from __future__ import annotations

TANH_APPROXIMATE = """
@triton.jit
def fa2_tanh(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
"""

TANH_EXACT = """
@triton.jit
def fa2_tanh(x):
    # a series near 0, where 1 - 2 / (exp(2 x) + 1) cancels; both within a few units in the last place
    y = x * x
    series = -1382.0 / 155925.0
    series = series * y + 62.0 / 2835.0
    series = series * y - 17.0 / 315.0
    series = series * y + 2.0 / 15.0
    series = series * y - 1.0 / 3.0
    near = x + x * (y * series)
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * 2.8853900817779268) + 1.0)
    return tl.where(tl.abs(x) < 0.35, near, tl.where(x < 0.0, -far, far))
"""

EXPM1 = """
@triton.jit
def fa2_expm1(x):
    # a series near 0, where exp(x) - 1 cancels
    series = 1.0 / 362880.0
    series = series * x + 1.0 / 40320.0
    series = series * x + 1.0 / 5040.0
    series = series * x + 1.0 / 720.0
    series = series * x + 1.0 / 120.0
    series = series * x + 1.0 / 24.0
    series = series * x + 1.0 / 6.0
    series = series * x + 0.5
    near = x + x * (x * series)
    return tl.where(tl.abs(x) < 0.5, near, tl.exp2(x * 1.4426950408889634) - 1.0)
"""

LOG1P = """
@triton.jit
def fa2_log1p(x):
    # what rounding 1 + x loses is made good by x / (y - 1) (Goldberg, ACM Computing Surveys 1991, theorem 4)
    y = 1.0 + x
    rounded = y - 1.0
    return tl.where(rounded == 0.0, x, tl.where(y == float("inf"), y, tl.log(y) * (x / rounded)))
"""

_REGISTERS = "c0, c1, c2, c3, k0, k1, lo0, hi0, lo1, hi1"
_ROUND = (
    (
        "mul.wide.u32 p, c0, 0xD2511F53; mul.wide.u32 q, c2, 0xCD9E8D57; mov.b64 {{lo0, hi0}}, p; mov.b64 {{lo1, hi1}}, q; "
        "xor.b32 c0, hi1, c1; xor.b32 c0, c0, k0; mov.b32 c1, lo1; xor.b32 c2, hi0, c3; xor.b32 c2, c2, k1; mov.b32 c3, lo0; "
        "add.u32 k0, k0, 0x9E3779B9; add.u32 k1, k1, 0xBB67AE85; "
    )
    .replace("{{", "{")
    .replace("}}", "}")
)
_ASSEMBLY = (
    "{ .reg .b32 "
    + _REGISTERS
    + "; .reg .b64 p, q; mov.b32 c0, $4; mov.b32 c1, $5; mov.b32 c2, $6; mov.b32 c3, $7; mov.b32 k0, $8; mov.b32 k1, $9; "
    + _ROUND * 7
    + "mov.b32 $0, c0; mov.b32 $1, c1; mov.b32 $2, c2; mov.b32 $3, c3; }"
)

PHILOX_ASSEMBLY = f"""
@triton.jit
def fa2_philox(c0, c1, c2, c3, k0, k1):
    # Philox4x32 with 7 rounds (Salmon et al., SC 2011: the fewest that pass BigCrush)
    return tl.inline_asm_elementwise(
        "{_ASSEMBLY}",
        "=r,=r,=r,=r,r,r,r,r,r,r",
        [c0, c1, c2, c3, k0, k1],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=True,
        pack=1,
    )
"""

PHILOX = """
@triton.jit
def fa2_philox(c0, c1, c2, c3, k0, k1):
    # Philox4x32 with 7 rounds (Salmon et al., SC 2011: the fewest that pass BigCrush); the 64-bit products are one instruction
    for _ in tl.static_range(7):
        left = c0.to(tl.uint64) * 0xD2511F53
        right = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (right >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = right.to(tl.uint32)
        c2 = (left >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = left.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3
"""

KEEP = """
@triton.jit
def fa2_keep(q0, k0, bh, seed, offset, threshold, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr):
    # One Philox call serves the eight elements that differ in bit 3 of q and bits 3 and 4 of k, 16 bits each. Tensor cores keep
    # bit 3 of either index in one thread, and bit 4 too along a tile's columns: no element crosses threads. The mapping does not
    # depend on the tile's size or orientation. The 16 bits stand at the top of each word: those below do not change the comparison.
    # Where bit 4 is not along the columns both halves are computed where needed.
    QUARTER: tl.constexpr = (not TRANSPOSED) and BLOCK_K >= 32
    q_half = tl.arange(0, BLOCK_Q // 2)
    q_at = q0 + q_half // 8 * 16 + q_half % 8
    if QUARTER:
        k_part = tl.arange(0, BLOCK_K // 4)
        k_at = k0 + k_part // 8 * 32 + k_part % 8
        high = k_at * 0
    else:
        k_part = tl.arange(0, BLOCK_K // 2)
        k_own = k0 + k_part // 8 * 16 + k_part % 8
        high = k_own >> 4 & 1
        k_at = k_own - high * 16
    zero_q = q_at * 0
    zero_k = k_at * 0
    if TRANSPOSED:
        c0 = (k_at[:, None] + zero_q[None, :]).to(tl.uint32)
        c1 = (q_at[None, :] + zero_k[:, None]).to(tl.uint32)
        shift = (16 - (high[:, None] + zero_q[None, :]) * 16).to(tl.uint32)
    else:
        c0 = (k_at[None, :] + zero_q[:, None]).to(tl.uint32)
        c1 = (q_at[:, None] + zero_k[None, :]).to(tl.uint32)
        shift = (16 - (high[None, :] + zero_q[:, None]) * 16).to(tl.uint32)
    c2 = c0 * 0 + bh.to(tl.uint32)
    c3 = c0 * 0 + offset.to(tl.uint32)
    r00, r01, r10, r11 = fa2_philox(c0, c1, c2, c3, seed.to(tl.uint32), ((seed ^ offset) >> 32).to(tl.uint32))
    if TRANSPOSED:
        bits = tl.join(tl.join(r00 << shift, r10 << shift), tl.join(r01 << shift, r11 << shift))
        bits = tl.reshape(bits, [BLOCK_K // 16, 8, BLOCK_Q // 16, 8, 2, 2])
        bits = tl.reshape(tl.permute(bits, [0, 5, 1, 2, 4, 3]), [BLOCK_K, BLOCK_Q])
    elif QUARTER:
        bits = tl.join(tl.join(r00, r01), tl.join(r10, r11))
        bits = tl.join(bits << 16, bits)
        bits = tl.reshape(bits, [BLOCK_Q // 16, 8, BLOCK_K // 32, 8, 2, 2, 2])
        bits = tl.reshape(tl.permute(bits, [0, 5, 1, 2, 6, 4, 3]), [BLOCK_Q, BLOCK_K])
    else:
        bits = tl.join(tl.join(r00 << shift, r01 << shift), tl.join(r10 << shift, r11 << shift))
        bits = tl.reshape(bits, [BLOCK_Q // 16, 8, BLOCK_K // 16, 8, 2, 2])
        bits = tl.reshape(tl.permute(bits, [0, 5, 1, 2, 4, 3]), [BLOCK_Q, BLOCK_K])
    return bits >= threshold
"""
