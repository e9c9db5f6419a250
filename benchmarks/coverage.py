"""Attention in a zoo of unmodified models: what is rewritten, by which kernel, what is not and why, and whether the results are eager's.

    python benchmarks/coverage.py run --zoo FOLDER --out results.jsonl [--variants infer,train,dynamic,autocast,lora] [NAME... | --sample N]
    python benchmarks/coverage.py table results.jsonl... --out docs/coverage.md

``run`` appends a record for each model and variant, each model in a process of its own, and skips what the file has already. Unless ``--codegen``, the
final graphs are interpreted rather than compiled: the same graphs and counts, several times faster. ``zoo_models.py`` says what a zoo is.

Results are judged against eager; where they differ by more than rounding, against float64, from which they may be twice as far as eager (always so for
autocast), and plain Inductor is run the same way. ``dynamic`` is dynamic=True, for inference and training, and also runs twice the batch; ``autocast``
is bfloat16; ``lora`` trains only the projections to queries and values.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import pathlib
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import coverage_table
import harness
import torch
from zoo_models import Trial, Zoo, sample
from zoo_runs import FinalGraphs, measure

import fa_inductor


def trials_of(name: str, variants: Sequence[str], codegen: bool, trains: bool) -> list[Trial]:
    """The trials of a model, in order; dynamic=True leaves sizes marked in the process, so it comes last."""
    modes = {"infer": [False], "train": [True], "dynamic": [False, True], "autocast": [trains], "lora": [True]}
    return [Trial(name, v, train, codegen) for v in sorted(variants, key=lambda v: v == "dynamic") for train in modes[v] if trains or not train]


def header(args: argparse.Namespace, zoo: Zoo) -> dict[str, Any]:
    """Where the records after it come from. The zoo is named by a digest, and its folder left out."""
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(zoo.folder.glob("*")) if p.suffix in (".py", ".jsonl"))).hexdigest()[:12]
    given = ["ZOO" if word == args.zoo else pathlib.Path(word).name if word == args.out else word for word in sys.argv[1:]]
    command = shlex.join(["python", "benchmarks/coverage.py", *given])
    about: dict[str, Any] = {"command": command, "commit": harness._commit(), "date": time.strftime("%Y-%m-%d"), "zoo": digest}
    packages = sorted({entry.package for entry in zoo.modules["zoo"].REG.values()})
    about["packages"] = {package: harness._version(package) for package in packages}
    return {"header": about | {"machine": harness.machine(torch.device(args.device))}}


def in_workers(trials: Sequence[Trial], zoo: Zoo, final: FinalGraphs, timeout: int) -> Iterator[dict[str, Any]]:
    """The records of one model's trials, made in a forked process, and in another after one that dies or hangs: ``timeout`` seconds are for one
    compiled model, and a trial has up to four."""
    while trials:
        receive, send = multiprocessing.Pipe(duplex=False)
        worker = multiprocessing.get_context("fork").Process(target=_work, args=(trials, zoo, final, timeout, send))
        worker.start()
        send.close()
        lost = ""
        while trials and not lost:
            try:
                lost = "" if receive.poll(5 * timeout) else f"no answer in {5 * timeout} s"
                record = {} if lost else receive.recv()
            except EOFError:
                lost = "the process died"
            yield {**trials[0].about, **zoo.known(trials[0].name), "error": lost} if lost else record
            trials = trials[1:]
        worker.kill()
        worker.join()


def records(trials: Sequence[Trial], zoo: Zoo, final: FinalGraphs, timeout: int) -> Iterator[dict[str, Any]]:
    """The records of one model's trials; on a GPU in this process, since CUDA does not survive a fork: run several with a few models each."""
    if zoo.device == "cpu":
        return in_workers(trials, zoo, final, timeout)
    return (measure(trial, zoo, final, timeout) for trial in trials)


def _work(trials: Sequence[Trial], zoo: Zoo, final: FinalGraphs, timeout: int, pipe: Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for trial in trials:
        pipe.send(measure(trial, zoo, final, timeout))
    pipe.close()
    os._exit(0)


def warm(final: FinalGraphs, zoo: Zoo) -> None:
    """What the forked workers share: imports, and Inductor's patterns."""
    import transformers  # noqa: F401

    def attend(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.mT, -1) @ x

    compiled = torch.compile(attend, backend="flashattn")
    compiled(torch.randn(2, 2, 8, 8, requires_grad=True)).sum().backward()
    with torch.no_grad():
        compiled(torch.randn(2, 2, 8, 8))


def run(args: argparse.Namespace) -> None:
    if pathlib.Path(fa_inductor.__file__).resolve().parents[1] != harness.HERE.resolve().parent:
        raise SystemExit(f"{fa_inductor.__file__} is not of this checkout, whose commit the results name: set PYTHONPATH")
    torch.set_num_threads(1)
    sys.modules.setdefault("coverage", None)  # type: ignore[arg-type]  # what looks for the package of that name shall not find this file
    zoo = Zoo.open(args.zoo, args.device)
    registry = zoo.modules["zoo"].REG
    names = args.names or (sample(zoo.sites, {n: e.package for n, e in registry.items()}, args.sample) if args.sample else list(registry))
    names = [n for n in names if n not in args.without.split(",")]
    out = pathlib.Path(args.out)
    done = {coverage_table.key(r) for r in coverage_table.load([out])[1] if "skipped" not in r} if out.exists() else set()
    # not from caches, and the same random numbers as eager
    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False  # type: ignore[attr-defined]
    torch._inductor.config.fallback_random = True
    final = FinalGraphs(args.codegen, zoo.modules["sites"].softmaxes)
    warm(final, zoo)
    with out.open("a") as file:
        file.write(json.dumps(header(args, zoo)) + "\n")
        for name in names:
            trials = trials_of(name, args.variants.split(","), args.codegen, registry[name].train)
            left = [t for t in trials if coverage_table.key(t.about) not in done]
            for record in records(left, zoo, final, args.timeout):
                file.write(json.dumps(record) + "\n")
                file.flush()
                print(coverage_table.line(record), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runner = commands.add_parser("run", help="measure")
    runner.add_argument("names", nargs="*", help="models (default: all)")
    runner.add_argument("--zoo", required=True, help="folder of the zoo")
    runner.add_argument("--out", required=True, help="results, appended to")
    runner.add_argument("--variants", default="infer,train", help=",".join(coverage_table.VARIANTS))
    runner.add_argument("--codegen", action="store_true", help="compile the final graphs")
    runner.add_argument("--sample", type=int, help="so many models, spread over forms and packages")
    runner.add_argument("--without", default="", help="models to leave out, with commas")
    runner.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    runner.add_argument("--timeout", type=int, default=120, help="seconds for one compiled model")
    runner.set_defaults(call=run)
    tabler = commands.add_parser("table", help="make the document")
    tabler.add_argument("results", nargs="+", type=pathlib.Path)
    tabler.add_argument("--out", required=True, type=pathlib.Path)
    tabler.set_defaults(call=lambda args: args.out.write_text(coverage_table.document(*coverage_table.load(args.results))))
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
