"""Unmodified Hugging Face models on a GPU, training and inference, at real widths and lengths with few layers.

    python benchmarks/models.py --only gpt2-small_4k,llama-8b_4k --budget 500

Contenders per model: the hand-written ("eager") attention under inductor, under flashattn, and under flashattn with the Triton
kernels forced; and the library's own SDPA attention under inductor where it has one. Training is bfloat16 autocast, inference
has bfloat16 weights.

Each contender first passes the two-reference rule: on the first example of the batch, outputs and (training) all parameter
gradients together are compared with the model in float64, and may be off at most twice as far as the uncompiled model, or as
inductor where that is one of the contenders: it keeps numbers in float32 that the model rounds, and the gradient of a mean
square behind a layer norm is what is left of such roundings. The check runs without dropout; the timed training steps have
the models' own dropout.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import harness
import torch

DEVICE = torch.device("cuda")
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "inductor": ("eager", {"backend": "inductor"}),
    "flashattn": ("eager", {"backend": "flashattn"}),
    "triton": ("eager", {"backend": "flashattn", "options": {"kernel": "triton"}}),
    "sdpa": ("sdpa", {"backend": "inductor"}),
}


@dataclass(frozen=True)
class Case:
    """A model and its inputs."""

    name: str
    config: Callable[[Any], Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    causal_lm: bool = False

    def make(self, attention: str) -> torch.nn.Module:
        import transformers

        torch.manual_seed(0)
        factory = transformers.AutoModelForCausalLM if self.causal_lm else transformers.AutoModel
        model: torch.nn.Module = factory.from_config(self.config(transformers), attn_implementation=attention)
        return model


def _tokens(batch: int, length: int, vocabulary: int = 32000) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(5, vocabulary, (batch, length))}


def _padded(batch: int, length: int) -> dict[str, torch.Tensor]:
    lengths = torch.randint(length * 2 // 5, length + 1, (batch, 1))
    return {**_tokens(batch, length, 30000), "attention_mask": (torch.arange(length)[None] < lengths).long()}


def _deberta(t: Any) -> Any:
    relative = {"relative_attention": True, "position_buckets": 256, "pos_att_type": ["c2p", "p2c"], "norm_rel_ebd": "layer_norm"}
    sizes = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "intermediate_size": 4096, "max_position_embeddings": 1024}
    return t.DebertaV2Config(vocab_size=32000, share_att_key=True, position_biased_input=False, **sizes, **relative)


def _gemma(t: Any) -> Any:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256}
    sizes = {"vocab_size": 32000, "hidden_size": 3584, "num_hidden_layers": 2, "intermediate_size": 14336}
    return t.Gemma2Config(sliding_window=1024, use_cache=False, **sizes, **heads)


def _longformer(t: Any) -> Any:
    """Sliding windows of 512 in overlapping chunks."""
    return t.LongformerConfig(vocab_size=32000, num_hidden_layers=4, attention_window=512, max_position_embeddings=4098, pad_token_id=1)


_LLAMA = {"hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16, "intermediate_size": 4096}
_T5 = {"d_model": 768, "d_kv": 64, "num_layers": 4, "num_heads": 12, "d_ff": 3072}


def _images(batch: int, size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size)}


CASES = (
    Case("gpt2-small_1k", lambda t: t.GPT2Config(n_positions=1024, vocab_size=32000, n_layer=6, use_cache=False), lambda: _tokens(16, 1024), True),
    Case("gpt2-small_4k", lambda t: t.GPT2Config(n_positions=4096, vocab_size=32000, n_layer=6, use_cache=False), lambda: _tokens(4, 4096), True),
    Case("bert-large_512", lambda t: t.BertConfig(**_LARGE), lambda: _padded(32, 512)),
    Case("llama-8b_4k", lambda t: t.LlamaConfig(**_LLAMA, use_cache=False), lambda: _tokens(2, 4096), True),
    Case("gemma2-9b_4k", _gemma, lambda: _tokens(2, 4096), True),
    Case("t5-base_2k", lambda t: t.T5Config(**_T5, use_cache=False), lambda: {**_tokens(4, 2048), "decoder_input_ids": _tokens(4, 1024)["input_ids"]}),
    Case("swin-base_224", lambda t: t.SwinConfig(embed_dim=128, depths=[2, 2, 4, 2], num_heads=[4, 8, 16, 32]), lambda: _images(64, 224)),
    Case("vit-large_384", lambda t: t.ViTConfig(**_LARGE, image_size=384), lambda: _images(32, 384)),
    Case("bloom-560m_2k", lambda t: t.BloomConfig(vocab_size=32000, hidden_size=1024, n_layer=6, n_head=16, use_cache=False), lambda: _tokens(4, 2048), True),
    Case("deberta-v2_1k", _deberta, lambda: _tokens(8, 1024)),
    Case("longformer-base_4k", _longformer, lambda: _tokens(4, 4096)),
)


def first_output(outputs: Any) -> torch.Tensor:
    found: torch.Tensor = next(v for v in outputs.values() if torch.is_tensor(v) and v.is_floating_point())
    return found


class Runner:
    """One model in one mode: makes the steps of its contenders and checks them."""

    def __init__(self, case: Case, mode: str) -> None:
        self.case, self.train = case, mode == "train"
        torch.manual_seed(1)
        self.inputs = {name: self._cast(value.to(DEVICE)) for name, value in case.inputs().items()}
        self.models = {"eager": self._place(case.make("eager"))}
        try:
            self.models["sdpa"] = self._place(case.make("sdpa"))
        except ValueError:  # the library has no SDPA form of this model
            return
        self.models["sdpa"].load_state_dict(self.models["eager"].state_dict())

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        return value.bfloat16() if not self.train and value.is_floating_point() else value

    def _place(self, model: torch.nn.Module) -> torch.nn.Module:
        model = model.to(DEVICE)
        return model if self.train else model.to(torch.bfloat16).eval()

    def outputs(self, call: Callable[..., Any], inputs: dict[str, torch.Tensor], autocast: bool) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext(), torch.set_grad_enabled(self.train):
            return first_output(call(**inputs))

    def step(self, call: Callable[..., Any], model: torch.nn.Module) -> Callable[[], object]:
        def train() -> None:
            self.outputs(call, self.inputs, True).float().square().mean().backward()
            model.zero_grad(set_to_none=True)

        return train if self.train else lambda: self.outputs(call, self.inputs, False)

    def results(self, call: Callable[..., Any], model: torch.nn.Module, inputs: dict[str, torch.Tensor], autocast: bool) -> list[list[torch.Tensor]]:
        """Output of the first example, and the gradients of its mean square."""
        out = self.outputs(call, inputs, autocast)[:1]
        found = [[out.detach().double()]]
        if self.train:
            out.to(torch.promote_types(out.dtype, torch.float32)).square().mean().backward()
            found.append([torch.zeros_like(p) if p.grad is None else p.grad.double() for p in model.parameters()])
            model.zero_grad(set_to_none=True)
        return found

    def references(self) -> tuple[list[list[torch.Tensor]], list[float]]:
        """The results in float64, and the uncompiled model's errors."""
        one = {name: value[:1] for name, value in self.inputs.items()}
        model = self.models["eager"].eval()
        eager = self.results(model, model, one, self.train)
        wide = self.case.make("eager").to(DEVICE).eval()
        wide.load_state_dict(model.state_dict())
        wide.double()
        exact = self.results(wide, wide, {n: v.double() if v.is_floating_point() else v for n, v in one.items()}, False)
        return exact, [harness.norm_error(a, e) for a, e in zip(eager, exact, strict=True)]

    def errors(self, call: Callable[..., Any], model: torch.nn.Module, exact: list[list[torch.Tensor]]) -> list[float]:
        """Of a contender, in outputs and gradients."""
        model.eval()
        found = [harness.norm_error(a, e) for a, e in zip(self.results(call, model, self.inputs, self.train), exact, strict=True)]
        model.train(self.train)
        return found


def judge(row: dict[str, Any], eager: list[float], inductor: list[float] | None) -> None:
    """Says in the row whom its errors are held against; ValueError where they are more than twice those of all."""
    for reference, theirs in (("eager", eager), ("inductor", inductor)):
        if theirs is not None and all(harness.two_reference(a, e, torch.float32) for a, e in zip(row["errors"], theirs, strict=True)):
            row["judged by"] = reference
            return
    raise ValueError(f"errors {row['errors']} are more than twice eager's {eager}" + (f" and inductor's {inductor}" if inductor else ""))


def measure(case: Case, mode: str, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """One row per contender: errors, seconds of the first call, milliseconds and bytes per step, fused sites."""
    import fa_inductor

    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # all contenders share the code of one model
    runner = Runner(case, mode)
    exact, eager = runner.references()
    rows: list[dict[str, Any]] = []
    steps: dict[str, Callable[[], object]] = {}
    for name in names:
        attention, how = CONTENDERS[name]
        if attention not in runner.models:
            continue
        row: dict[str, Any] = {"case": case.name, "mode": mode, "contender": name, "eager's errors": eager}
        rows.append(row)
        before = fa_inductor.counters()
        try:
            model = runner.models[attention]
            call = torch.compile(model, **how)
            row["errors"] = runner.errors(call, model, exact)
            judge(row, eager, next((r["errors"] for r in rows if r["contender"] == "inductor" and "errors" in r), None))
            step = runner.step(call, model)
            row["first call s"] = round(harness.first_call(step, DEVICE), 1)
            row["bytes"] = harness.peak_memory(step, DEVICE)
            steps[name] = step
        except Exception as error:  # a contender that fails is a row of the result, not the end of the run
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        after = fa_inductor.counters()
        row["sites"] = {key: after[key] - before[key] for key in ("sites", "rewritten", "forward", "backward")}  # type: ignore[literal-required]
    del exact
    for name, ms in harness.interleaved(steps, DEVICE, rounds=rounds).items():
        next(row for row in rows if row["contender"] == name)["ms"] = ms
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    base = next((row["ms"] for row in rows if row["contender"] == "inductor" and "ms" in row), None)
    for row in rows:
        ratio = f"{base / row['ms']:5.2f}x" if base and "ms" in row else ""
        figures = f"{row['ms']:8.2f} ms {ratio} {harness.mebibytes(row['bytes']):>10}" if "ms" in row else row.get("error", "")
        sites = row["sites"]
        print(f"{row['case']:16} {row['mode']:6} {row['contender']:10} {figures}  {sites['rewritten']}/{sites['sites']} fused", flush=True)


def rows_of(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    end = time.monotonic() + args.budget
    for case in CASES:
        if args.only and case.name not in args.only.split(","):
            continue
        for mode in args.modes.split(","):
            if time.monotonic() > end:
                yield [{"case": case.name, "mode": mode, "contender": "-", "error": "skipped: no time left", "sites": {"rewritten": 0, "sites": 0}}]
                continue
            try:
                yield measure(case, mode, args.contenders.split(","), args.rounds)
            except Exception as error:  # the reference itself failed: the row says so, and the next case runs
                text = f"{type(error).__name__}: {str(error)[:300]}"
                yield [{"case": case.name, "mode": mode, "contender": "-", "error": text, "sites": {"rewritten": 0, "sites": 0}}]
            gc.collect()
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="comma-separated cases: " + ", ".join(case.name for case in CASES))
    parser.add_argument("--modes", default="train,infer")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no further case is begun")
    parser.add_argument("--out", help="folder of the result file (default: benchmarks/results)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs an NVIDIA GPU; benchmarks/demo.py runs on a CPU too")
    rows: list[dict[str, Any]] = []
    for found in rows_of(args):
        show(found)
        rows += found
        harness.save("models", DEVICE, rows, args.out)


if __name__ == "__main__":
    main()
