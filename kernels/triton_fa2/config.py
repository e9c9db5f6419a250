"""Tile sizes, warps and pipeline stages: a pure function of the request.

Shared memory bounds every choice: ``(capability) -> bytes`` below, against an estimate of what Triton keeps there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fa_inductor.request import AttentionRequest

from .fold import depends
from .text import block

_PROCESSORS = 132
_NARROW = 512
"""Keys of a band, up to which small tiles waste less at its edges than large ones save."""
_LEAST_SCORES = 512 * 512
"""Of one head, from which on a mask is mapped: below, the launches cost more than what they save."""


@dataclass(frozen=True)
class Launch:
    """One kernel's tile (m query rows, n keys), warps and stages; ``single``: its loop has one tile, whatever the mask."""

    m: int
    n: int
    warps: int
    stages: int
    single: bool = False


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
    launches = _full_precision(wide) if size == 4 else _hopper(wide, _narrow(request)) if hopper else _ampere(wide)
    entries: dict[str, int | str | bool] = {
        "d": d,
        "dv": dv,
        "group": int(request.q.shape[1]) // int(request.k.shape[1]),
        "dropout": request.dropout_p > 0,
        "exact_delta": size == 2 and sums_over_keys(request),
        "split": wide == 256 and size == 2,
        "precision": "" if size == 2 else "tf32" if request.tf32 else "ieee",
    }
    for name, launch in launches.items():
        fitted = _single(name, _fit(name, _shrink(name, launch, request), request, limit), request)
        entries |= {f"{name}_m": fitted.m, f"{name}_n": fitted.n, f"{name}_warps": fitted.warps, f"{name}_stages": fitted.stages}
        entries |= {f"{name}_single": fitted.single} if name != "dense" else {}
    entries |= _whole(request, wide)
    lists = _lists(request, entries)
    return tuple(sorted((entries | {"lists": lists, "lists_bias": lists and request.hides_by_bias}).items()))


def _hopper(wide: int, narrow: bool = False) -> dict[str, Launch]:
    """Half precision on compute capability 9.0 and later: none of these spills registers."""
    dense = Launch(64, 64, 4, 1)
    if wide <= 64 and narrow:
        return {"fwd": Launch(64, 64, 4, 3), "rows": Launch(64, 64, 4, 3), "columns": Launch(64, 64, 4, 2), "dense": dense}
    if wide <= 64:
        return {"fwd": Launch(128, 64, 4, 3), "rows": Launch(64, 64, 4, 3), "columns": Launch(64, 128, 8, 3), "dense": dense}
    if wide <= 128:
        return {"fwd": Launch(128, 64, 8, 3), "rows": Launch(128, 64, 8, 2), "columns": Launch(32, 128, 8, 2), "dense": dense}
    return {"fwd": Launch(128, 64, 8, 2), "rows": Launch(128, 32, 8, 2), "columns": Launch(32, 128, 8, 2), "dense": Launch(32, 32, 4, 1)}


def _ampere(wide: int) -> dict[str, Launch]:
    """Half precision on 8.x, where products read registers."""
    dense = Launch(64, 64, 4, 1) if wide <= 128 else Launch(32, 32, 4, 1)
    if wide <= 64:
        return {"fwd": Launch(128, 64, 4, 3), "rows": Launch(64, 64, 4, 2), "columns": Launch(64, 64, 4, 2), "dense": dense}
    if wide <= 128:
        return {"fwd": Launch(128, 64, 8, 2), "rows": Launch(64, 64, 8, 1), "columns": Launch(32, 64, 8, 1), "dense": dense}
    return {"fwd": Launch(64, 32, 8, 2), "rows": Launch(32, 32, 8, 1), "columns": Launch(32, 32, 8, 1), "dense": dense}


def _full_precision(wide: int) -> dict[str, Launch]:
    """fp32: products without tensor cores are unrolled over D, so tiles shrink as D grows."""
    if wide <= 64:
        return {"fwd": Launch(64, 32, 8, 2), "rows": Launch(32, 32, 4, 1), "columns": Launch(32, 32, 4, 1), "dense": Launch(32, 32, 4, 1)}
    if wide <= 128:
        return {"fwd": Launch(32, 32, 8, 1), "rows": Launch(32, 32, 8, 1), "columns": Launch(32, 32, 8, 1), "dense": Launch(32, 32, 8, 1)}
    return {name: Launch(16, 16, 4, 1) for name in ("fwd", "rows", "columns", "dense")}


def _shrink(name: str, launch: Launch, request: AttentionRequest) -> Launch:
    """Smaller tiles where the lengths are known and short, or where too few programs would run to fill the GPU."""
    m, n, warps = launch.m, launch.n, launch.warps
    batch, heads, queries, _ = request.q.shape
    keys = request.k.shape[2]
    if isinstance(queries, int):
        m = min(m, block(queries))
    if isinstance(keys, int):
        n = min(n, block(keys))
    if all(isinstance(x, int) for x in (batch, queries, keys)):
        own, length = (n, keys) if name == "columns" else (m, queries)
        programs = batch * heads * -(-length // own)
        if programs < _PROCESSORS and own > 64:
            m, n = (m, 64) if name == "columns" else (64, n)
    warps = min(warps, 4) if m * n < launch.m * launch.n and m * n <= 64 * 64 else warps
    return Launch(m, n, warps, launch.stages)


def _single(name: str, launch: Launch, request: AttentionRequest) -> Launch:
    """A kernel whose loop surely has one tile has no loop, and nothing to pipeline."""
    length, tile = (request.q.shape[2], launch.m) if name == "columns" else (request.k.shape[2], launch.n)
    if name == "dense" or not (isinstance(length, int) and length <= tile):
        return launch
    return replace(launch, stages=1, single=True)


def _narrow(request: AttentionRequest) -> bool:
    """A band of so few keys that a large tile has hardly a tile inside it."""
    mask = request.facts.mask
    bounds = [mask.term(kind) for kind in ("lower", "upper")] if mask is not None else []
    ends = [t.bound.constant for t in bounds if t is not None and t.bound is not None and not t.bound.terms]
    return len(ends) == 2 and ends[1] - ends[0] <= _NARROW


def _lists(request: AttentionRequest, entries: dict[str, int | str | bool]) -> bool:
    """Walk over lists of tiles: the mask is more than bounds, and so much may be skipped that a pass over it pays."""
    mask = request.facts.mask
    if not (request.hides_by_bias or (mask is not None and mask.places)) or any(entries[f"{name}_single"] for name in ("fwd", "rows", "columns")):
        return False
    queries, keys = request.q.shape[2], request.k.shape[2]
    return not (isinstance(queries, int) and isinstance(keys, int)) or queries * keys >= _LEAST_SCORES


def _whole(request: AttentionRequest, wide: int) -> dict[str, int | bool]:
    """Tile of the backward kernel for score matrices that are one tile, if these are: keys and queries of windows."""
    most = 64 if request.q.dtype.itemsize == 2 else 32
    lengths = request.q.shape[2], request.k.shape[2]
    fits = all(isinstance(n, int) and 0 < n <= most for n in lengths) and wide <= 64 and request.q.shape[1] == request.k.shape[1]
    if not fits:
        return {"whole": False}
    return {"whole": True, "whole_m": block(int(lengths[0])), "whole_n": block(int(lengths[1])), "whole_warps": 4, "whole_stages": 1}


def sums_over_keys(request: AttentionRequest) -> bool:
    """Some captured tensor's gradient is summed over the keys (a temperature, ALiBi slopes, a row's bias).

    sum_k dS dprogram/dc cancels: with delta from an output rounded to half precision its error is many times eager's own.
    """
    return any(
        node.op == "load" and request.captures[int(node.value)].requires_grad and "k" not in needs  # type: ignore[arg-type]
        for node, needs in zip(request.program.nodes, depends(request.program), strict=True)
    )


def dense_bytes(request: AttentionRequest) -> int:
    """Bytes a score of the captured tensors that are read at both q and k."""
    total = 0
    for program in (request.program, request.post):
        for node, needs in zip(program.nodes, depends(program), strict=True) if program else ():
            if node.op == "load" and {"q", "k"} <= needs:
                total += getattr(torch, program.captures[int(node.value)].dtype).itemsize  # type: ignore[union-attr, arg-type]
    return total


def estimate(name: str, launch: Launch, d: int, dv: int, size: int, dense: int = 0) -> int:
    """Bytes of shared memory: the tiles that stay, the pipelined ones once per stage, the score tiles that are exchanged.

    ``dense``: see ``dense_bytes``; such tiles are pipelined too.
    """
    both = (d + dv) * size
    scores = launch.m * launch.n * size
    captured = launch.stages * launch.m * launch.n * dense
    if name == "fwd":
        return launch.m * d * size + launch.stages * launch.n * both + scores + captured
    if name == "rows":
        return launch.m * both + launch.stages * launch.n * both + 2 * scores + captured
    if name == "columns":
        return launch.n * both + launch.stages * (launch.m * both + 8 * launch.m) + 2 * scores + captured
    return (launch.m + launch.n) * both + 2 * scores + captured


def _fit(name: str, launch: Launch, request: AttentionRequest, limit: int) -> Launch:
    """Fewer stages, then smaller tiles, until the estimate fits."""
    d, dv, size, dense = block(int(request.q.shape[3])), block(int(request.v.shape[3])), request.q.dtype.itemsize, dense_bytes(request)
    while estimate(name, launch, d, dv, size, dense) > limit:
        if launch.stages > 1:
            launch = Launch(launch.m, launch.n, launch.warps, launch.stages - 1)
        elif launch.n >= launch.m and launch.n > 16:
            launch = Launch(launch.m, launch.n // 2, launch.warps, launch.stages)
        else:
            launch = Launch(launch.m // 2, launch.n, launch.warps, launch.stages)
    return launch
