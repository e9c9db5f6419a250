"""Block-sparse attention with a butterfly mask against the same attention without one, over the length: a table and a plot by command.

    python benchmarks/butterfly.py run --lengths 1024,4096,16384,65536 --heads 16
    python benchmarks/butterfly.py plot benchmarks/results/butterfly_cuda.json --out butterfly.svg       (needs matplotlib)

Attention by hand with a mask that is a tensor, compiled with flashattn; forward and backward, bfloat16 on a GPU, float32 on a CPU. A query's block
i sees block j where i xor j is 0 or a power of two: the flat butterfly of Dao et al., Pixelated Butterfly (arXiv:2112.00029), which block-sparse
FlashAttention uses (Dao et al., 2022, arXiv:2205.14135). That is (1 + log2 n) / n of n x n blocks. The pass over the mask is part of
every step. On a short input the masked attention first passes the two-reference rule.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import harness
import torch
from masks import BLOCK, attention, check, given, step, tensors_of
from torch import Tensor


def butterfly(length: int, device: torch.device) -> Tensor:
    """(length, length), true where the score is visible."""
    block = torch.arange(length, device=device) // BLOCK
    apart = block[:, None] ^ block[None]
    return (apart & (apart - 1)) == 0


def measure(length: int, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    options = {"kernel": args.kernel} if args.kernel else None
    dense, sparse = (torch.compile(attention(mask), backend="flashattn", dynamic=False, options=options) for mask in (None, given))
    check(attention(given), sparse, args, butterfly(min(length, 640), device))
    mask, tensors = butterfly(length, device), tensors_of(args, length, device)
    row: dict[str, Any] = {"length": length, "share": float(mask[::BLOCK, ::BLOCK].double().mean())}
    for mode, train in (("forward", False), ("forward + backward", True)):
        steps = {name: step(function, tensors, mask, train) for name, function in (("dense", dense), ("butterfly", sparse))}
        row[mode] = harness.interleaved(steps, device, rounds=args.rounds)
    return row


def lines(results: dict[str, Any]) -> list[list[str]]:
    """The table: milliseconds, and how the ratio compares with the share of the blocks."""
    found = [["length", "share", "dense ms", "butterfly ms", "ratio", "ratio / share", "with backward: ratio", "ratio / share"]]
    for row in results["rows"]:
        ratios = {mode: row[mode]["butterfly"] / row[mode]["dense"] for mode in ("forward", "forward + backward")}
        numbers = [f"{row['forward']['dense']:.3f}", f"{row['forward']['butterfly']:.3f}"]
        numbers += [text for ratio in ratios.values() for text in (f"{ratio:.4f}", f"{ratio / row['share']:.2f}")]
        found.append([str(row["length"]), f"{row['share']:.2%}", *numbers])
    return found


def plot(source: pathlib.Path, out: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    head = json.loads(source.read_text())
    rows = head["results"]["rows"]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharex=True)
    for axis, mode in zip(axes, ("forward", "forward + backward"), strict=True):
        for name in ("dense", "butterfly"):
            axis.loglog([r["length"] for r in rows], [r[mode][name] for r in rows], marker="o", base=2, label=name)
        axis.loglog([r["length"] for r in rows], [r[mode]["dense"] * r["share"] for r in rows], linestyle=":", base=2, label="dense x share")
        axis.set(title=mode, xlabel="length", ylabel="ms")
        axis.legend()
    machine = head["machine"]
    figure.suptitle(f"{machine.get('gpu') or machine.get('cpu')}, torch {machine['torch']}, {head['commit'][:8]}")
    figure.tight_layout()
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runner, plotter = commands.add_parser("run"), commands.add_parser("plot")
    runner.add_argument("--lengths", default="1024,2048", help="with commas")
    for name, default in (("batch", 1), ("heads", 4), ("size", 64), ("rounds", 3)):
        runner.add_argument(f"--{name}", type=int, default=default)
    runner.add_argument("--kernel", default="")
    runner.add_argument("--out")
    plotter.add_argument("results", type=pathlib.Path)
    plotter.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    if args.command == "plot":
        plot(args.results, args.out)
        return
    torch._dynamo.config.recompile_limit = 64
    device = harness.pick_device()
    results = {"arguments": vars(args), "rows": [measure(int(n), args, device) for n in args.lengths.split(",")]}
    print(harness.table(lines(results)))
    harness.save("butterfly", device, results, args.out)


if __name__ == "__main__":
    main()
