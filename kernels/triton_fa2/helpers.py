"""Device functions in the generated modules: soft-capping's tanh and the dropout mask."""

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

KEEP = """
@triton.jit
def fa2_keep(q0, k0, bh, seed, offset, threshold, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr):
    # One Philox call serves the four elements whose q and k differ in bit 3 only, 16 bits each: tensor cores keep these
    # four in one thread, in either orientation of the tile, and the mapping does not depend on the tile's size.
    q_half = tl.arange(0, BLOCK_Q // 2)
    k_half = tl.arange(0, BLOCK_K // 2)
    q_at = q0 + q_half // 8 * 16 + q_half % 8
    k_at = k0 + k_half // 8 * 16 + k_half % 8
    if TRANSPOSED:
        c0 = k_at[:, None] + (q_at * 0)[None, :]
        c1 = q_at[None, :] + (k_at * 0)[:, None]
        ROWS: tl.constexpr = BLOCK_K
        COLUMNS: tl.constexpr = BLOCK_Q
    else:
        c0 = k_at[None, :] + (q_at * 0)[:, None]
        c1 = q_at[:, None] + (k_at * 0)[None, :]
        ROWS: tl.constexpr = BLOCK_Q
        COLUMNS: tl.constexpr = BLOCK_K
    c2 = c0 * 0 + bh
    c3 = c0 * 0 + offset.to(tl.int32)
    r00, r01, r10, r11 = tl.philox(seed, c0, c1, c2, c3, 7)
    if TRANSPOSED:
        bits = tl.join(tl.join(r00, r10), tl.join(r01, r11))
    else:
        bits = tl.join(tl.join(r00, r01), tl.join(r10, r11))
    bits = tl.reshape(bits, [ROWS // 16, 8, COLUMNS // 16, 8, 2, 2])
    bits = tl.reshape(tl.permute(bits, [0, 5, 1, 2, 4, 3]), [ROWS, COLUMNS])
    return (bits >> 16).to(tl.int32) >= threshold
"""
