"""The coverage benchmark: its judgement of errors, what it trains for LoRA, its sample, and the document that it makes."""

from __future__ import annotations

import json
import math
import pathlib
import sys
from typing import Any

import pytest
import torch

BENCHMARKS = str(pathlib.Path(__file__).parents[1] / "benchmarks")
sys.path.append(BENCHMARKS)
try:
    import coverage_table
    import zoo_errors
    import zoo_models
finally:
    sys.path.remove(BENCHMARKS)  # it holds a coverage.py, which is also the name of a package

GOOD = {"err": 1e-7, "grad_err": 1e-6, "grad_worst": "w", "noise": 0.0}


def outcome(*outputs: list[float], **gradients: list[float]) -> Any:
    return zoo_errors.Outcome([torch.tensor(o) for o in outputs], {n: torch.tensor(g) for n, g in gradients.items()})


def reference(err: float, grad_err: float = 0.0, **each: float) -> dict[str, Any]:
    return {"err": err, "grad_err": grad_err, "each": each}


def record(name: str = "m", variant: str = "infer", **changes: Any) -> dict[str, Any]:
    made = {"name": name, "variant": variant, "mode": "infer", "codegen": False, "package": "p", "sites": 2, "forms": {"scale": 2}, **GOOD}
    made |= {"inductor": {"infer": 1, "train": None}, "graphs": 1, "rewritten": 2, "forward": 2, "backward": 0, "final": {"forward": 2, "softmaxes": 0}}
    return made | {"kernels": {"tiled": 2}, "refused": [], "graph_refusals": [], "verdict": "ok", **changes}


@pytest.mark.parametrize(
    "name",
    ["h.0.attn.c_attn.weight", "layer.q_proj.weight", "l.self.value.bias", "a.in_proj_weight", "mixer.Wqkv.weight", "b.to_q.0.weight", "attention._v.weight"],
)
def test_projections_to_queries_and_values_train(name: str) -> None:
    assert zoo_models.is_lora_target(name)


@pytest.mark.parametrize(
    "name", ["layer.k_proj.weight", "layer.out_proj.weight", "value_embeddings.weight", "q_norm.weight", "value.a.b.weight", "mlp.fc.weight"]
)
def test_other_parameters_are_frozen(name: str) -> None:
    assert not zoo_models.is_lora_target(name)


def test_at_most_twice_the_error_of_eager_passes() -> None:
    assert zoo_errors.two_reference(reference(2e-2, 4e-2), reference(1e-2, 2e-2))
    assert not zoo_errors.two_reference(reference(2.1e-2), reference(1e-2))
    assert not zoo_errors.two_reference(reference(1e-2, 4.1e-2), reference(1e-2, 2e-2))
    assert not zoo_errors.two_reference(reference(math.nan), reference(1e-2))
    assert not zoo_errors.two_reference(reference(1e-2), reference(math.inf))


def test_one_wrong_gradient_among_many_fails() -> None:
    eager = reference(1e-2, 1e-2, a=1e-2, b=1e-2)
    assert zoo_errors.two_reference(reference(1e-2, 1e-2, a=1e-2, b=6e-2), eager)
    assert not zoo_errors.two_reference(reference(1e-2, 1e-2, a=1e-2, b=1.0), eager)


def test_errors() -> None:
    want = outcome([1.0, -2.0], a=[4.0, 2.0], b=[1e-9, 0.0])
    assert zoo_errors.largest(want, want) == {"err": 0.0, "grad_err": 0.0, "grad_worst": "a"}
    found = zoo_errors.largest(outcome([1.0, -2.2], a=[4.0, 2.4], b=[2e-9, 0.0]), want)
    assert (found["err"], found["grad_err"], found["grad_worst"]) == (pytest.approx(0.1), pytest.approx(0.1), "a")
    assert zoo_errors.largest(outcome([1.0, math.nan], a=[4.0, 2.0], b=[0.0, 0.0]), want)["err"] == math.inf
    missing = zoo_errors.largest(outcome([1.0, -2.0], a=[4.0, 2.0]), want)
    assert (missing["grad_err"], missing["grad_worst"]) == (math.inf, "b")
    assert zoo_errors.norms(outcome([1.0, -2.0]), want)["grad_err"] == math.inf
    off = zoo_errors.norms(outcome([1.0, -2.0], a=[4.0, 2.0], b=[4e-2, 0.0]), want)
    assert off["each"]["b"] > 1 > off["grad_err"] > 0


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "ok"),
        ({"error": "E"}, "failed"),
        ({"error": "E", "plain": {"error": "E"}}, "failed, as plain Inductor"),
        ({"exact": reference(3e-3), "eager_exact": reference(2e-3)}, "ok"),
        ({"exact": reference(5e-3), "eager_exact": reference(2e-3)}, "inexact"),
        ({"exact": reference(5e-3), "eager_exact": reference(2e-3), "plain": {"exact": reference(5e-3)}}, "inexact, as plain Inductor"),
        ({"exact": reference(5e-3), "eager_exact": reference(2e-3), "plain": {"exact": reference(2e-3)}}, "inexact"),
        ({"exact": reference(5e-3), "eager_exact": reference(2e-3), "noise": 0.1}, "random"),
        ({"other_batch": 1e-6}, "ok"),
        ({"other_batch": "eager takes no other batch"}, "ok"),
        ({"other_batch": 0.5}, "inexact on another batch"),
        ({"other_batch": "failed: E", "plain": {"other_batch": "failed: E"}}, "inexact on another batch, as plain Inductor"),
        ({"other_batch": "failed: E", "plain": {"other_batch": 1e-6}}, "inexact on another batch"),
    ],
)
def test_verdicts(changes: dict[str, Any], verdict: str) -> None:
    assert zoo_errors.verdict(GOOD | changes) == verdict
    if verdict != "ok" and "exact" not in changes:
        assert not zoo_errors.is_close(GOOD | changes)


def test_the_sample_covers_forms_first() -> None:
    def sites(*forms: str) -> dict[str, Any]:
        return {"sites": [{"form": form, "post": ""} for form in forms]}

    models = {"a": sites("x"), "b": sites("x", "y"), "c": sites("z"), "d": sites("x"), "e": {"sites": []}}
    packages = dict.fromkeys("abce", "one") | {"d": "two"}
    assert zoo_models.sample(models, packages, 3) == ["b", "c", "d"]
    assert zoo_models.sample(models, packages, 9) == ["b", "c", "d", "a"]


def test_counters_that_the_final_graph_does_not_bear_out() -> None:
    train = record(mode="train", variant="train", backward=2, final={"forward": 2, "backward": 2})
    assert coverage_table.counters_agree(record()) and coverage_table.counters_agree(train)
    assert coverage_table.counters_agree(record(final={"forward": 3}))
    assert not coverage_table.counters_agree(record(final={"forward": 1}))
    assert not coverage_table.counters_agree(record(forward=1))
    assert not coverage_table.counters_agree(train | {"backward": 1})
    assert coverage_table.counters_agree(train | {"backward": 1, "variant": "lora"})


def test_the_document(tmp_path: pathlib.Path) -> None:
    head = {"command": "python x", "commit": "abc", "date": "d", "zoo": "z", "machine": {"python": "3", "torch": "2", "transformers": "5", "cpu": "c"}}
    refusal = {"code": "softmax_axis", "text": "over a|b", "at": "f.py:3", "line": "s | t", "see": ""}
    rows = [
        {"header": head | {"packages": {"p": "1.0", "q": None}}},
        record("m", rewritten=0, verdict="inexact"),
        record("m"),
        record("n", sites=3, rewritten=1, forward=1, refused=[refusal], inductor={"infer": None, "train": 1.5}),
        record("n", "train", mode="train", error="RuntimeError: no", verdict="failed"),
        record("o", refused=[refusal]),
        record("m", "autocast", mode="train", exact=reference(1e-3, 2e-3), eager_exact=reference(2e-3, 2e-3), codegen=True),
    ]
    file = tmp_path / "r.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = coverage_table.document(*coverage_table.load([file]))
    assert "- `python x` at abc" in text and "Packages: p 1.0.\n" in text
    assert "| infer | 3 | 7 | 5 | 2 | 3 of 3 | 3 | 0 | 0 | 0 | 0 |" in text
    assert "| autocast train (generated code) | 1 |" in text
    assert "| outputs | 1 | 0.50 | 0.50 (m) |" in text
    assert "| m | p | scale ×2 | 2 | 2 | - | tiled | 1 | - |" in text
    assert "| n | f.py:3 | `s \\| t` | softmax_axis | over a\\|b | infer |" in text
    assert "| o | f.py:3 |" in text.split("all of whose counted sites are rewritten")[1]
    assert "| n |  |  | - | 1 not met in the 1 graphs" in text
    assert "| n | train | failed | RuntimeError: no |" in text
    assert "inexact |" not in text.split("## Models")[1]
