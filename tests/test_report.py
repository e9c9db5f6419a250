"""Reports as text and JSON, the maths renderer, collecting, counters, and explain's summary."""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import threading

import pytest
from expecttest import TestCase

from fa_inductor import counters, refusal_table, report, reset
from fa_inductor.counters import record_final, record_graph
from fa_inductor.explain import Explanation
from fa_inductor.program import from_text
from fa_inductor.refusal import CODES, Refusal, declare
from fa_inductor.report import GraphReport, KernelRefusals, SiteReport, collecting, program_maths, publish, source_of

if "test_axis" not in CODES:
    declare("test_axis", "normalise over the key axis")
    declare("test_bias", "use the tiled kernel")
    declare("test_graph", "report this model")


CAUSAL = """
program(; sizes=0)
  %0 = index k
  %1 = index q
  %2 = le %0 %1
  %3 = score
  %4 = const 0.125
  %5 = mul %3 %4
  %6 = const -inf
  %7 = where %2 %5 %6
  return %7"""


def sample() -> GraphReport:
    fused = SiteReport(
        index=0,
        softmax="softmax",
        location="model.py:12",
        source_line="p = scores.softmax(-1)",
        module_path="layers.0.attn",
        fused=True,
        kernel="tiled",
        config="rows 128, keys 512",
        reason="the only kernel that computes a soft-cap on this device",
        labels=("causal", "scale 0.125"),
        program=program_maths(from_text(CAUSAL)),
        shapes="q (2, 8, 128, 64) k v (2, 2, 128, 64) float32",
        passed_over=(KernelRefusals("torch_sdpa", (Refusal("test_bias", "the bias is not additive"), Refusal("test_axis", "head size 7"))),),
    )
    refusal = Refusal("test_axis", "the softmax runs over heads", "softmax_1", "model.py:30")
    refused = SiteReport(index=1, softmax="softmax_1", location="model.py:31", refusal=refusal)
    return GraphReport("graph 0", (fused, refused), (), {"normalize": 0.0123, "find": 0.002})


class ReportText(TestCase):
    def test_a_graph(self):
        self.assertExpectedInline(
            str(sample()),
            """\
graph 0: 2 softmaxes, 1 fused, 1 not
  normalize 12 ms, find 2 ms

[0] fused by tiled
    at               model.py:12  p = scores.softmax(-1)
    in               layers.0.attn
    shapes           q (2, 8, 128, 64) k v (2, 2, 128, 64) float32
    labels           causal, scale 0.125
    computes         where(k <= q, 0.125*s, -inf)
    config           rows 128, keys 512
    because          the only kernel that computes a soft-cap on this device
    not torch_sdpa   test_bias: the bias is not additive
                     test_axis: head size 7

[1] not fused: test_axis
    at               model.py:31
    why              the softmax runs over heads
    see              model.py:30
    advice           normalise over the key axis""",
        )

    def test_a_graph_left_to_inductor(self):
        graph = GraphReport("graph 1", (), (Refusal("test_graph", "the graph cannot be retraced", location="model.py:3"),))
        self.assertExpectedInline(
            str(graph),
            """\
graph 1: 0 softmaxes, 0 fused, 0 not
  the whole graph was left to Inductor: test_graph: the graph cannot be retraced [model.py:3]
    advice           report this model""",
        )

    def test_an_explanation(self):
        text = str(Explanation((GraphReport("graph 0"),), {"call to print\n  more\n\n  Hint: remove it": 2}, None))
        self.assertExpectedInline(
            text,
            """\
1 graph(s), 1 kind(s) of graph break, 0 softmax(es) fused, 0 not
graph break: call to print more

graph 0: 0 softmaxes, 0 fused, 0 not""",
        )

    def test_no_graph(self):
        self.assertExpectedInline(
            str(Explanation((), {}, None)),
            """\
0 graph(s), 0 kind(s) of graph break, 0 softmax(es) fused, 0 not
Dynamo made no graph: the call ran eagerly (TORCH_LOGS=dynamo says why)""",
        )

    def test_layers_share_a_block(self):
        first = SiteReport(0, "softmax", "model.py:12", module_path="layers.0.attn", fused=True, kernel="tiled", shapes="q (1, 2, 8, 4)")
        narrow = dataclasses.replace(first, index=2, module_path="layers.2.attn", shapes="q (1, 2, 4, 4)")
        others = [dataclasses.replace(first, index=i, softmax=f"softmax_{i}", module_path=f"layers.{i}.attn") for i in (1, 3)]
        refused = [SiteReport(i, f"softmax_{i}", "model.py:40", refusal=Refusal("test_axis", "over heads", f"softmax_{i}", "model.py:40")) for i in (4, 5)]
        graph = GraphReport("graph 2", (first, others[0], narrow, others[1], *refused))
        self.assertExpectedInline(
            str(graph),
            """\
graph 2: 6 softmaxes, 4 fused, 2 not

[0-1, 3] fused by tiled
    at               model.py:12
    in               layers.0.attn, layers.1.attn, layers.3.attn
    shapes           q (1, 2, 8, 4)

[2] fused by tiled
    at               model.py:12
    in               layers.2.attn
    shapes           q (1, 2, 4, 4)

[4-5] not fused: test_axis
    at               model.py:40
    why              over heads
    advice           normalise over the key axis""",
        )


class Maths(TestCase):
    def test_causal(self):
        self.assertExpectedInline(program_maths(from_text(CAUSAL)), """where(k <= q, 0.125*s, -inf)""")

    def test_shared_values_are_named_and_constants_are_short(self):
        program = """
        program(float32[1], bool[2], float16[0]; sizes=1)
          %0 = score
          %1 = const 0.11363636363636363
          %2 = mul %0 %1
          %3 = const 50.0
          %4 = div %2 %3
          %5 = tanh %4
          %6 = mul %5 %3
          %7 = index h
          %8 = load 0 %7
          %9 = index k
          %10 = index q
          %11 = size 0
          %12 = add %10 %11
          %13 = sub %9 %12
          %14 = to_float %13
          %15 = mul %8 %14
          %16 = add %6 %15
          %17 = index b
          %18 = load 1 %17 %9
          %19 = sub %9 %10
          %20 = abs %19
          %21 = const 128
          %22 = le %20 %21
          %23 = and %18 %22
          %24 = not %23
          %25 = const -3.4028234663852886e+38
          %26 = mul %16 %16
          %27 = load 2
          %28 = add %26 %27
          %29 = where %24 %25 %28
          return %29"""
        self.assertExpectedInline(
            program_maths(from_text(program)),
            """\
t0 = 50*tanh(0.113636*s/50) + c0[h]*(k - (q + n0))
where(not (c1[b, k] and abs(k - q) <= 128), min(float32), t0*t0 + c2)""",
        )

    def test_brackets_are_there_only_where_needed(self):
        program = """
        program(float32[0], float32[0]; sizes=0)
          %0 = score
          %1 = load 0
          %2 = load 1
          %3 = sub %1 %2
          %4 = sub %0 %3
          %5 = sub %0 %1
          %6 = sub %5 %2
          %7 = mul %1 %2
          %8 = div %0 %7
          %9 = add %0 %1
          %10 = mul %9 %2
          %11 = neg %9
          %12 = const -2.0
          %13 = mul %0 %12
          %14 = lt %0 %1
          %15 = eq %1 %2
          %16 = or %14 %15
          %17 = not %16
          %18 = lt %1 %2
          %19 = eq %14 %18
          %20 = round bf16 %1
          %21 = to_int %2
          %22 = to_float %21
          %23 = add %20 %22
          %24 = index q
          %25 = index k
          %26 = floordiv %24 %25
          %27 = const 3
          %28 = mod %26 %27
          %29 = mul %11 %12
          return %4 %6 %8 %10 %11 %13 %17 %19 %23 %28 %29"""
        self.assertExpectedInline(
            program_maths(from_text(program)).replace(", ", "\n"),
            """\
s - (c0 - c1)
s - c0 - c1
s/(c0*c1)
(s + c0)*c1
-(s + c0)
-2*s
not (s < c0 or c0 == c1)
(s < c0) == (c0 < c1)
bf16(c0) + int(c1)
q//k%3
-2*-(s + c0)""",
        )


def test_json_holds_everything():
    data = json.loads(sample().to_json())
    first = data["sites"][0]["passed_over"][0]["refusals"][0]
    assert first == {"code": "test_bias", "text": "the bias is not additive", "node": "", "location": "", "advice": "use the tiled kernel"}
    assert data["sites"][1]["refusal"]["advice"] == "normalise over the key axis"
    assert data["seconds"] == {"normalize": 0.0123, "find": 0.002}
    assert data["sites"][0]["labels"] == ["causal", "scale 0.125"]


def test_collectors_nest_and_end():
    with collecting() as outer:
        publish(sample())
        with collecting() as inner:
            publish(sample())
    publish(sample())
    assert (len(outer), len(inner)) == (2, 1)


def test_collectors_do_not_hear_other_threads():
    with collecting() as reports:
        other = threading.Thread(target=publish, args=(sample(),))
        other.start()
        other.join()
    assert reports == []


def test_each_softmax_is_logged(caplog):
    with caplog.at_level(logging.INFO, logger="fa_inductor"):
        publish(sample())
    assert [r.getMessage() for r in caplog.records] == [
        "graph 0 [0] model.py:12 fused by tiled",
        "graph 0 [1] model.py:31 not fused: test_axis: the softmax runs over heads",
    ]


def test_source_lines_are_found(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("a = 1\n    b = 2  # two\n")
    assert source_of(f"{file}:2") == "b = 2  # two"
    assert source_of(f"{file}:9") == source_of("nowhere.py:1") == source_of("") == ""


def test_counters_add_up():
    record_graph(sample())
    record_graph(GraphReport("graph 1", (), (Refusal("test_graph", "no"),)))
    record_final(forward=1, backward=1)
    record_final(forward=0, backward=1)
    assert counters() == {
        "graphs": 2,
        "sites": 2,
        "rewritten": 1,
        "refused": 1,
        "forward": 1,
        "backward": 2,
        "refusals": {"test_axis": 1, "test_graph": 1},
    }
    reset()
    assert not any(counters().values())


def test_counters_survive_threads():
    def count() -> None:
        for _ in range(300):
            record_final(1, 2)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counters()["forward"], counters()["backward"]) == (2400, 4800)


def test_an_undeclared_code_is_a_programming_error():
    with pytest.raises(ValueError, match="not declared"):
        Refusal("no_such_code", "text")


def test_verdicts():
    assert SiteReport(0, "softmax").verdict == "not fused"
    assert report.SiteReport(0, "softmax", fused=True, kernel="tiled").verdict == "fused by tiled"


def test_the_table_of_refusals_is_that_of_the_code():
    """`make refusals` writes it."""
    page = pathlib.Path(__file__).parents[1] / "docs" / "refusals.md"
    assert page.read_text() == refusal_table.table()
    assert all(f"`{code}`" in refusal_table.table() for code in CODES if not code.startswith("test_"))
