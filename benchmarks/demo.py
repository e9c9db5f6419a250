"""The main job: an unmodified Hugging Face GPT-2 with eager attention, trained and run by eager, inductor and flashattn.

    python benchmarks/demo.py                 # on the GPU if there is one, else on the CPU
    python benchmarks/demo.py --layers 12 --length 2048 --steps 5

Weights are random and nothing is downloaded. Dropout is 0, so that all three compute the same function and their results can
be compared: with each other step by step, and with the same model in float64.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import harness
import torch

BACKENDS = ("eager", "inductor", "flashattn")


def settings(device: torch.device) -> argparse.Namespace:
    """A size that suits the device; every number can be changed on the command line."""
    gpu = device.type == "cuda"
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=12 if gpu else 4)
    parser.add_argument("--width", type=int, default=768 if gpu else 256)
    parser.add_argument("--heads", type=int, default=12 if gpu else 4)
    parser.add_argument("--vocabulary", type=int, default=50257 if gpu else 4096)
    parser.add_argument("--batch", type=int, default=8 if gpu else 2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3, help="training steps whose losses are shown")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--brief", action="store_true", help="leave the report of explain out")
    parser.add_argument("--memory-of", choices=BACKENDS, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_model(args: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=args.layers,
        n_embd=args.width,
        n_head=args.heads,
        n_positions=args.length,
        vocab_size=args.vocabulary,
        use_cache=False,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(device)


@dataclass
class Contender:
    """One copy of the model under one backend."""

    backend: str
    device: torch.device
    model: torch.nn.Module
    tokens: torch.Tensor
    optimizer: torch.optim.Optimizer = field(init=False)
    call: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.call = self.model if self.backend == "eager" else torch.compile(self.model, backend=self.backend)

    def _precision(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def loss(self) -> torch.Tensor:
        with self._precision():
            return next_token_loss(self.call(input_ids=self.tokens).logits, self.tokens)

    def train_step(self) -> torch.Tensor:
        """Forward, backward and optimizer: returns the loss before the update."""
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def infer(self) -> torch.Tensor:
        with torch.no_grad(), self._precision():
            logits: torch.Tensor = self.call(input_ids=self.tokens).logits
        return logits

    def gradients(self) -> list[torch.Tensor]:
        self.loss().backward()
        gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad(set_to_none=True)
        return gradients


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make_contender(backend: str, args: argparse.Namespace, device: torch.device) -> Contender:
    model = make_model(args, device)
    tokens = torch.randint(0, args.vocabulary, (args.batch, args.length), generator=torch.Generator().manual_seed(1)).to(device)
    return Contender(backend, device, model, tokens)


def exact_results(args: argparse.Namespace, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits and gradients of the same model in float64."""
    reference = make_contender("eager", args, device)
    reference.model.double()
    logits = reference.model(input_ids=reference.tokens).logits
    next_token_loss(logits, reference.tokens).backward()
    return [logits.detach()], [p.grad for p in reference.model.parameters() if p.grad is not None]


def memory(backend: str, args: argparse.Namespace, device: torch.device) -> dict[str, int | None]:
    """Peak memory of a warm training step and of a warm inference call."""
    contender = make_contender(backend, args, device)
    return {"train": harness.peak_memory(contender.train_step, device), "infer": harness.peak_memory(contender.infer, device)}


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, dict[str, Any]]:
    """Per backend: seconds to compile, errors, losses, milliseconds and bytes."""
    exact_logits, exact_gradients = exact_results(args, device)
    contenders = {backend: make_contender(backend, args, device) for backend in BACKENDS}
    results: dict[str, dict[str, Any]] = {}
    for name, contender in contenders.items():
        print(f"compiling and checking: {name} ...", flush=True)
        result: dict[str, Any] = {"first inference s": harness.first_call(contender.infer, device)}
        result["logits error"] = harness.relative_error([contender.infer()], exact_logits)
        result["first training s"] = harness.first_call(contender.loss().backward, device)
        contender.optimizer.zero_grad(set_to_none=True)
        result["gradient error"] = harness.relative_error(contender.gradients(), exact_gradients)
        result["losses"] = [contender.train_step().item() for _ in range(args.steps)]
        results[name] = result
    print("timing ...", flush=True)
    train = harness.interleaved({name: c.train_step for name, c in contenders.items()}, device, rounds=args.rounds, warmup=1)
    infer = harness.interleaved({name: c.infer for name, c in contenders.items()}, device, rounds=args.rounds, warmup=1)
    del contenders
    print("measuring memory ...", flush=True)
    for name in BACKENDS:
        used = memory(name, args, device) if device.type == "cuda" else harness.in_fresh_process(__file__, *sys.argv[1:], "--memory-of", name)
        results[name] |= {"train ms": train[name], "infer ms": infer[name], "train bytes": used["train"], "infer bytes": used["infer"]}
    return results


def show(results: dict[str, dict[str, Any]]) -> None:
    for mode, what, error in (("train", "training step (forward, backward, AdamW)", "gradient error"), ("infer", "inference", "logits error")):
        base = results["eager"][f"{mode} ms"]
        rows = [["", "time", "against eager", "peak memory", f"max {error} against float64"]]
        for name, r in results.items():
            rows.append([name, f"{r[f'{mode} ms']:.1f} ms", f"{base / r[f'{mode} ms']:.2f}x", harness.mebibytes(r[f"{mode} bytes"]), f"{r[error]:.1e}"])
        print(f"\n{what}\n{harness.table(rows)}")
    steps = range(len(results["eager"]["losses"]))
    losses = [["", *(f"step {i + 1}" for i in steps)], *([name, *(f"{loss:.6f}" for loss in r["losses"])] for name, r in results.items())]
    print(f"\nloss\n{harness.table(losses)}\n")


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch._inductor")
    device = harness.pick_device()
    args = settings(device)
    if args.memory_of:
        print(json.dumps(memory(args.memory_of, args, device)))
        return
    precision = "bfloat16 autocast" if device.type == "cuda" else f"float32, {torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"Hugging Face GPT-2, eager attention, {args.layers} layers, width {args.width}, {args.heads} heads, {args.batch} x {args.length} tokens")
    print(f"{where}, {precision}, torch {torch.__version__}\n", flush=True)
    results = measure(args, device)
    show(results)
    if not args.brief:
        report(args, device)
    harness.save("demo", device, {"settings": vars(args), "backends": results})
    ours, eager = results["flashattn"], results["eager"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for error in ("logits error", "gradient error"):
        if not harness.two_reference(ours[error], eager[error], dtype):
            sys.exit(f"the {error} of flashattn, {ours[error]:.2e}, is more than twice eager's {eager[error]:.2e}")


def report(args: argparse.Namespace, device: torch.device) -> None:
    """What the backend did, softmax by softmax."""
    import fa_inductor

    contender = make_contender("eager", args, device)
    print("fa_inductor.explain(model)(input_ids=...)\n")
    print(fa_inductor.explain(contender.model)(input_ids=contender.tokens), flush=True)


if __name__ == "__main__":
    main()
