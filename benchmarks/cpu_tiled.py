"""The tiled and torch_sdpa kernels against eager PyTorch on the CPU: forward, and forward + backward.

    python benchmarks/cpu_tiled.py [--length 2048] [--heads 8] [--threads 2] [--only causal,alibi]

Prints a Markdown table of milliseconds (the best of several runs) and the peak memory above the inputs. Eager is attention
as people write it, differentiated by autograd.
"""

from __future__ import annotations

import argparse
import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from kernel_cases import Case, Dims, Problem, all_needs, problem

from fa_inductor.kernels.tiled import KERNEL as TILED
from fa_inductor.kernels.torch_sdpa import KERNEL as TORCH_SDPA
from fa_inductor.request import Kernel

Eager = Callable[[Tensor, Tensor, Tensor, list[Tensor]], Tensor]


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def _future(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)


def plain(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor]) -> Tensor:
    return torch.softmax(_scores(q, k), -1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor]) -> Tensor:
    return torch.softmax(_scores(q, k).masked_fill(_future(q, k), -torch.inf), -1) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor]) -> Tensor:
    distance = torch.arange(k.shape[2])[None, :] - torch.arange(q.shape[2])[:, None]
    s = _scores(q, k) + captures[0][:, None, None] * distance
    return torch.softmax(s.masked_fill(_future(q, k), -torch.inf), -1) @ v


def softcap(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor]) -> Tensor:
    return torch.softmax(torch.tanh(_scores(q, k) / 5.0) * 5.0, -1) @ v


def softcap_window(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor]) -> Tensor:
    distance = torch.arange(k.shape[2])[None, :] - torch.arange(q.shape[2])[:, None]
    s = torch.tanh(_scores(q, k) / 5.0) * 5.0
    return torch.softmax(s.masked_fill((distance > 0) | (distance <= -20), -torch.inf), -1) @ v


def padding(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor]) -> Tensor:
    return torch.softmax(_scores(q, k).masked_fill(~captures[0][:, None, None, :], torch.finfo(q.dtype).min), -1) @ v


def buckets(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor]) -> Tensor:
    distance = torch.arange(k.shape[2])[None, :] - torch.arange(q.shape[2])[:, None]
    bias = captures[0][distance.abs().clamp(max=15)].permute(2, 0, 1)
    return torch.softmax(q @ k.transpose(-1, -2) + bias, -1) @ v


def dense_bias(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor]) -> Tensor:
    return torch.softmax(_scores(q, k) + captures[0], -1) @ v


EAGER: dict[str, Eager] = {
    "plain": plain,
    "causal_inf": causal,
    "padding_replace_min": padding,
    "alibi_grad": alibi,
    "softcap": softcap,
    "softcap_window_inf": softcap_window,
    "buckets_grad": buckets,
    "bias_hqk_grad": dense_bias,
}


def milliseconds(function: Callable[[], object], least: float = 1.0) -> float:
    """Best time of at least five runs and ``least`` seconds."""
    function()
    best, runs, start = math.inf, 0, time.perf_counter()
    while runs < 5 or time.perf_counter() - start < least:
        before = time.perf_counter()
        function()
        best, runs = min(best, time.perf_counter() - before), runs + 1
    return best * 1e3


def peak_megabytes(function: Callable[[], object]) -> float:
    """Growth of the process's resident memory while ``function`` runs, sampled every millisecond."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    start, peak, stop = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, resident())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    function()
    stop.set()
    watcher.join()
    return (peak - start) / 2**20


def eager_runs(p: Problem, function: Eager) -> tuple[Callable[[], object], Callable[[], object]]:
    leaves = [t.detach().clone().requires_grad_() for t in (p.q, p.k, p.v)]
    captures = [c.clone().requires_grad_(d) for c, d in zip(p.captures, p.form.differentiable, strict=True)]
    wanted = leaves + [c for c in captures if c.requires_grad]

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*leaves, captures)

    return forward, lambda: torch.autograd.grad(function(*leaves, captures), wanted, p.grad_out)


def kernel_runs(kernel: Kernel, p: Problem) -> tuple[Callable[[], object], Callable[[], object]] | None:
    if kernel.why_not(p.request()):
        return None
    plan, inputs, needs = kernel.plan(p.request()), p.inputs(), all_needs(p)

    def both() -> object:
        result = kernel.forward(plan, inputs)
        return kernel.backward(plan, inputs, result, p.grad_out, needs)

    return (lambda: kernel.forward(plan, inputs)), both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", default=",".join(EAGER))
    parser.add_argument("--no-eager", action="store_true", help="lengths at which eager runs out of memory")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dims = Dims(args.batch, args.heads, args.heads, args.length, args.length, args.head_size, args.head_size)
    print(f"{dims}, {args.dtype}, {args.threads} threads, torch {torch.__version__}\n")
    print("| case | kernel | forward ms | forward + backward ms | peak MB, forward + backward |\n|---|---|---|---|---|")
    for form in args.only.split(","):
        p = problem(Case(form, form, dims, getattr(torch, args.dtype)))
        rows = {"eager": None if args.no_eager else eager_runs(p, EAGER[form]), "tiled": kernel_runs(TILED, p), "torch_sdpa": kernel_runs(TORCH_SDPA, p)}
        for name, runs in rows.items():
            if runs is not None:
                memory = peak_megabytes(runs[1])
                print(f"| {form} | {name} | {milliseconds(runs[0]):.1f} | {milliseconds(runs[1]):.1f} | {memory:.0f} |", flush=True)


if __name__ == "__main__":
    main()
