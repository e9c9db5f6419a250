"""Correctness, then tile configurations of the Triton kernels, on the GPU of this machine.

    python benchmarks/triton_sweep.py --out sweep.json [--checks] [--sweep 64,128] [--variants] [--gpt2]

Without a choice everything runs. Forward, dQ ("rows") and dK/dV ("columns") are timed apart; FLOPs are 4 S^2 D H B for forward and 2.5
times that for backward, of which rows and columns are charged their share by matrix products (3 and 4 of 7), halved when causal.
Configurations compile in worker processes first, through Triton's disk cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fa_inductor.kernels.triton_fa2 import KERNEL  # noqa: E402
from fa_inductor.kernels.triton_fa2 import backward as backward_launch  # noqa: E402
from fa_inductor.kernels.triton_fa2.codegen import traits_of  # noqa: E402
from fa_inductor.request import Inputs, Needs, Plan, TensorSpec  # noqa: E402

TOKENS, HIDDEN = 16384, 2048
DEVICE = "cuda"
# (m, n, warps, stages)
CANDIDATES: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {
    ("fwd", 64): [
        *((128, 128, 4, s) for s in (2, 3)),
        *((128, 128, 8, s) for s in (2, 3)),
        *((128, 64, w, s) for w in (4, 8) for s in (2, 3, 4)),
        *((64, n, 4, 3) for n in (64, 128)),
        (256, 64, 8, 3),
        (128, 32, 4, 4),
    ],
    ("fwd", 128): [
        *((128, 64, 8, s) for s in (2, 3, 4)),
        *((128, 128, 8, s) for s in (2, 3)),
        *((128, 64, 4, s) for s in (2, 3)),
        *((64, n, 4, s) for n in (64, 128) for s in (2, 3)),
        (128, 32, 4, 4),
    ],
    ("rows", 64): [
        *((128, 64, 8, s) for s in (2, 3, 4)),
        *((128, 64, 4, s) for s in (2, 3)),
        *((64, 64, 4, s) for s in (2, 3)),
        *((64, 128, 4, s) for s in (2, 3)),
        *((128, 128, 8, s) for s in (2, 3)),
        (128, 32, 4, 3),
    ],
    ("rows", 128): [
        *((128, 64, 8, s) for s in (1, 2, 3)),
        *((64, 64, 4, s) for s in (2, 3)),
        *((128, 32, w, 3) for w in (4, 8)),
        *((64, 32, 4, s) for s in (2, 3)),
        (64, 128, 4, 2),
        (128, 128, 8, 1),
    ],
    ("columns", 64): [
        *((64, 128, 8, s) for s in (2, 3, 4)),
        *((64, 128, 4, s) for s in (2, 3)),
        *((64, 64, 4, s) for s in (2, 3)),
        *((32, 128, w, 3) for w in (4, 8)),
        (128, 128, 8, 2),
        (128, 64, 4, 2),
        (32, 64, 4, 3),
    ],
    ("columns", 128): [
        *((64, 128, 8, s) for s in (1, 2, 3)),
        *((32, 128, 8, s) for s in (2, 3)),
        *((64, 64, 4, s) for s in (2, 3)),
        *((32, 64, 4, s) for s in (2, 3)),
        (16, 128, 8, 3),
        (128, 64, 8, 2),
    ],
}


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    length: int
    d: int
    form: str
    dtype: torch.dtype = torch.bfloat16
    dropout: float = 0.0

    @property
    def flops(self) -> float:
        """Forward, as published: halved under a causal mask."""
        return 4.0 * self.batch * self.heads * self.length**2 * self.d * (0.5 if self.form.startswith("causal") else 1.0)


def paper(length: int, d: int, form: str) -> Shape:
    return Shape(TOKENS // length, HIDDEN // d, length, d, form)


def problem_of(shape: Shape, seed: int = 0) -> tuple[Plan, Inputs, torch.Tensor]:
    """Plan with the default configuration, inputs and incoming gradient."""
    from kernel_cases import Case, Dims, problem

    small = problem(Case("sweep", shape.form, Dims(1, shape.heads, shape.heads, 16, 16, shape.d, shape.d), shape.dtype), DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    size = (shape.batch, shape.heads, shape.length, shape.d)
    q, k, v, g = (torch.randn(size, generator=generator, device=DEVICE).to(shape.dtype) for _ in range(4))
    captures = small.captures
    if shape.form == "bias_hqk_grad":
        captures = (torch.randn((1, shape.heads, shape.length, shape.length), generator=generator, device=DEVICE).to(shape.dtype),)
    spec = TensorSpec(tuple(q.shape), tuple(q.stride()), q.dtype, True)
    request = replace(small.request(shape.dropout), q=spec, k=spec, v=spec)
    state = torch.tensor([1234, 5678], device=DEVICE) if shape.dropout else None
    return KERNEL.plan(request), Inputs(q, k, v, captures, small.form.sizes, shape.dropout, state), g


def with_config(plan: Plan, kernel: str, config: tuple[int, int, int, int]) -> Plan:
    entries = dict(plan.config) | {f"{kernel}_{name}": value for name, value in zip(("m", "n", "warps", "stages"), config, strict=True)}
    return replace(plan, config=tuple(sorted(entries.items())))


class Runner:
    """The three kernels of one problem, each launchable alone."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.plan, self.inputs, self.grad = problem_of(shape)
        self.result = KERNEL.forward(self.plan, self.inputs)
        self.shared = backward_launch._shared(traits_of(self.plan), self.inputs, self.result, self.grad)
        self.needs = Needs(True, True, True, tuple(False for _ in self.inputs.captures))

    def call(self, kernel: str, plan: Plan) -> Callable[[], Any]:
        if kernel == "fwd":
            return lambda: KERNEL.forward(plan, self.inputs)
        if kernel == "rows":
            return lambda: backward_launch._rows(plan, self.inputs, self.shared, True, (), [])
        return lambda: backward_launch._columns(plan, self.inputs, self.shared, self.needs, (), [])


def milliseconds(call: Callable[[], Any], rep: int = 40) -> float:
    import triton

    return float(triton.testing.do_bench(call, warmup=8, rep=rep, return_mode="median"))


def _compile(job: tuple[Shape, str, tuple[int, int, int, int]]) -> str:
    """Worker: run one configuration once at a small size, which fills Triton's disk cache."""
    shape, kernel, config = job
    try:
        runner = Runner(replace(shape, batch=1, length=256, heads=1))
        runner.call(kernel, with_config(runner.plan, kernel, config))()
        torch.cuda.synchronize()
    except Exception as error:  # a configuration that does not fit is a result, reported with its message
        return f"{type(error).__name__}: {str(error)[:120]}"
    return ""


def compile_all(jobs: list[tuple[Shape, str, tuple[int, int, int, int]]]) -> dict[Any, str]:
    start = time.time()
    with multiprocessing.get_context("spawn").Pool(min(12, os.cpu_count() or 1)) as pool:
        errors = pool.map(_compile, jobs, chunksize=1)
    print(f"compiled {len(jobs)} configurations in {time.time() - start:.0f} s")
    return {job: error for job, error in zip(jobs, errors, strict=True) if error}


def sweep(sizes: Iterable[int], lengths: tuple[int, ...] = (1024, 4096)) -> list[dict[str, Any]]:
    forms = ("plain", "causal_inf")
    jobs = [(paper(1024, d, form), kernel, c) for d in sizes for form in forms for kernel in ("fwd", "rows", "columns") for c in CANDIDATES[kernel, d]]
    errors = compile_all(jobs)
    rows: list[dict[str, Any]] = []
    for d in sizes:
        for form in forms:
            for length in lengths:
                runner = Runner(paper(length, d, form))
                for kernel in ("fwd", "rows", "columns"):
                    rows += _time_candidates(runner, kernel, {c for s, k, c in errors if (s.d, s.form, k) == (d, form, kernel)})
    for job, error in errors.items():
        print("failed", job[0].d, job[0].form, job[1], job[2], error)
    return rows


def _time_candidates(runner: Runner, kernel: str, broken: set[tuple[int, int, int, int]]) -> list[dict[str, Any]]:
    shape = runner.shape
    share = {"fwd": 1.0, "rows": 2.5 * 3 / 7, "columns": 2.5 * 4 / 7}[kernel]
    rows = []
    for config in CANDIDATES[kernel, shape.d]:
        if config in broken:
            continue
        ms = milliseconds(runner.call(kernel, with_config(runner.plan, kernel, config)))
        rows.append(
            {"d": shape.d, "form": shape.form, "length": shape.length, "kernel": kernel, "config": config, "ms": ms, "tflops": shape.flops * share / ms / 1e9}
        )
    rows.sort(key=lambda r: r["ms"])
    best = "  ".join(f"{r['config']}={r['ms']:.3f}" for r in rows[:5])
    print(f"D={shape.d} {shape.form:10} S={shape.length} {kernel:7} {rows[0]['tflops']:6.0f} TF  {best}", flush=True)
    return rows


def whole(shape: Shape) -> dict[str, Any]:
    """Forward and whole backward (delta included) at the default configuration."""
    plan, inputs, grad = problem_of(shape)
    result = KERNEL.forward(plan, inputs)
    needs = Needs(True, True, True, tuple(False for _ in inputs.captures))
    forward = milliseconds(lambda: KERNEL.forward(plan, inputs))
    backward = milliseconds(lambda: KERNEL.backward(plan, inputs, result, grad, needs))
    row = {"form": shape.form, "d": shape.d, "length": shape.length, "dtype": str(shape.dtype), "dropout": shape.dropout, "fwd_ms": forward, "bwd_ms": backward}
    row |= {"fwd_tflops": shape.flops / forward / 1e9, "bwd_tflops": 2.5 * shape.flops / backward / 1e9}
    print(
        f"{shape.form:16} D={shape.d} S={shape.length} p={shape.dropout} fwd {forward:.3f} ms {row['fwd_tflops']:.0f} TF, "
        f"bwd {backward:.3f} ms {row['bwd_tflops']:.0f} TF, sum {forward + backward:.3f} ms",
        flush=True,
    )
    return row


def variants() -> list[dict[str, Any]]:
    forms = ("plain", "causal_inf", "causal_min", "alibi_grad", "softcap", "window_inf", "bias_hqk_grad")
    rows = [whole(paper(4096, d, form)) for d in (64, 128) for form in forms]
    rows += [whole(paper(length, 256, form)) for length in (1024, 4096) for form in ("plain", "causal_inf")]
    small = (Shape(4096, 4, 49, 32, "plain"), Shape(512, 16, 128, 64, "plain"), Shape(64, 12, 197, 64, "plain"), Shape(4, 8, 1024, 64, "plain", torch.float32))
    return rows + [whole(s) for s in small]


def gpt2() -> list[dict[str, Any]]:
    """The attention of GPT-2 medium in the FlashAttention paper's case, without and with dropout; then every configuration for it."""
    shapes = [Shape(64, 16, 1024, 64, "causal_inf", torch.float16, p) for p in (0.0, 0.1)]
    rows = [whole(s) for s in shapes]
    errors = compile_all([(s, kernel, c) for s in shapes for kernel in ("fwd", "rows", "columns") for c in CANDIDATES[kernel, 64]])
    for shape in shapes:
        runner = Runner(shape)
        print(f"GPT-2, dropout {shape.dropout}")
        for kernel in ("fwd", "rows", "columns"):
            rows += _time_candidates(runner, kernel, {c for s, k, c in errors if (s, k) == (shape, kernel)})
    return rows


def _check(name: str) -> str:
    """Worker: the failure of one case, or nothing."""
    from kernel_cases import all_needs, check, problem

    try:
        p = problem(name, DEVICE)
        check(KERNEL, name, DEVICE, needs=all_needs(p, capture_gradients=not KERNEL.why_not(p.request())))
    except Exception as error:  # reported, and the run goes on
        return f"{name}: {type(error).__name__} {str(error)[:400]}"
    return ""


def checks(pattern: str) -> list[str]:
    """Run the kernel tests' cases on the GPU, in parallel because compiling dominates; returns the failures."""
    import re

    from kernel_cases import CASES

    names = [n for n in CASES if re.search(pattern, n)]
    start = time.time()
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
        failures = [f for f in pool.imap_unordered(_check, names, chunksize=1) if f]
    for failure in failures:
        print("FAILED", failure)
    print(f"checked {len(names)} cases in {time.time() - start:.0f} s, {len(failures)} failed", flush=True)
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checks", nargs="?", const="^(?!.*(1e9|1e4|63|127|padded))", help="regular expression of case names")
    parser.add_argument("--sweep", help="head sizes, such as 64,128")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--gpt2", action="store_true")
    options = parser.parse_args()
    everything = not (options.checks or options.sweep or options.variants or options.gpt2)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def save() -> None:
        options.out.write_text(json.dumps(results, indent=1, default=str))

    if options.checks or everything:
        results["failures"] = checks(options.checks or "float16|^(plain|causal_inf|softcap|alibi_grad|bias_hqk_grad|padding)")
        save()
    if options.gpt2 or everything:
        results["gpt2"] = gpt2()
        save()
    if options.variants or everything:
        results["variants"] = variants()
        save()
    if options.sweep or everything:
        results["sweep"] = sweep([int(d) for d in (options.sweep or "64,128").split(",")])
        save()


if __name__ == "__main__":
    main()
