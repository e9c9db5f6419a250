"""What the backend costs at compile time, on a Hugging Face GPT-2, and whether a new length or batch compiles again.

    python benchmarks/compile_overhead.py              # 12 layers

The seconds before Inductor come from the backend's own report; Inductor's are those of the same model under plain inductor.
All compile caches are off.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import harness
import torch
from torch._dynamo.utils import counters

from fa_inductor.report import collecting


def make_model(layers: int, device: torch.device) -> torch.nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=layers, n_embd=768, n_head=12, vocab_size=1024, n_positions=1024, use_cache=False, bos_token_id=0, eos_token_id=0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(device)


def tokens(batch: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 1024, (batch, length), device=device)


def timed(step: Callable[[], object], device: torch.device) -> float:
    return harness.first_call(step, device)


def inductor_seconds(model: torch.nn.Module, ids: torch.Tensor, train: bool) -> float:
    """Seconds that Inductor (with AOTAutograd) takes for the model: the forward in the backend, the backward when it first runs."""
    from torch._inductor.compile_fx import compile_fx

    spent: list[float] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        began = time.perf_counter()
        result = compile_fx(graph, inputs)
        spent.append(time.perf_counter() - began)
        return result

    torch._dynamo.reset()
    call = torch.compile(model, backend=backend)
    if not train:
        with torch.no_grad():
            call(input_ids=ids)
        return sum(spent)
    first, warm = (timed(call(input_ids=ids).logits.sum().backward, ids.device) for _ in range(2))
    return sum(spent) + first - warm


def our_seconds(model: torch.nn.Module, ids: torch.Tensor, train: bool) -> dict[str, float]:
    """Seconds of each stage before Inductor."""
    torch._dynamo.reset()
    with collecting() as reports, torch.set_grad_enabled(train):
        torch.compile(model, backend="flashattn")(input_ids=ids)
    stages: dict[str, float] = {}
    for report in reports:
        for stage, seconds in report.seconds.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    return stages


def overhead(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    model, ids = make_model(args.layers, device), tokens(2, 256, device)
    our_seconds(make_model(1, device), ids, train=False)  # imports are not compile time
    found: dict[str, Any] = {}
    rows = [["", "before Inductor", "Inductor", "overhead", "stages"]]
    for mode in ("inference", "training"):
        train = mode == "training"
        model.train(train)
        stages = our_seconds(model, ids, train)
        ours, inductor = sum(stages.values()), inductor_seconds(model, ids, train)
        found[mode] = {"stages s": stages, "before Inductor s": ours, "Inductor s": inductor, "overhead": ours / inductor}
        shown = ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in stages.items())
        rows.append([mode, f"{ours:.2f} s", f"{inductor:.2f} s", f"{ours / inductor:.1%}", shown])
    print(f"GPT-2, {args.layers} layers, {device}\n{harness.table(rows)}\n", flush=True)
    return found


def recompiles(backend: str, device: torch.device, train: bool) -> list[int]:
    """Graphs compiled for each (batch, length) in turn under ``dynamic=True``: after the first, none should be."""
    torch._dynamo.reset()
    model = make_model(2, device).train(train)
    call = torch.compile(model, backend=backend, dynamic=True)
    compiled = []
    for batch, length in ((2, 128), (3, 128), (3, 200), (5, 333), (2, 65)):
        before = counters["stats"]["unique_graphs"]
        with torch.set_grad_enabled(train):
            logits = call(input_ids=tokens(batch, length, device)).logits
        if train:
            logits.sum().backward()
        compiled.append(counters["stats"]["unique_graphs"] - before)
    return compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--out", help="folder of the result file (default: benchmarks/results)")
    args = parser.parse_args()
    device = harness.pick_device()
    torch.compiler.config.force_disable_caches = True
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    results: dict[str, Any] = {"compile": overhead(args, device), "graphs compiled per shape": {}}
    for backend in ("inductor", "flashattn"):
        for mode in ("inference", "training"):
            found = recompiles(backend, device, mode == "training")
            results["graphs compiled per shape"][f"{backend} {mode}"] = found
            print(f"dynamic=True, {backend}, {mode}: graphs compiled for each new batch or length: {found}", flush=True)
    harness.save("compile_overhead", device, results, args.out)


if __name__ == "__main__":
    main()
