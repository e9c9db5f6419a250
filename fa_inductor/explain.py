"""``explain(model)(*inputs)``: compile, run once, and say what happened to every softmax."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .report import GraphReport, collecting


@dataclass(frozen=True)
class Explanation:
    """The reports of all graphs of one call; print it.

    Attributes:
        graphs: one report per graph that Dynamo made.
        graph_breaks: reason of each graph break, and how often Dynamo met it (inside a function that is called, once more for each
            caller). Attention that is cut by one cannot be fused.
        output: what the call returned.
    """

    graphs: tuple[GraphReport, ...]
    graph_breaks: dict[str, int]
    output: Any

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
        breaks = [f"graph break: {_first_paragraph(reason)}" for reason in self.graph_breaks]
        if not self.graphs:
            breaks.append("Dynamo made no graph: the call ran eagerly (TORCH_LOGS=dynamo says why)")
        return "\n\n".join(["\n".join([total, *breaks]), *(str(graph) for graph in self.graphs)])


def explain(model: Callable[..., Any], **options: Any) -> Callable[..., Explanation]:
    """A function that takes the model's inputs, compiles the model for them and returns the Explanation.

    The model is compiled afresh even if it was compiled before, without touching that earlier compilation, and is run once:
    a model in training mode draws random numbers and updates its buffers as in any call.

    Args:
        model: a module or a function, compiled or not.
        options: ``explain(model, kernel="tiled")`` as ``torch.compile(..., backend="flashattn", options={"kernel": "tiled"})``.
    """

    def run(*args: Any, **kwargs: Any) -> Explanation:
        from torch._dynamo.utils import counters as dynamo_counters

        from .backend import flashattn

        def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return flashattn(graph, inputs, options=options)

        call = torch.compile(_fresh_caller(getattr(model, "_orig_mod", model)), backend=backend)
        before = Counter(dynamo_counters["graph_break"])
        with collecting() as graphs:
            output = call(*args, **kwargs)
        breaks = Counter(dynamo_counters["graph_break"])
        breaks.subtract(before)
        return Explanation(tuple(graphs), {reason: n for reason, n in breaks.items() if n > 0}, output)

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


def _first_paragraph(reason: str) -> str:
    return " ".join(reason.strip().split("\n\n")[0].split())
