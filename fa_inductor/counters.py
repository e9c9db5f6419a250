"""Truthful counts of what the backend did in this process.

``rewritten`` counts softmaxes that were fused; ``forward`` and ``backward`` count fused calls in the final graphs after AOTAutograd (one
softmax over joined scores makes several). A site whose call was traced but is gone from the final graph is therefore not counted as running.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TypedDict

from . import breaks
from .report import GraphReport


class Counts(TypedDict):
    """What ``counters()`` returns."""

    graphs: int
    sites: int
    rewritten: int
    refused: int
    forward: int
    backward: int
    refusals: dict[str, int]


_counts: Counter[str] = Counter()
_refusals: Counter[str] = Counter()
_lock = threading.Lock()


def counters() -> Counts:
    """Counts since the process began or ``reset``.

    Returns:
        graphs (compiled), sites (softmaxes seen), rewritten (those that were fused), refused, forward and
        backward (fused calls in its final graphs), and refusals: how often each code was the verdict on a softmax or a graph.
    """
    with _lock:
        return Counts(
            graphs=_counts["graphs"],
            sites=_counts["sites"],
            rewritten=_counts["rewritten"],
            refused=_counts["refused"],
            forward=_counts["forward"],
            backward=_counts["backward"],
            refusals=dict(sorted(_refusals.items())),
        )


def reset() -> None:
    """Set every count to zero, and forget the graph breaks that were met."""
    breaks.forget()
    with _lock:
        _counts.clear()
        _refusals.clear()


def record_graph(report: GraphReport) -> None:
    """Count the verdicts of one compiled graph."""
    codes = [s.refusal.code for s in report.sites if s.refusal is not None] + [r.code for r in report.refusals]
    fused = sum(s.fused for s in report.sites)
    with _lock:
        _counts.update(graphs=1, sites=len(report.sites), rewritten=fused, refused=len(report.sites) - fused)
        _refusals.update(codes)


def record_final(forward: int, backward: int) -> None:
    """Count fused calls found in the final forward and backward graph of one compiled graph."""
    with _lock:
        _counts.update(forward=forward, backward=backward)
