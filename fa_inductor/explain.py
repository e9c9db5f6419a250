"""``explain(model)(*inputs)``: compile, run once, and say what happened to every softmax."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import breaks
from .location import place_of
from .report import GraphReport, collecting


@dataclass(frozen=True)
class Explanation:
    """The reports of all graphs of one call; print it.

    Attributes:
        graphs: one report per graph that Dynamo made.
        graph_breaks: reason of each graph break, and how often Dynamo met it (inside a function that is called, once more for each
            caller). Attention that is cut by one cannot be fused.
        output: what the call returned.
        places: "file:line" of the breaks of each reason, where Dynamo keeps it.
    """

    graphs: tuple[GraphReport, ...]
    graph_breaks: dict[str, int]
    output: Any
    places: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def fused(self) -> int:
        """Softmaxes that run as fused attention."""
        return sum(graph.fused for graph in self.graphs)

    @property
    def refused(self) -> int:
        """Softmaxes that do not."""
        return sum(graph.refused for graph in self.graphs)

    def __str__(self) -> str:
        total = f"{len(self.graphs)} graph(s), {len(self.graph_breaks)} kind(s) of graph break, {self.fused} softmax(es) fused, {self.refused} not"
        lines = [f"graph break: {_first_paragraph(reason)}{_where(self.places.get(reason, ()))}" for reason in self.graph_breaks]
        if not self.graphs:
            lines.append("Dynamo made no graph: the call ran eagerly (TORCH_LOGS=dynamo says why)")
        return "\n\n".join(["\n".join([total, *lines]), *(str(graph) for graph in self.graphs)])


def explain(model: Callable[..., Any], *, dynamic: bool | None = None, **options: Any) -> Callable[..., Explanation]:
    """A function that takes the model's inputs, compiles the model for them and returns the Explanation.

    The model is compiled afresh even if it was compiled before, without touching that earlier compilation, and is run once:
    a model in training mode draws random numbers and updates its buffers as in any call.

    Args:
        model: a module or a function, compiled or not.
        dynamic: as of ``torch.compile``: whether sizes are symbols.
        options: ``explain(model, kernel="tiled")`` as ``torch.compile(..., backend="flashattn", options={"kernel": "tiled"})``.
    """

    def run(*args: Any, **kwargs: Any) -> Explanation:
        from torch._dynamo.utils import counters as dynamo_counters

        from .backend import flashattn

        def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return flashattn(graph, inputs, options=options)

        call = torch.compile(_fresh_caller(getattr(model, "_orig_mod", model)), backend=backend, dynamic=dynamic)
        before = Counter(dynamo_counters["graph_break"])
        known = len(breaks.of_dynamo())
        with collecting() as graphs:
            output = call(*args, **kwargs)
        counted = Counter(dynamo_counters["graph_break"])
        counted.subtract(before)
        reasons = {reason: n for reason, n in counted.items() if n > 0}
        return Explanation(tuple(graphs), reasons, output, _places(reasons, known))

    return run


def _fresh_caller(self: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls the model ``self``, with a code object of its own.

    Dynamo caches compilations by code object: a new one is compiled afresh, into a cache of its own that goes with it. The
    model is called ``self``, so that the paths of its modules read as they do where the model itself is compiled.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    fresh: Callable[..., Any] = types.FunctionType(call.__code__.replace(), call.__globals__, "explained", closure=call.__closure__)
    return fresh


def _places(reasons: Iterable[str], known: int) -> dict[str, tuple[str, ...]]:
    """``known``: how many breaks Dynamo had met before."""
    met = breaks.of_dynamo()
    new = [(b.reason, place_of(b.frames)) for b in reversed(met[: len(met) - known])]
    found = {reason: tuple(dict.fromkeys(place for r, place in new if r == reason)) for reason in reasons}
    return {reason: places for reason, places in found.items() if places}


def _where(places: Sequence[str]) -> str:
    return f" [{', '.join(places)}]" if places else ""


def _first_paragraph(reason: str) -> str:
    return " ".join(reason.strip().split("\n\n")[0].split())
