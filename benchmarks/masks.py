"""Masked attention against the same attention without a mask: the time should follow the share of tiles that are not empty.

    python benchmarks/masks.py --length 4096
    python benchmarks/masks.py --length 16384 --heads 16 --contenders flashattn,triton,flex --map

Attention by hand, (batch, heads, length, size), compiled with flashattn, forward and backward, on a GPU (bfloat16) or a CPU (float32). Documents are
packed (8, of random lengths), a prefix is an eighth of the length, blocks of 128 x 128 are kept at random. On a short input each mask first passes
the two-reference rule. The share is that of 128 x 128 tiles with a visible score. ``triton`` is flashattn with that kernel for every mask;
``flex`` is PyTorch's FlexAttention with its block mask already built, whose making is timed apart; ours is made in every step. ``--map``
times the pass over a mask that is a tensor against reading as many bytes at the speed of a copy; ``--profile`` adds the microseconds in each
of our Triton kernels, forward and backward. ``kernels`` is ``triton`` without Inductor: the rewritten graph run node by node, which compiles in seconds and
has the same kernels.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import harness
import torch
from torch import Tensor

from fa_inductor.backend import Compilation
from fa_inductor.options import Options

Mask = Callable[[Tensor], Tensor]
"""(length, length) or (length,) tensors that a mask is made of -> which scores are visible."""
BLOCK = 128


def _places(x: Tensor) -> tuple[Tensor, Tensor]:
    i = torch.arange(x.shape[-1], device=x.device)
    return i[:, None], i[None]


def causal(ids: Tensor) -> Tensor:
    q, k = _places(ids)
    return k <= q


def window(ids: Tensor) -> Tensor:
    q, k = _places(ids)
    return (k <= q) & (q - k < 256)


def prefix(ids: Tensor) -> Tensor:
    q, k = _places(ids)
    return (k <= q) | (k < ids.shape[-1] // 8)


def documents(ids: Tensor) -> Tensor:
    q, k = _places(ids)
    return (ids[:, None] == ids[None]) & (k <= q)


def given(mask: Tensor) -> Tensor:
    return mask


def document_numbers(length: int, device: torch.device) -> Tensor:
    ends = torch.randperm(length, generator=torch.Generator().manual_seed(0))[:7]
    return torch.zeros(length, dtype=torch.long).index_fill(0, ends, 1).cumsum(0).to(device)


def blocks(share: float) -> Callable[[int, torch.device], Tensor]:
    """Of every row of blocks this share, the diagonal among them."""

    def make(length: int, device: torch.device) -> Tensor:
        n = math.ceil(length / BLOCK)
        chance = torch.rand(n, n, generator=torch.Generator().manual_seed(0)).fill_diagonal_(2.0)
        kept = chance >= chance.topk(max(1, round(n * share)), -1).values[:, -1:]
        return kept.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:length, :length].to(device)

    return make


def numbers(length: int, device: torch.device) -> Tensor:
    return torch.zeros(length, dtype=torch.long, device=device)


CASES: dict[str, tuple[Mask | None, Callable[[int, torch.device], Tensor]]] = {
    "full": (None, numbers),
    "causal": (causal, numbers),
    "window 256": (window, numbers),
    "prefix": (prefix, numbers),
    "8 documents": (documents, document_numbers),
    **{f"blocks {share:.4g}": (given, blocks(share)) for share in (0.25, 0.125, 0.0625)},
}


FLEX: dict[str, Callable[[Tensor], Callable[..., Tensor]]] = {
    "causal": lambda given: lambda b, h, q, k: k <= q,
    "window 256": lambda given: lambda b, h, q, k: (k <= q) & (q - k < 256),
    "prefix": lambda given: lambda b, h, q, k: (k <= q) | (k < given.shape[-1] // 8),
    "8 documents": lambda given: lambda b, h, q, k: (given[q] == given[k]) & (k <= q),
    **{f"blocks {share:.4g}": (lambda given: lambda b, h, q, k: given[q, k]) for share in (0.25, 0.125, 0.0625)},
}
"""The same masks as functions of positions, made from what ``CASES`` makes."""


def attention(mask: Mask | None) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return (scores if mask is None else scores.masked_fill(~mask(given), -math.inf)).softmax(-1) @ v

    return function


def step(function: Callable[..., Tensor], tensors: list[Tensor], given: Tensor, train: bool) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        with torch.set_grad_enabled(train):
            out = function(*tensors, given)
        return [out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out))] if train else [out]

    return run


def tensors_of(args: argparse.Namespace, length: int, device: torch.device) -> list[Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    g = torch.Generator(device).manual_seed(0)
    return [torch.randn(args.batch, args.heads, length, args.size, device=device, generator=g).to(dtype).requires_grad_() for _ in range(3)]


def check(function: Callable[..., Tensor], compiled: Callable[..., Tensor], args: argparse.Namespace, given: Tensor) -> None:
    """ValueError where the two-reference rule does not hold."""
    tensors = tensors_of(args, given.shape[-1], given.device)
    exact = step(function, [t.detach().double().requires_grad_() for t in tensors], given, True)()
    eager, ours = (step(f, tensors, given, True)() for f in (function, compiled))
    for a, b, e in zip(ours, eager, exact, strict=True):
        found, own = harness.relative_error([a], [e]), harness.relative_error([b], [e])
        if not harness.two_reference(found, own, tensors[0].dtype):
            raise ValueError(f"error {found:.2e}, eager's {own:.2e}")


def share_of(mask: Mask | None, given: Tensor) -> float:
    if mask is None:
        return 1.0
    n = given.shape[-1]
    padded = torch.nn.functional.pad(mask(given).expand(n, n), (0, -n % BLOCK, 0, -n % BLOCK))
    return float(padded.view(-(-n // BLOCK), BLOCK, -1, BLOCK).any(3).any(1).double().mean())


def contender(name: str, contender: str, mask: Mask | None, args: argparse.Namespace) -> Callable[..., Tensor]:
    """(q, k, v, what the mask is made of) -> output."""
    if contender == "flex":
        return flex(name)
    if contender == "kernels":
        return torch.compile(attention(mask), backend=lambda gm, _: Compilation(gm, Options(kernel="triton_fa2")).run(), dynamic=False)
    options = {"kernel": "triton"} if contender == "triton" else None
    return torch.compile(attention(mask), backend="flashattn", dynamic=False, options=options)


def flex(name: str) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    built: dict[int, BlockMask] = {}

    def function(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        n = q.shape[2]
        if name in FLEX and n not in built:
            built[n] = create_block_mask(FLEX[name](given), None, None, n, n, device=q.device)
        return compiled(q, k, v, block_mask=built.get(n))  # type: ignore[no-any-return]

    return function


def measure(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    torch._dynamo.config.recompile_limit = 256  # all masks share the code of one function
    rows: dict[str, dict[str, Any]] = {}
    modes = {"forward": False, "forward + backward": True}
    steps: dict[str, dict[str, Callable[[], object]]] = {mode: {} for mode in modes}
    for name, (mask, make) in CASES.items():
        if args.only and name not in args.only.split(",") and mask is not None:
            continue
        for one in args.contenders.split(","):
            compiled = contender(name, one, mask, args)
            rows[f"{name} {one}"] = row = {"mask": name, "contender": one, "share": share_of(mask, make(args.length, device))}
            try:
                check(attention(mask), compiled, args, make(min(args.length, 640), device))
                tensors, given = tensors_of(args, args.length, device), make(args.length, device)
                for mode, train in modes.items():
                    steps[mode][f"{name} {one}"] = step(compiled, tensors, given, train)
                    steps[mode][f"{name} {one}"]()
                if one == "flex" and mask is not None:
                    row["block mask ms"] = _block_mask(name, given, device)
            except Exception as error:  # a mask that fails is a row of the result
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    for mode in modes:
        for key, ms in harness.interleaved(steps[mode], device, rounds=args.rounds).items():
            rows[key][f"{mode} ms"] = ms
            rows[key][f"{mode} MiB"] = (harness.peak_memory(steps[mode][key], device) or 0) / harness.MIB
            if args.profile and modes[mode] and rows[key]["contender"] != "flex":
                rows[key]["kernels us"] = profile(steps[mode][key])
    return list(rows.values())


def _block_mask(name: str, given: Tensor, device: torch.device) -> float:
    from torch.nn.attention.flex_attention import create_block_mask

    n, make = given.shape[-1], torch.compile(create_block_mask)
    return harness.interleaved({"": lambda: make(FLEX[name](given), None, None, n, n, device=device)}, device, rounds=1)[""]


def map_pass(args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Milliseconds of the pass over a mask of length x length, and of reading it at the speed of a copy."""
    from fa_inductor.kernels.triton_fa2.tile_lists import Walk, find_lists, find_map
    from fa_inductor.program import ProgramBuilder

    builder = ProgramBuilder()
    program = builder.finish(builder.load(builder.capture("bool", 2), [builder.index("q"), builder.index("k")]))
    mask = CASES["blocks 0.25"][1](args.length, device)
    large = torch.empty(2**30, dtype=torch.uint8, device=device)
    copy = torch.empty_like(large)
    walks = (Walk(128, 64, False), Walk(64, 64, False), Walk(128, 64, True))
    shape = (1, 1, args.length, args.length)
    steps: dict[str, Callable[[], object]] = {
        "copy": lambda: copy.copy_(large),
        "map": lambda: find_map(program, 64, 64, [mask], (), shape, device),
        "lists": lambda: find_lists(program, walks, [mask], (), shape, device),
    }
    ms = harness.interleaved(steps, device, rounds=args.rounds)
    return {"read ms": ms["copy"] * mask.numel() / (2 * large.numel()), "map ms": ms["map"], "map and lists ms": ms["lists"]}


def profile(function: Callable[[], object]) -> dict[str, float]:
    """Microseconds in each of our Triton kernels, in one step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    steps = 5
    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            function()
        torch.cuda.synchronize()
    return {e.key: e.self_device_time_total / steps for e in found.key_averages() if e.key.startswith("fa2_")}


def show(rows: list[dict[str, Any]]) -> None:
    full = {row["contender"]: row for row in rows if row["mask"] == "full"}
    for row in rows:
        what = f"{row['mask']:14} {row['contender']:9} {row['share']:6.1%} of tiles"
        for mode in ("forward", "forward + backward"):
            if f"{mode} ms" not in row:
                continue
            row[f"{mode} / full"] = row[f"{mode} ms"] / full[row["contender"]][f"{mode} ms"]
            extra = f"  {row[f'{mode} MiB']:7.0f} MiB" + (f"  block mask {row['block mask ms']:.2f} ms" if "block mask ms" in row else "")
            print(f"{what}  {mode:18} {row[f'{mode} ms']:9.3f} ms  {row[f'{mode} / full']:6.3f} of full{extra}", flush=True)
        if "kernels us" in row:
            print(f"{what}  " + ", ".join(f"{name.removeprefix('fa2_')} {us:.0f} us" for name, us in row["kernels us"].items()))
        if "error" in row:
            print(f"{what}  {row['error']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in (("length", 2048), ("batch", 1), ("heads", 4), ("size", 64), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="", help="comma-separated masks: " + ", ".join(CASES))
    parser.add_argument("--contenders", default="flashattn", help="comma-separated: flashattn, triton, kernels, flex")
    parser.add_argument("--map", action="store_true", help="time the pass over a mask alone, on a GPU")
    parser.add_argument("--profile", action="store_true", help="microseconds in each Triton kernel, on a GPU")
    parser.add_argument("--out")
    args = parser.parse_args()
    device = harness.pick_device()
    rows = measure(args, device)
    show(rows)
    found: dict[str, Any] = {"arguments": vars(args), "rows": rows}
    if args.map:
        found["map"] = map_pass(args, device)
        print(", ".join(f"{name} {value:.3f}" for name, value in found["map"].items()))
    harness.save("masks", device, found, args.out)


if __name__ == "__main__":
    main()
