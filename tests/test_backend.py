"""The backend as a user meets it: mistakes, refusals, strict, dumps, reports and counters; the model always runs.

Where code generation is not the point, the rewritten graph runs eagerly (``inductor`` fixture).
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import TestCase
from fusing import sites_of
from torch import Tensor

import fa_inductor
from fa_inductor import backend, kernel_table
from fa_inductor.explain import explain
from fa_inductor.inductor import Contents
from fa_inductor.report import GraphReport, collecting

B, H, L, D = 2, 3, 5, 8
FILE = "test_backend.py"


def qkv(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(B, H, L, D).to(dtype) for _ in range(3)]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / D**0.5).softmax(-1) @ v


def wrong_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


class Handed:
    """What was handed to Inductor: the graphs, and how many calls in each are fused."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.fused: list[int] = []
        self.settings: list[dict[str, Any]] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any], contents: Contents) -> Callable[..., Any]:
        self.graphs.append(gm)
        self.fused.append(contents.fused)
        self.settings.append(settings)
        return gm.forward


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> Handed:
    """Instead of Inductor: keeps the graph and runs it eagerly."""
    handed = Handed()
    monkeypatch.setattr(backend, "compile_with_inductor", handed)
    return handed


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, logger="fa_inductor"):
        yield lambda: [r.getMessage() for r in caplog.records if r.name.startswith("fa_inductor") and r.levelno >= logging.WARNING]


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="flashattn", options=options)  # type: ignore[no-any-return]


def reports_of(function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, list[GraphReport]]:
    with collecting() as reports:
        result = compiled(function, **options)(*inputs)
    return result, list(reports)


def close(ours: Tensor, eager: Tensor) -> None:
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


# -- options -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernel": "tyled"}, ("'kernel'", "did you mean 'tiled'?")),
        ({"kernal": "tiled"}, ("'kernal'", "did you mean 'kernel'?")),
        ({"max_autotone": True}, ("'max_autotone'", "did you mean 'max_autotune'?")),
        ({"masked_rows": "zeros"}, ("'masked_rows'", "did you mean 'zero'?")),
    ],
)
def test_a_wrong_option_is_one_warning_and_the_model_runs(options: dict[str, Any], words: tuple[str, ...], inductor: Handed, warnings: Any) -> None:
    inputs = qkv()
    for _ in range(2):  # compiled twice, said once
        torch._dynamo.reset()
        close(compiled(attention, **options)(*inputs), attention(*inputs))
    (said,) = warnings()
    assert all(w in said for w in (*words, "it is ignored"))
    assert inductor.fused == [1, 1]


def test_a_wrong_option_is_an_error_where_strict_is_set(inductor: Handed) -> None:
    with pytest.raises(Exception, match="did you mean 'tiled'"):
        compiled(attention, kernel="tyled", strict=True)(*qkv())
    assert inductor.graphs == []


def test_inductors_options_and_mode_are_passed_on(inductor: Handed) -> None:
    compiled(attention, max_autotune=True, kernel="tiled")(*qkv())
    torch._dynamo.reset()
    compiled(attention, mode="max-autotune-no-cudagraphs")(*qkv())
    torch._dynamo.reset()
    torch.compile(attention, backend="flashattn", mode="max-autotune-no-cudagraphs")(*qkv())
    assert inductor.settings[0] == {"max_autotune": True}
    assert inductor.settings[1] == inductor.settings[2] and inductor.settings[1]["max_autotune"] is True


def test_a_forced_kernel_is_used(inductor: Handed) -> None:
    for kernel in ("tiled", "sdpa"):
        torch._dynamo.reset()
        _, (report,) = reports_of(attention, *qkv(), kernel=kernel)
        assert report.sites[0].kernel == {"sdpa": "torch_sdpa"}.get(kernel, kernel)


def test_disabled_by_the_environment(monkeypatch: pytest.MonkeyPatch, inductor: Handed) -> None:
    monkeypatch.setenv("FA_INDUCTOR_DISABLE", "1")
    inputs = qkv()
    result, (report,) = reports_of(attention, *inputs)
    assert torch.equal(result, attention(*inputs))
    assert report.sites == () and [r.code for r in report.refusals] == ["disabled"]
    assert inductor.fused == [0] and "softmax" in str(inductor.graphs[0].graph)


# -- refusals: same numbers as eager ---------------------------------------------------------------------------------------
def test_double_precision_is_refused_and_is_eagers(inductor: Handed) -> None:
    inputs = qkv(torch.float64)
    result, (report,) = reports_of(attention, *inputs)
    assert [s.refusal.code for s in report.sites if s.refusal] == ["dtype"]
    assert torch.equal(result, attention(*inputs))
    assert inductor.fused == [0]


def test_integer_scores_are_refused_and_are_eagers(inductor: Handed) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1, dtype=torch.float32) @ v

    q, k = (torch.randint(-2, 3, (B, H, L, D)) for _ in range(2))
    v = torch.randn(B, H, L, D)
    result, (report,) = reports_of(function, q, k, v)
    assert [s.refusal.code for s in report.sites if s.refusal] == ["dtype"]
    assert torch.equal(result, function(q, k, v))


def test_one_of_two_softmaxes_is_refused(inductor: Handed) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return wrong_axis(q, k, attention(q, k, v))

    inputs = qkv()
    result, (report,) = reports_of(function, *inputs)
    close(result, function(*inputs))
    assert [(s.fused, s.refusal and s.refusal.code) for s in report.sites] == [(True, None), (False, "softmax_axis")]
    assert inductor.fused == [1]
    counts = fa_inductor.counters()
    assert (counts["graphs"], counts["sites"], counts["rewritten"], counts["refused"]) == (1, 2, 1, 1)
    assert counts["refusals"] == {"softmax_axis": 1}


def test_two_softmaxes_that_feed_one_matmul(inductor: Handed) -> None:
    """One is fused with the other as a factor; the other says so."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT).softmax(-1) * (q @ k.mT * 0.5).softmax(-1)) @ v

    inputs = qkv()
    result, (report,) = reports_of(function, *inputs)
    close(result, function(*inputs))
    assert sorted((s.fused, s.refusal.code if s.refusal else "") for s in report.sites) == [(False, "shared_output"), (True, "")]


@pytest.mark.parametrize("layers", [2, 3])
def test_attention_on_attention(layers: int, inductor: Handed) -> None:
    """Q, K and V of each layer are the output of the one before, with nothing in between."""

    def function(x: Tensor) -> Tensor:
        for _ in range(layers):
            x = attention(x, x, x)
        return x

    x = torch.randn(B, H, L, D, requires_grad=True)
    result = compiled(function)(x)
    expected = function(x)
    close(result, expected)
    close(*(torch.autograd.grad(o.square().sum(), x)[0] for o in (result, expected)))
    assert inductor.fused == [layers]


@pytest.mark.parametrize("between", [lambda o: o, lambda o: o + 1.0], ids=["directly", "after a sum"])
def test_softmax_of_an_attentions_output(between: Any, inductor: Handed) -> None:
    """The product with the values is no score product of the next softmax."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return between(attention(q, k, v)).softmax(-1) @ v.mT @ v

    q, k, v = (torch.randn(2, 2, 17, 8) for _ in range(3))
    result, (report,) = reports_of(function, q, k, v)
    close(result, function(q, k, v))
    assert [(s.fused, s.refusal and s.refusal.code) for s in report.sites] == [(True, None), (False, "not_attention")]


def test_probabilities_of_one_attention_bias_another(inductor: Handed) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = (q @ k.mT).softmax(-1)
        return (q @ k.mT + p).softmax(-1) @ (p @ v)

    inputs = qkv()
    close(compiled(function)(*inputs), function(*inputs))
    assert inductor.fused == [2]


def test_without_softmax_the_graph_is_handed_on_untouched(inductor: Handed, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.fx.GraphModule] = []
    run = backend.Compilation.run
    monkeypatch.setattr(backend.Compilation, "run", lambda self: (given.append(self.original), run(self))[1])
    monkeypatch.setattr(backend, "normalize", lambda gm: pytest.fail("retraced although there is no softmax"))
    _, (report,) = reports_of(lambda x: torch.relu(x @ x.mT), torch.randn(3, 3))
    assert inductor.graphs == given and inductor.graphs[0] is given[0]
    assert report.sites == () and report.refusals == () and report.fused == 0


@pytest.mark.parametrize("function", [wrong_axis, lambda q, k, v: q.softmax(-1)])
def test_without_a_fused_site_the_graph_is_handed_on_untouched(function: Any, inductor: Handed, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[torch.fx.GraphModule, str]] = []
    run = backend.Compilation.run
    monkeypatch.setattr(backend.Compilation, "run", lambda self: (given.append((self.original, str(self.original.graph))), run(self))[1])
    _, (report,) = reports_of(function, *qkv())
    assert inductor.graphs[0] is given[0][0] and str(inductor.graphs[0].graph) == given[0][1]
    assert inductor.fused == [0] and report.refused == 1


# -- strict --------------------------------------------------------------------------------------------------------------
def test_strict_raises_with_the_reason_and_the_line(inductor: Handed) -> None:
    with pytest.raises(Exception, match="option strict is set") as error:
        compiled(wrong_axis, strict=True)(*qkv())
    text = str(error.value)
    assert "softmax_axis" in text and "the softmax runs over dimension 2" in text
    assert re.search(rf"{re.escape(FILE)}:\d+", text)
    assert inductor.graphs == []


def test_strict_is_content_with_fused_attention_and_with_other_softmaxes(inductor: Handed) -> None:
    inputs = qkv()
    close(compiled(attention, strict=True)(*inputs), attention(*inputs))
    close(compiled(lambda x: x.softmax(-1), strict=True)(inputs[0]), inputs[0].softmax(-1))
    close(compiled(lambda x: x + 1, strict=True)(inputs[0]), inputs[0] + 1)


# -- a kernel that breaks ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["why_not", "plan"])
@pytest.mark.parametrize("sites", [1, 2])
def test_a_kernel_that_raises_costs_the_site_not_the_model(method: str, sites: int, inductor: Handed, warnings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: Any) -> Any:
        raise ZeroDivisionError("tile of size 0")

    monkeypatch.setattr(kernel_table.kernel_named("tiled"), method, broken)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(sites):
            v = attention(q, k, v)
        return v

    inputs = qkv()
    result, (report,) = reports_of(function, *inputs, kernel="tiled")
    assert torch.equal(result, function(*inputs))
    assert inductor.fused == [0]
    for site in report.sites:
        assert site.refusal is not None and site.refusal.code == "internal_error"
        assert site.refusal.text == "ZeroDivisionError: tile of size 0" and FILE in site.refusal.location
    assert len(warnings()) == sites and "internal_error: ZeroDivisionError" in warnings()[0]
    assert fa_inductor.counters()["refusals"] == {"internal_error": sites}


def test_a_kernel_that_raises_for_one_site_leaves_the_other_fused(inductor: Handed, warnings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_table.kernel_named("tiled")
    plan = kernel.plan

    def sometimes(request: Any) -> Any:
        if request.k.shape[2] == 7:
            raise AssertionError("seven keys")
        return plan(request)

    monkeypatch.setattr(kernel, "plan", sometimes)
    q, k, v = qkv()
    k7, v7 = torch.randn(B, H, 7, D), torch.randn(B, H, 7, D)

    def function(q: Tensor, k: Tensor, v: Tensor, k7: Tensor, v7: Tensor) -> Tensor:
        return attention(attention(q, k7, v7), k, v) + attention(q, k7, v7)

    result, (report,) = reports_of(function, q, k, v, k7, v7, kernel="tiled")
    close(result, function(q, k, v, k7, v7))
    assert sorted(s.fused for s in report.sites) == [False, False, True] and inductor.fused == [1]
    assert all("seven keys" in w for w in warnings())


def test_no_kernel_says_every_reason(inductor: Handed, monkeypatch: pytest.MonkeyPatch) -> None:
    def cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (torch.tanh(q @ k.mT / 5.0) * 5.0).softmax(-1) @ v

    inputs = qkv()
    result, (report,) = reports_of(cap, *inputs, kernel="sdpa")
    assert torch.equal(result, cap(*inputs))
    (site,) = report.sites
    assert site.refusal is not None and site.refusal.code == "no_kernel" and "torch_sdpa:" in site.refusal.text
    assert [p.kernel for p in site.passed_over] == ["torch_sdpa"] and site.labels == ("soft-cap 5",)


# -- dumps ---------------------------------------------------------------------------------------------------------------
def test_dump_has_every_stage_and_names_the_kernel(tmp_path: Path, inductor: Handed) -> None:
    compiled(attention, dump=str(tmp_path), kernel="tiled")(*qkv())
    (folder,) = tmp_path.iterdir()
    stages = [f"{n:02d}_{s}.txt" for n, s in enumerate(("dynamo", "normalized", "sites", "programs", "selection", "rewritten"), 1)]
    assert sorted(p.name for p in folder.iterdir()) == [*stages, "report.json", "report.txt"]
    text = {p.name: p.read_text() for p in folder.iterdir()}
    assert "fused by tiled" in text["report.txt"] and FILE in text["report.txt"]
    assert json.loads(text["report.json"])["sites"][0]["kernel"] == "tiled"
    assert "softmax" in text["02_normalized.txt"] and "attention" not in text["02_normalized.txt"]
    assert "fa_inductor.attention" in text["06_rewritten.txt"]
    assert "program(" in text["04_programs.txt"] and "tiled" in text["05_selection.txt"]


def test_dump_of_a_graph_without_softmax(tmp_path: Path, inductor: Handed) -> None:
    compiled(lambda x: x + 1, dump=str(tmp_path))(torch.ones(2))
    (folder,) = tmp_path.iterdir()
    assert sorted(p.name for p in folder.iterdir()) == ["01_dynamo.txt", "report.json", "report.txt"]


def test_a_dump_folder_that_cannot_be_written_is_one_warning(tmp_path: Path, inductor: Handed, warnings: Any) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    inputs = qkv()
    close(compiled(attention, dump=str(blocked / "out"))(*inputs), attention(*inputs))
    (said,) = warnings()
    assert str(blocked) in said and "choose a writable folder" in said
    assert inductor.fused == [1]


# -- explain and counters --------------------------------------------------------------------------------------------------
def stable(text: str) -> str:
    """Without paths, line numbers, times, graph numbers, and what the kernel says of its tiles."""
    text = re.sub(r"(config|because)( +)\S.*", r"\1\2…", text)
    text = re.sub(r"\S*test_backend\.py:\d+", f"{FILE}:N", text)
    text = re.sub(r"\d+ ms", "T ms", text)
    return re.sub(r"graph \d+:", "graph N:", text)


class ExplainText(TestCase):
    def test_fused(self) -> None:
        explanation = explain(attention, kernel="tiled")(*qkv())
        self.assertExpectedInline(
            stable(str(explanation)),
            """\
1 graph(s), 0 kind(s) of graph break, 1 softmax(es) fused, 0 not

graph N: 1 softmax, 1 fused, 0 not
  normalize T ms, rewrite T ms

[0] fused by tiled
    at               test_backend.py:N  return (q @ k.mT / D**0.5).softmax(-1) @ v
    shapes           q (2, 3, 5, 8), k (2, 3, 5, 8), v (2, 3, 5, 8) float32
    labels           plain
    computes         s/2.82843
    config           …
    because          …""",
        )

    def test_refused(self) -> None:
        explanation = explain(wrong_axis)(*qkv())
        self.assertExpectedInline(
            stable(str(explanation)),
            """\
1 graph(s), 0 kind(s) of graph break, 0 softmax(es) fused, 1 not

graph N: 1 softmax, 0 fused, 1 not
  normalize T ms, rewrite T ms

[0] not fused: softmax_axis
    at               test_backend.py:N  return (q @ k.mT).softmax(-2) @ v
    why              the softmax runs over dimension 2 of (2, 3, 5, 5), the matmul sums over another
    advice           the matmul must sum over the whole axis that the softmax normalises: check the dim argument, slices, and mixing of heads""",
        )


def test_explain_leaves_no_trace_in_an_earlier_compilation(inductor: Handed) -> None:
    call = compiled(attention)
    inputs = qkv()
    call(*inputs)
    explanation = explain(call)(*inputs)
    assert (explanation.fused, explanation.refused, explanation.graph_breaks) == (1, 0, {})
    close(explanation.output, attention(*inputs))
    call(*inputs)
    assert len(inductor.graphs) == 2


def test_counters_count_what_runs_forward_and_backward() -> None:
    """Through Inductor itself, whether its caches are warm or not."""
    inputs = [x.requires_grad_() for x in qkv()]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(L, L, dtype=torch.bool).tril()
        return (q @ k.mT).masked_fill(~mask, -math.inf).softmax(-1) @ v

    result = compiled(function)(*inputs)
    expected = function(*inputs)
    close(result, expected)
    for ours, theirs in zip(*(torch.autograd.grad(o.square().sum(), inputs) for o in (result, expected))):
        close(ours, theirs)
    counts = fa_inductor.counters()
    assert (counts["graphs"], counts["sites"], counts["rewritten"], counts["refused"]) == (1, 1, 1, 0)
    assert (counts["forward"], counts["backward"], counts["refusals"]) == (1, 1, {})
    fa_inductor.reset()
    assert fa_inductor.counters()["graphs"] == 0


def test_each_graph_is_counted_once() -> None:
    """The same function on two dtypes is two graphs; what did not go through Inductor is not counted as running."""
    for dtype in (torch.float32, torch.bfloat16):
        sites_of(attention, *qkv(dtype))
    counts = fa_inductor.counters()
    assert (counts["graphs"], counts["rewritten"], counts["forward"]) == (2, 2, 0)
