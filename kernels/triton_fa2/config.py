"""Tile sizes, warps and pipeline stages: a pure function of the request.

Shared memory bounds every choice: ``(capability) -> bytes`` below, against an estimate of what Triton keeps there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fa_inductor.request import AttentionRequest

from .text import block


@dataclass(frozen=True)
class Launch:
    """One kernel's tile (m query rows, n keys), warps and stages."""

    m: int
    n: int
    warps: int
    stages: int


def shared_memory(capability: tuple[int, int] | None) -> int:
    """Bytes that one block may use."""
    major, minor = capability or (9, 0)
    if (major, minor) in ((8, 6), (8, 9)) or major == 12:
        return 99 * 1024
    return (163 if major == 8 else 227) * 1024


def choose(request: AttentionRequest) -> tuple[tuple[str, int | str | bool], ...]:
    """Config entries of the plan."""
    d, dv = int(request.q.shape[3]), int(request.v.shape[3])
    wide = block(max(d, dv))
    size = request.q.dtype.itemsize
    limit = shared_memory(request.capability)
    hopper = request.capability is None or request.capability[0] >= 9
    launches = {
        "fwd": _forward(wide, size, hopper),
        "rows": _rows(wide, size, hopper),
        "columns": _columns(wide, size, hopper),
        "dense": Launch(64, 64, 4, 1) if wide * size <= 256 else Launch(32, 32, 4, 1),
    }
    entries: dict[str, int | str | bool] = {
        "d": d,
        "dv": dv,
        "group": int(request.q.shape[1]) // int(request.k.shape[1]),
        "dropout": request.dropout_p > 0,
        "split": wide == 256 and size == 2,
        "precision": "" if request.q.dtype != torch.float32 else f', input_precision="{"tf32" if request.tf32 else "ieee"}"',
    }
    for name, launch in launches.items():
        fitted = _fit(name, launch, block(d), block(dv), size, limit)
        entries |= {f"{name}_m": fitted.m, f"{name}_n": fitted.n, f"{name}_warps": fitted.warps, f"{name}_stages": fitted.stages}
    return tuple(sorted(entries.items()))


def _forward(wide: int, size: int, hopper: bool) -> Launch:
    if size == 4:
        return Launch(64, 32, 4, 2) if wide <= 32 else Launch(64, 32, 8, 2) if wide <= 64 else Launch(32, 32, 8, 1) if wide <= 128 else Launch(16, 16, 4, 1)
    if hopper:
        return Launch(128, 128, 4, 3) if wide <= 64 else Launch(128, 64, 8, 3) if wide <= 128 else Launch(128, 64, 8, 2)
    return Launch(128, 64, 4, 3) if wide <= 64 else Launch(128, 64, 8, 2) if wide <= 128 else Launch(64, 32, 8, 2)


def _rows(wide: int, size: int, hopper: bool) -> Launch:
    if size == 4:
        return Launch(32, 32, 4, 1) if wide <= 64 else Launch(32, 32, 8, 1) if wide <= 128 else Launch(16, 16, 4, 1)
    if hopper:
        return Launch(128, 64, 8, 3) if wide <= 64 else Launch(128, 64, 8, 2) if wide <= 128 else Launch(128, 32, 8, 2)
    return Launch(64, 64, 4, 2) if wide <= 64 else Launch(64, 64, 8, 1) if wide <= 128 else Launch(32, 32, 8, 1)


def _columns(wide: int, size: int, hopper: bool) -> Launch:
    if size == 4:
        return Launch(32, 32, 4, 1) if wide <= 64 else Launch(32, 32, 8, 1) if wide <= 128 else Launch(16, 16, 4, 1)
    if hopper:
        return Launch(64, 128, 8, 3) if wide <= 64 else Launch(32, 128, 8, 2)
    return Launch(64, 64, 4, 2) if wide <= 64 else Launch(32, 64, 8, 1) if wide <= 128 else Launch(32, 32, 8, 1)


def estimate(name: str, launch: Launch, d: int, dv: int, size: int) -> int:
    """Bytes of shared memory: the tiles that stay, the pipelined ones once per stage, the score tiles that are exchanged."""
    both = (d + dv) * size
    scores = launch.m * launch.n * size
    if name == "fwd":
        return launch.m * d * size + launch.stages * launch.n * both + scores
    if name == "rows":
        return launch.m * both + launch.stages * launch.n * both + 2 * scores
    if name == "columns":
        return launch.n * both + launch.stages * (launch.m * both + 8 * launch.m) + 2 * scores
    return (launch.m + launch.n) * both + 2 * scores


def _fit(name: str, launch: Launch, d: int, dv: int, size: int, limit: int) -> Launch:
    """Fewer stages, then smaller tiles, until the estimate fits."""
    while estimate(name, launch, d, dv, size) > limit:
        if launch.stages > 1:
            launch = Launch(launch.m, launch.n, launch.warps, launch.stages - 1)
        elif launch.n >= launch.m and launch.n > 16:
            launch = Launch(launch.m, launch.n // 2, launch.warps, launch.stages)
        else:
            launch = Launch(launch.m // 2, launch.n, launch.warps, launch.stages)
    return launch
