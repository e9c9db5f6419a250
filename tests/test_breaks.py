"""Attention torn apart by a graph break: the softmax's report names the user's line and what to change there."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusing import rewritten, sites_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fa_inductor
from fa_inductor import breaks, torn
from fa_inductor.options import Options
from fa_inductor.refusal import StrictError
from fa_inductor.report import GraphReport, SiteReport, collecting

BEFORE = "the graph is broken between the score matmul and the softmax"
AFTER = "the graph is broken between the softmax and the matmul with the values"
log = logging.getLogger(__name__)


def qkv(**kwargs: Any) -> list[Tensor]:
    return [torch.randn(2, 2, 5, 4, **kwargs) for _ in range(3)]


def reports_of(function: Callable[..., Any], *inputs: Any) -> list[GraphReport]:
    with collecting() as reports:
        rewritten(function)(*inputs)
    return reports


def the_softmax(function: Callable[..., Any], *inputs: Any) -> SiteReport:
    (site,) = (s for r in reports_of(function, *inputs) for s in r.sites)
    return site


def line_of(function: Callable[..., Any], text: str) -> str:
    """ "file.py:line" of the only line of ``function`` that holds ``text``."""
    lines, first = inspect.getsourcelines(function)
    (at,) = (i for i, line in enumerate(lines) if text in line)
    return f"test_breaks.py:{first + at}"


# -- between scores and softmax --------------------------------------------------------------------------------------------
def says_the_shape(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    print(s.shape)
    return s.softmax(-1) @ v


def logs_the_shape(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.5
    log.warning("scores")
    return s.masked_fill(s > 3, -1e9).softmax(-1) @ v


def branches_on_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    if s.max() > 10:
        s = s / 2
    return s.softmax(-1) @ v


def asks_for_a_break(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    torch._dynamo.graph_break()
    return s.softmax(-1) @ v


def breaks_before_some_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    torch._dynamo.graph_break()
    return s[:, [1, 0]].softmax(-1) @ v


def breaks_before_rows_are_picked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    torch._dynamo.graph_break()
    return s.index_select(2, torch.tensor([1, 3])).softmax(-1) @ v


def logs_by_the_module(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The break itself is in Python's own logging."""
    s = q @ k.mT
    logging.warning("scores")
    return s.softmax(-1) @ v


def sleeps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What Dynamo says of it mentions warnings, printing and tensors' values only as examples."""
    s = q @ k.mT
    time.sleep(0)
    return s.softmax(-1) @ v


def two_lines(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No graph lies between the two calls, so no backend hears of the second."""
    s = q @ k.mT
    print("one")
    print("two")
    return s.softmax(-1) @ v


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Tensor:
        print("scale")
        return s * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


def own_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Scale.apply(q @ k.mT).softmax(-1) @ v


# -- between softmax and values --------------------------------------------------------------------------------------------
def item_of_probabilities(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT).softmax(-1)
    if p.max().item() > 2:
        p = p * 2
    return p @ v


@torch.compiler.disable
def keep(p: Tensor) -> Tensor:
    return p


def kept_by_a_disabled_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT).softmax(-1)
    return keep(p) @ v


def probabilities(q: Tensor, k: Tensor) -> Tensor:
    q = q * 2
    print("probabilities")
    return (q @ k.mT).softmax(-1)


def probabilities_of_a_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The scores and the softmax share a graph, which is not that of the product with the values."""
    return probabilities(q + 1, k) @ v


# -- on both sides ---------------------------------------------------------------------------------------------------------
def breaks_on_both_sides(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    print("scores")
    p = s.softmax(-1)
    torch._dynamo.graph_break()
    return p @ v


TORN: dict[str, tuple[Callable[..., Tensor], str, str, Callable[..., Any], str]] = {
    "print": (says_the_shape, "break_print", BEFORE, says_the_shape, "print("),
    "logger": (logs_the_shape, "break_print", BEFORE, logs_the_shape, "log.warning"),
    "branch": (branches_on_scores, "break_value", BEFORE, branches_on_scores, "if s.max"),
    "graph_break": (asks_for_a_break, "break_asked", BEFORE, asks_for_a_break, "graph_break()"),
    "heads": (breaks_before_some_heads, "break_asked", BEFORE, breaks_before_some_heads, "graph_break()"),
    "rows": (breaks_before_rows_are_picked, "break_asked", BEFORE, breaks_before_rows_are_picked, "graph_break()"),
    "logging": (logs_by_the_module, "break_print", BEFORE, logs_by_the_module, "logging.warning"),
    "another builtin": (sleeps, "graph_break", BEFORE, sleeps, "time.sleep"),
    "two in a row": (two_lines, "break_print", BEFORE, two_lines, '"one"'),
    "autograd.Function": (own_function, "break_print", BEFORE, Scale.forward, "print("),
    "item": (item_of_probabilities, "break_value", AFTER, item_of_probabilities, ".item()"),
    "disabled": (kept_by_a_disabled_function, "break_disabled", AFTER, kept_by_a_disabled_function, "keep(p)"),
    "callee": (probabilities_of_a_function, "break_print", AFTER, probabilities, "print("),
    "both": (breaks_on_both_sides, "break_print", BEFORE, breaks_on_both_sides, "print("),
}


@pytest.mark.parametrize("name", TORN)
def test_a_torn_softmax_names_the_line(name: str) -> None:
    function, code, where, culprit, text = TORN[name]
    site = the_softmax(function, *qkv(requires_grad=name == "autograd.Function"))
    assert site.refusal is not None and site.refusal.code == code
    assert site.refusal.text.startswith(where + ": ")
    assert site.refusal.location.endswith(line_of(culprit, text))
    assert f"see              {site.refusal.location}  " in str(site) or site.refusal.location == site.location


def test_dynamic_shapes() -> None:
    with collecting() as reports:
        call = rewritten(breaks_on_both_sides, dynamic=True)
        call(*qkv())
    assert [s.refusal.code for r in reports for s in r.sites if s.refusal] == ["break_print"]


def test_what_is_rare_is_said_in_dynamos_words() -> None:
    site = the_softmax(sleeps, *qkv())
    assert site.refusal is not None and site.refusal.text == f"{BEFORE}: Attempted to call function marked as skipped: time.sleep"


def test_the_wrapper_is_named() -> None:
    site = the_softmax(own_function, *qkv(requires_grad=True))
    assert site.refusal is not None and site.refusal.text == f"{BEFORE}: print or a logger is called, in a torch.autograd.Function"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(-1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.softmax(q @ k.mT) @ v


def test_a_hook_that_breaks() -> None:
    """The softmax's module is compiled alone, if at all: scores come in, probabilities go out, and the break is not its own."""
    model, kept = Attention(), []

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        kept.append(output.detach())
        print("kept")

    model.softmax.register_forward_hook(hook)
    first, *others = reports_of(model, *qkv())
    (note,) = first.notes
    assert note.code == "break_print" and note.text == "the graph ends: print or a logger is called, in a hook"
    assert note.location.endswith(line_of(hook, '"kept"'))
    sites = [s for r in others for s in r.sites]
    assert all(s.refusal is not None and s.refusal.text == f"{BEFORE}: print or a logger is called, in a hook" for s in sites)
    assert len(sites) <= 1, "torch 2.11 runs the module eagerly, torch 2.13 compiles it"


def test_a_hook_that_keeps_the_probabilities_breaks_nothing() -> None:
    model, kept = Attention(), []
    model.softmax.register_forward_hook(lambda module, inputs, output: kept.append(output))
    assert the_softmax(model, *qkv()).fused and len(kept) == 1


# -- attention that no graph holds -----------------------------------------------------------------------------------------
@torch.compiler.disable
def disabled_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def calls_a_disabled_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * 0.5
    return disabled_attention(q, k, v) * 2


def test_a_graph_that_ends_at_a_disabled_function_says_so() -> None:
    first, *others = reports_of(calls_a_disabled_function, *qkv())
    (note,) = first.notes
    assert note.code == "break_disabled" and note.location.endswith(line_of(calls_a_disabled_function, "disabled_attention("))
    assert note.text == "the graph ends: disabled_attention is called, which is marked torch.compiler.disable"
    assert f"  break_disabled: {note.text} [{note.location}]\n    advice           what such a function computes" in str(first)
    assert not any(r.notes for r in others)
    assert fa_inductor.counters()["refusals"] == {}, "a note is no verdict"


class Disabled(nn.Module):
    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"attn": inner})

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * 0.5
        return self.layers["attn"](q, k, v) * 2


@torch.compiler.disable(recursive=False)
def disabled_but_not_what_it_calls(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        (lambda: Around(Disabled()), "Disabled.forward"),
        (lambda: Around(torch.compiler.disable(Attention())), "the module layers.attn"),
        (lambda: lambda q, k, v: disabled_but_not_what_it_calls(q * 0.5, k, v), "disabled_but_not_what_it_calls"),
    ],
)
def test_what_is_disabled_has_a_name(inner: Callable[[], Callable[..., Tensor]], name: str) -> None:
    first, *_ = reports_of(inner(), *qkv())
    assert [n.text for n in first.notes] == [f"the graph ends: {name} is called, which is marked torch.compiler.disable"]


def test_strict_does_not_heed_notes() -> None:
    rewritten(calls_a_disabled_function, Options(strict=True))(*qkv())


def test_explain_names_the_line_even_where_no_graph_ends() -> None:
    def at_once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return disabled_attention(q, k, v) + 1

    for _ in range(2):
        explanation = fa_inductor.explain(at_once)(*qkv())
        ((_, places),) = explanation.places.items()
        assert [p.rpartition("/")[2] for p in places] == [line_of(at_once, "disabled_attention")]
        assert f" [{places[0]}]" in str(explanation)


def test_a_break_in_a_checkpoint() -> None:
    def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * 0.5
        return checkpoint(says_the_shape, q, k, v, use_reentrant=False) * 2

    first, *_ = reports_of(checkpointed, *qkv(requires_grad=True))
    (note,) = first.notes
    assert note.code == "break_checkpoint" and note.location.endswith(line_of(says_the_shape, "print("))


# -- no false alarms -------------------------------------------------------------------------------------------------------
class Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        print("between layers")
        return self.layers[1](x)


class LayerDrop(Model):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) < 0:
                continue
            x = layer(x)
        return x


@pytest.mark.parametrize("model", [Model, LayerDrop])
def test_a_break_between_layers_is_no_matter(model: type[Model]) -> None:
    reports = reports_of(model(), qkv()[0])
    assert all(s.fused and s.refusal is None for r in reports for s in r.sites) and sum(r.fused for r in reports)
    assert not any(r.notes for r in reports)


def logits_between_breaks(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y = F.linear(x, WEIGHT)
    print("logits")
    p = y.softmax(-1)
    print("chosen")
    return p * 2


WEIGHT = nn.Parameter(torch.ones(5, 4))


def softmax_of_an_input(s: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return s.softmax(-1) * 2


@pytest.mark.parametrize("function", [logits_between_breaks, softmax_of_an_input])
def test_other_softmaxes_stay_what_they_are(function: Callable[..., Tensor]) -> None:
    site = the_softmax(function, *qkv())
    assert site.refusal is not None and site.refusal.code == "not_attention"


def attend(scores: Tensor, v: Tensor) -> Tensor:
    return scores.softmax(-1) @ v


def in_a_loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for _ in range(2):
        print("step")
        v = attend(q @ k.mT, v)  # called here
    return v


def in_a_try(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    try:
        print("step")
        return attend(q @ k.mT, v)  # called here
    finally:
        len("")


@pytest.mark.parametrize("function", [in_a_loop, in_a_try])
def test_a_caller_that_is_not_compiled(function: Callable[..., Tensor]) -> None:
    """Dynamo gives a function up that has a break in a loop or try, and compiles what it calls."""
    site = the_softmax(function, *qkv())
    lines, first = inspect.getsourcelines(function)
    line = first + next(i for i, text in enumerate(lines) if "called here" in text)
    assert site.refusal is not None and site.refusal.code == "break_caller", str(site)
    assert function.__name__ in site.refusal.text and site.refusal.location.endswith(f"test_breaks.py:{line}")


def test_scores_that_are_given() -> None:
    """By the user, who compiled no more than this: no break is to blame."""
    q, k, v = qkv()
    site = the_softmax(attend, q @ k.mT, v)
    assert site.refusal is not None and site.refusal.code == "no_score_matmul", str(site)


def test_a_break_does_not_follow_its_model_around() -> None:
    """A later model with a softmax over an input of the same shape, on the same thread."""
    q, k, v = qkv()
    the_softmax(says_the_shape, q, k, v)
    site = the_softmax(softmax_of_an_input, q @ k.mT, k, v)
    assert site.refusal is not None and site.refusal.code == "not_attention"


def test_fullgraph_is_as_before() -> None:
    with collecting() as reports:
        compiled = torch.compile(Layer(), backend="flashattn", fullgraph=True)
        compiled(qkv()[0])
    assert [r.fused for r in reports] == [1]
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(says_the_shape, backend="flashattn", fullgraph=True)(*qkv())


def test_counters_and_strict() -> None:
    _, sites = sites_of(says_the_shape, *qkv())
    assert len(sites) == 1
    counts = fa_inductor.counters()
    assert (counts["graphs"], counts["sites"], counts["rewritten"], counts["refused"]) == (2, 1, 0, 1)
    assert counts["refusals"] == {"break_print": 1}
    with pytest.raises(Exception, match="break_print") as raised:
        rewritten(says_the_shape, Options(strict=True))(*qkv())
    assert isinstance(raised.value, StrictError) or isinstance(raised.value.__cause__, StrictError) or "strict" in str(raised.value)


def test_an_odd_graph_costs_the_scores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any) -> Any:
        raise RuntimeError("no shape")

    monkeypatch.setattr(torn, "_scores", broken)
    site = the_softmax(says_the_shape, *qkv())
    assert site.refusal is not None and site.refusal.code == "break_print", "the line is known all the same"


# -- what is remembered ----------------------------------------------------------------------------------------------------
def test_memory_is_bounded_and_reset() -> None:
    frame = breaks.Frame(__file__, 1, "")
    for line in range(500):
        breaks.remember(breaks.Break("", (breaks.Frame(__file__, line, ""),)))
        breaks.remember(breaks.Break("again", (frame,)))
    assert len(breaks._last) == 64
    assert sum(b.reason == "again" for _, b in breaks._last) == 1
    fa_inductor.reset()
    assert not breaks._last


def test_a_break_belongs_to_its_thread() -> None:
    found: list[list[breaks.Break]] = []

    def here() -> list[breaks.Break]:
        at = breaks.Frame(__file__, inspect.currentframe().f_lineno + 2, "")  # type: ignore[union-attr]
        breaks.remember(breaks.Break("mine", (at,)))
        return breaks.active()

    assert [b.reason for b in here()] == ["mine"]
    other = threading.Thread(target=lambda: found.append(breaks.active()))
    other.start()
    other.join()
    assert found == [[]]
