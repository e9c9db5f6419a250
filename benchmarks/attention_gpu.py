"""The attention of GPT-2 medium on a GPU, forward and backward: 64 sequences, 16 heads of 64, 1024 tokens, float16, causal.

    python benchmarks/attention_gpu.py

The case of the FlashAttention paper (Dao et al. 2022, arXiv:2205.14135, figure 1). Each contender first passes the two-reference
rule on the first sequence, without dropout.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = torch.device("cuda")
Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return F.dropout(scores.masked_fill(future, float("-inf")).softmax(dim=-1), dropout) @ v


def library(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)


def contenders() -> dict[str, Attention]:
    return {
        "eager": attention,
        "inductor": torch.compile(attention),
        "sdpa": library,
        "flashattn": torch.compile(attention, backend="flashattn"),
        "flashattn, kernel=triton": torch.compile(attention, backend="flashattn", options={"kernel": "triton"}),
    }


def training(function: Attention, tensors: list[Tensor], grad: Tensor, dropout: float) -> Callable[[], list[Tensor]]:
    def step() -> list[Tensor]:
        out = function(*tensors, dropout)
        return [out.detach(), *torch.autograd.grad(out, tensors, grad)]

    return step


def check(functions: dict[str, Attention], tensors: list[Tensor], grad: Tensor) -> dict[str, list[float] | str]:
    """Errors of output, dq, dk, dv of the first sequence against float64, or what is wrong with a contender."""
    exact = training(attention, [t.detach()[:1].double().requires_grad_() for t in tensors], grad[:1].double(), 0.0)()
    found: dict[str, list[float] | str] = {}
    eager: list[float] = []
    for name, function in functions.items():
        try:
            actual = training(function, tensors, grad, 0.0)()
        except Exception as error:  # a contender that fails is a row of the result, not the end of the run
            found[name] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        errors = [harness.relative_error([a[:1]], [e]) for a, e in zip(actual, exact, strict=True)]
        eager = eager or errors
        good = all(harness.two_reference(a, e, torch.float16) for a, e in zip(errors, eager, strict=True))
        found[name] = errors if good else f"errors {errors} against eager's {eager}"
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (args.batch, args.heads, args.length, args.size)
    q, k, v, grad = (torch.randn(shape, device=DEVICE, dtype=torch.float16, generator=generator) for _ in range(4))
    tensors = [t.requires_grad_() for t in (q, k, v)]
    functions = contenders()
    errors = check(functions, tensors, grad)
    print("errors against float64:", *(f"  {name}: {found}" for name, found in errors.items()), sep="\n", flush=True)
    sound = {name: function for name, function in functions.items() if isinstance(errors[name], list)}
    results: dict[str, Any] = {"errors": errors}
    for dropout in (0.0, 0.1):
        steps = {name: training(function, tensors, grad, dropout) for name, function in sound.items()}
        ms = harness.interleaved(steps, DEVICE, rounds=args.rounds)
        memory = {name: harness.peak_memory(step, DEVICE) for name, step in steps.items()}
        results[f"dropout {dropout}"] = {"ms": ms, "bytes above inputs": memory}
        rows = [["", "time", "peak memory above inputs"], *([name, f"{ms[name]:.2f} ms", harness.mebibytes(memory[name])] for name in steps)]
        print(f"\ndropout {dropout}, forward and backward\n{harness.table(rows)}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--size", type=int, default=64, help="head size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="folder of the result file (default: benchmarks/results)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs an NVIDIA GPU; benchmarks/cpu_attention.py is the one for a CPU")
    harness.save("attention", DEVICE, run(args), args.out)


if __name__ == "__main__":
    main()
