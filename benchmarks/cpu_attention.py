"""Hand-written causal attention on the CPU: eager, inductor and flashattn, time and memory.

    python benchmarks/cpu_attention.py                 # float32, 8 heads of 64, 2048 tokens; memory up to 8192

Exits with an error if a result is wrong by the two-reference rule. The memory rows show that nothing of size S x S is alive:
twice the tokens take twice the memory.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable

import harness
import torch
from torch import Tensor

BACKENDS = ("eager", "inductor", "flashattn")
DEVICE = torch.device("cpu")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ v


def compiled(backend: str) -> Attention:
    """``attention`` under a backend of torch.compile; a length gets a graph of its own."""
    if backend == "eager":
        return attention
    torch._dynamo.reset()
    result: Attention = torch.compile(attention, backend=backend, dynamic=False)
    return result


def inputs(args: argparse.Namespace, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, args.heads, length, args.size, generator=generator).requires_grad_() for _ in range(3)]


def forward(function: Attention, tensors: list[Tensor]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        with torch.no_grad():
            return function(*tensors)

    return step


def training(function: Attention, tensors: list[Tensor], grad: Tensor) -> Callable[[], list[Tensor]]:
    def step() -> list[Tensor]:
        out = function(*tensors)
        return [out.detach(), *torch.autograd.grad(out, tensors, grad)]

    return step


def check(functions: dict[str, Attention], tensors: list[Tensor], grad: Tensor) -> dict[str, list[float]]:
    """Relative errors of output, dq, dk and dv against float64; stops the program if the rule is broken."""
    exact = training(attention, [t.detach().double().requires_grad_() for t in tensors], grad.double())()
    errors = {name: [harness.relative_error([a], [e]) for a, e in zip(training(f, tensors, grad)(), exact, strict=True)] for name, f in functions.items()}
    for name, found in errors.items():
        for what, error, eager in zip(("output", "dq", "dk", "dv"), found, errors["eager"], strict=True):
            if not harness.two_reference(error, eager, torch.float32):
                sys.exit(f"{name}: the error of {what}, {error:.2e}, is more than twice eager's {eager:.2e}")
    return errors


def times(args: argparse.Namespace) -> dict[str, object]:
    tensors = inputs(args, args.length)
    grad = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1))
    functions = {backend: compiled(backend) for backend in BACKENDS}
    errors = check(functions, tensors, grad)
    found = {
        "forward": harness.interleaved({n: forward(f, tensors) for n, f in functions.items()}, DEVICE, rounds=args.rounds),
        "forward and backward": harness.interleaved({n: training(f, tensors, grad) for n, f in functions.items()}, DEVICE, rounds=args.rounds),
    }
    print(f"causal attention, float32, {args.heads} heads of {args.size}, {args.length} tokens, {torch.get_num_threads()} threads\n")
    rows = [["", *BACKENDS, "against eager", "against inductor"]]
    for name, ms in found.items():
        ratios = [f"{ms[other] / ms['flashattn']:.2f}x" for other in ("eager", "inductor")]
        rows.append([name, *(f"{ms[b]:.1f} ms" for b in BACKENDS), *ratios])
    rows.append(["largest error", *(f"{max(errors[b]):.1e}" for b in BACKENDS), "", ""])
    print(harness.table(rows) + "\n", flush=True)
    return {"errors of output, dq, dk, dv": errors, "ms": found}


def memory(backend: str, args: argparse.Namespace, length: int) -> dict[str, int | None]:
    tensors = inputs(args, length)
    function = compiled(backend)
    found = {"forward": harness.peak_memory(forward(function, tensors), DEVICE)}
    found["forward and backward"] = harness.peak_memory(training(function, tensors, torch.ones(tensors[0].shape)), DEVICE)
    return found


def memories(args: argparse.Namespace) -> dict[str, dict[int, dict[str, int | None]]]:
    """Peak memory by backend and length, each measured in a process of its own; eager and inductor only as far as they fit."""
    found: dict[str, dict[int, dict[str, int | None]]] = {}
    for backend in BACKENDS:
        lengths = args.memory_lengths if backend == "flashattn" else args.memory_lengths[:2]
        found[backend] = {n: harness.in_fresh_process(__file__, *sys.argv[1:], "--memory-of", backend, "--at", str(n)) for n in lengths}
    rows = [["peak memory", *(f"{n} tokens" for n in args.memory_lengths)]]
    for backend, by_length in found.items():
        for mode in ("forward", "forward and backward"):
            rows.append([f"{backend}, {mode}", *(harness.mebibytes(by_length[n][mode]) if n in by_length else "-" for n in args.memory_lengths)])
    one_head = [f"{n * n * 4 / harness.MIB:.0f} MiB" for n in args.memory_lengths]
    print(harness.table([*rows, ["(the scores of one head)", *one_head]]) + "\n", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=64, help="head size")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-lengths", type=int, nargs="*", default=[2048, 4096, 8192])
    parser.add_argument("--out", help="folder of the result file (default: benchmarks/results)")
    parser.add_argument("--memory-of", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--at", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print(json.dumps(memory(args.memory_of, args, args.at)))
        return
    results = {**times(args), "peak bytes": memories(args)}
    harness.save("attention", DEVICE, results, args.out)


if __name__ == "__main__":
    main()
