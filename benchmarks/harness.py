"""What the benchmarks share: interleaved timing, peak memory, errors by the two-reference rule, and result files.

Timing is interleaved: in every round each contender runs once, so that a busy machine or a warming GPU slows all of them
alike; ratios are taken within a run. Nothing is timed before its results have been checked.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

HERE = pathlib.Path(__file__).parent
MIB = 2**20

# Below this size glibc would keep freed memory for itself; with it, every tensor's pages go back when the tensor dies, and
# the resident size tells what is alive.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def pick_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- time ----------------------------------------------------------------------------------------------------------------
def interleaved(steps: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int, warmup: int = 2) -> dict[str, float]:
    """Median milliseconds of each step over ``rounds`` rounds, in which every step takes its turn, in alternating order.

    A turn is one call on a CPU, and about 60 ms of back-to-back calls on a GPU.
    """
    for step in steps.values():
        for _ in range(warmup):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        names = list(steps) if number % 2 == 0 else list(reversed(steps))
        for name in names:
            times[name].append(_milliseconds(steps[name], device))
    return {name: statistics.median(values) for name, values in times.items()}


def _milliseconds(step: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(step, warmup=10, rep=60, return_mode="median"))
    began = time.perf_counter()
    step()
    return (time.perf_counter() - began) * 1000


def first_call(step: Callable[[], object], device: torch.device) -> float:
    """Seconds of the first call: compilation and one run."""
    began = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - began


# -- memory --------------------------------------------------------------------------------------------------------------
def peak_memory(step: Callable[[], object], device: torch.device, *, warmup: int = 1) -> int | None:
    """Bytes that one warm ``step`` needs at its peak beyond what is alive before it.

    On a GPU this is the caching allocator's count. On a CPU it is the kernel's high-water mark of resident memory, reset
    before the step: run it through ``in_fresh_process``, which makes the C allocator return freed memory. None where the
    operating system has no such mark.
    """
    for _ in range(warmup):
        step()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = _resident("VmRSS")
    step()
    return max(_resident("VmHWM") - before, 0)


def _resident(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def in_fresh_process(script: str, *arguments: str) -> Any:
    """Run a benchmark script again in a process of its own; returns the JSON object on its last line."""
    done = subprocess.run([sys.executable, script, *arguments], env={**os.environ, **_MALLOC}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


# -- errors --------------------------------------------------------------------------------------------------------------
def relative_error(actual: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Largest absolute difference over all tensors, each relative to the largest value of its exact form."""
    worst = 0.0
    for a, e in zip(actual, exact, strict=True):
        scale = e.abs().max().item() or 1.0
        worst = max(worst, (a.detach().to(e.device, e.dtype) - e).abs().max().item() / scale)
    return worst


def norm_error(actual: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Euclidean norm of all differences together, relative to the norm of the exact values."""
    difference = sum(((a.detach().to(e.device, e.dtype) - e) ** 2).sum().item() for a, e in zip(actual, exact, strict=True))
    return (difference / sum((e**2).sum().item() for e in exact)) ** 0.5


def two_reference(actual: float, eager: float, dtype: torch.dtype) -> bool:
    """Error against fp64 at most twice eager's own at the same dtype, plus a rounding floor."""
    return actual <= 2 * eager + 4 * torch.finfo(dtype).eps


# -- results -------------------------------------------------------------------------------------------------------------
def machine(device: torch.device) -> dict[str, Any]:
    """Everything that a figure depends on besides the code."""
    about: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers"):
        about[name] = _version(name)
    if device.type == "cuda":
        about |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
        about |= {"capability": list(torch.cuda.get_device_capability(device)), "cudnn": torch.backends.cudnn.version()}
    else:
        about |= {"cpu": _processor(), "threads": torch.get_num_threads(), "capability": torch.backends.cpu.get_cpu_capability()}
    return about


def save(name: str, device: torch.device, results: object, out: str | None = None) -> pathlib.Path:
    """Write ``<out>/<name>.json`` with the results, the command, the commit and the machine; prints the path."""
    folder = pathlib.Path(out) if out else HERE / "results"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_{device.type}.json"
    head = {"command": shlex.join(["python", f"benchmarks/{pathlib.Path(sys.argv[0]).name}", *sys.argv[1:]]), "commit": _commit()}
    path.write_text(json.dumps({**head, "date": time.strftime("%Y-%m-%d"), "machine": machine(device), "results": results}, indent=1) + "\n")
    print(f"written to {os.path.relpath(path)}", flush=True)
    return path


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "   ".join(cells).rstrip())
    return "\n".join(lines)


def mebibytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / MIB:.0f} MiB"


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        match = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1] if match else platform.processor()


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True).stdout.strip()

    commit = git("rev-parse", "HEAD") or "unknown"
    return commit + (" with uncommitted changes" if git("status", "--porcelain", "--untracked-files=no") else "")
