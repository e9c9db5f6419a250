"""Windowed attention with a learned bias on a GPU, as in Swin-base at 224 x 224: 64 images, windows of 49, heads of 32, bfloat16.

    python benchmarks/windows_gpu.py

By stage: windows x images, heads; with the shifted windows' mask. Written by hand (eager, inductor, flashattn) and as a call of
``scaled_dot_product_attention`` with the bias as its mask, which PyTorch runs in its memory-efficient kernel. Each contender first
passes the two-reference rule on the first two windows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = torch.device("cuda")
STAGES = ((4096, 4), (1024, 8), (256, 16), (64, 32))
LENGTH, SIZE, WINDOWS = 49, 32, 64
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def bias_of(table: Tensor, mask: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """The learned bias, (heads, q, k), and the mask of each window, (windows, q, k)."""
    return (table.to(dtype) + mask.repeat(-(-batch // mask.shape[0]), 1, 1)[:batch, None]).to(dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    scores = (q * SIZE**-0.5) @ k.transpose(-2, -1)
    return (scores + bias_of(table, mask, q.shape[0], q.dtype)).softmax(dim=-1) @ v


def library(q: Tensor, k: Tensor, v: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias_of(table, mask, q.shape[0], q.dtype))


def contenders() -> dict[str, Attention]:
    return {
        "eager": attention,
        "inductor": torch.compile(attention, dynamic=False),
        "flashattn": torch.compile(attention, backend="flashattn", dynamic=False),
        "sdpa, inductor": torch.compile(library, dynamic=False),
        "sdpa, flashattn": torch.compile(library, backend="flashattn", dynamic=False),
    }


def inputs(batch: int, heads: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v and the table, which train; the mask; the gradient of the output."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (batch, LENGTH, heads, SIZE)
    q, k, v, grad = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, generator=generator).transpose(1, 2) for _ in range(4))
    table = torch.randn(heads, LENGTH, LENGTH, device=DEVICE, generator=generator)
    mask = torch.where(torch.rand(WINDOWS, LENGTH, LENGTH, device=DEVICE, generator=generator) < 0.3, -100.0, 0.0)
    return [t.requires_grad_() for t in (q, k, v, table)], mask, grad


def training(function: Attention, tensors: list[Tensor], mask: Tensor, grad: Tensor) -> Callable[[], list[Tensor]]:
    def step() -> list[Tensor]:
        out = function(*tensors, mask)
        return [out.detach(), *torch.autograd.grad(out, tensors, grad)]

    return step


def check(functions: dict[str, Attention]) -> dict[str, Any]:
    """Errors of output and gradients of two windows against float64, or what is wrong with a contender."""
    tensors, mask, grad = inputs(2, 4)
    exact = training(attention, [t.detach().double().requires_grad_() for t in tensors], mask.double(), grad.double())()
    found: dict[str, Any] = {}
    eager: list[float] = []
    for name, function in functions.items():
        actual = training(function, tensors, mask, grad)()
        errors = [harness.relative_error([a], [e]) for a, e in zip(actual, exact, strict=True)]
        eager = eager or errors
        good = all(harness.two_reference(a, e, torch.bfloat16) for a, e in zip(errors, eager, strict=True))
        found[name] = errors if good else f"errors {errors} against eager's {eager}"
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    functions = contenders()
    errors = check(functions)
    print("errors against float64:", *(f"  {name}: {found}" for name, found in errors.items()), sep="\n", flush=True)
    results: dict[str, Any] = {"errors": errors}
    rows = [["windows x images, heads", *functions]]
    for batch, heads in STAGES:
        tensors, mask, grad = inputs(batch, heads)
        steps = {name: training(function, tensors, mask, grad) for name, function in functions.items() if isinstance(errors[name], list)}
        times = harness.interleaved(steps, DEVICE, rounds=args.rounds)
        results[f"{batch} windows, {heads} heads, forward and backward"] = times
        rows.append([f"{batch}, {heads}", *(f"{times[name]:.3f} ms" if name in times else "wrong" for name in functions)])
    print(harness.table(rows), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="folder of the result file (default: benchmarks/results)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs an NVIDIA GPU")
    harness.save("windows", DEVICE, run(args), args.out)


if __name__ == "__main__":
    main()
