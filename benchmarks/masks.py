"""Masked attention against the same attention without a mask: the time should follow the share of tiles that are not empty.

    python benchmarks/masks.py --length 4096

Attention by hand, (batch, heads, length, size), compiled with flashattn, forward and backward, on a GPU (bfloat16) or a CPU (float32). Documents are
packed (8, of random lengths), a prefix is an eighth of the length, blocks of 128 x 128 are kept at random. On a short input each mask first passes
the two-reference rule. The share is that of 128 x 128 tiles with a visible score.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import harness
import torch
from torch import Tensor

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


def measure(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    torch._dynamo.config.recompile_limit = 64  # all masks share the code of one function
    rows: list[dict[str, Any]] = []
    modes = {"forward": False, "forward + backward": True}
    steps: dict[str, dict[str, Callable[[], object]]] = {mode: {} for mode in modes}
    for name, (mask, make) in CASES.items():
        if args.only and name not in args.only.split(",") and mask is not None:
            continue
        function = attention(mask)
        compiled = torch.compile(function, backend="flashattn", dynamic=False, options={"kernel": args.kernel} if args.kernel else None)
        row: dict[str, Any] = {"mask": name, "share": share_of(mask, make(args.length, device))}
        rows.append(row)
        try:
            check(function, compiled, args, make(min(args.length, 640), device))
            for mode, train in modes.items():
                steps[mode][name] = step(compiled, tensors_of(args, args.length, device), make(args.length, device), train)
                steps[mode][name]()
        except Exception as error:  # a mask that fails is a row of the result
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    for mode in modes:
        for name, ms in harness.interleaved(steps[mode], device, rounds=args.rounds).items():
            next(r for r in rows if r["mask"] == name)[f"{mode} ms"] = ms
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in (("length", 2048), ("batch", 1), ("heads", 4), ("size", 64), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="", help="comma-separated masks: " + ", ".join(CASES))
    parser.add_argument("--kernel", default="")
    parser.add_argument("--out")
    args = parser.parse_args()
    device = harness.pick_device()
    rows = measure(args, device)
    full = rows[0]
    for row in rows:
        for mode in ("forward", "forward + backward"):
            if f"{mode} ms" in row:
                row[f"{mode} / full"] = row[f"{mode} ms"] / full[f"{mode} ms"]
                print(f"{row['mask']:14} {row['share']:6.1%} of tiles  {mode:18} {row[f'{mode} ms']:9.2f} ms  {row[f'{mode} / full']:6.2f} of full", flush=True)
        if "error" in row:
            print(f"{row['mask']:14} {row['error']}")
    harness.save("masks", device, {"arguments": vars(args), "rows": rows}, args.out)


if __name__ == "__main__":
    main()
