"""What happened to every softmax of a compiled graph, as values, as text and as JSON.

The pipeline makes one ``GraphReport`` per graph and publishes it; ``explain`` and the dump folder show it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import linecache
import textwrap
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from . import log
from .maths import program_maths
from .refusal import Refusal

__all__ = ["GraphReport", "KernelRefusals", "SiteReport", "collecting", "program_maths", "publish", "source_of"]


@dataclass(frozen=True)
class KernelRefusals:
    """A kernel that was considered before the chosen one, and its reasons against the site."""

    kernel: str
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True)
class SiteReport:
    """The verdict on one softmax.

    Attributes:
        index: position of the softmax among the graph's softmaxes.
        softmax: name of its graph node.
        location, source_line: "file:line" in the model's source, and that line.
        module_path: module that contains it, e.g. "transformer.h.0.attn".
        fused: a kernel replaces it; then ``kernel``, ``config`` and ``reason`` say which, how and why.
        refusal: otherwise, why not.
        labels: what was recognised ("causal", "key padding" …).
        program: the score program in readable maths (see ``program_maths``).
        tiles: how many tiles of scores the mask leaves empty, in words.
        shapes: q, k, v in words.
        passed_over: the kernels that were asked before, and why each does not serve.
    """

    index: int
    softmax: str
    location: str = ""
    source_line: str = ""
    module_path: str = ""
    fused: bool = False
    refusal: Refusal | None = None
    kernel: str | None = None
    config: str = ""
    reason: str = ""
    labels: tuple[str, ...] = ()
    program: str = ""
    tiles: str = ""
    shapes: str = ""
    passed_over: tuple[KernelRefusals, ...] = ()

    @property
    def verdict(self) -> str:
        """One line: fused with which kernel, or the refusal's code."""
        if self.fused:
            return f"fused by {self.kernel}"
        return f"not fused: {self.refusal.code}" if self.refusal else "not fused"

    def __str__(self) -> str:
        return self.block((self,))

    def block(self, alike: tuple[SiteReport, ...]) -> str:
        """The text of ``alike``: this site and others that differ from it only in their index, node and module."""
        lines = [f"[{_ranges([site.index for site in alike])}] {self.verdict}"]
        modules = textwrap.fill(", ".join(dict.fromkeys(site.module_path for site in alike if site.module_path)), 110)
        rows = [("at", f"{self.location}  {self.source_line}".strip()), ("in", modules), ("shapes", self.shapes)]
        rows += [("labels", ", ".join(self.labels)), ("computes", self.program), ("tiles", self.tiles)]
        if self.refusal is not None:
            rows += [("why", self.refusal.text), *_elsewhere(self.refusal, self.location), ("advice", self.refusal.advice)]
        rows += [("config", self.config), ("because", self.reason)]
        for other in self.passed_over:
            rows += [(f"not {other.kernel}", "\n".join(f"{r.code}: {r.text}" for r in other.refusals))]
        lines += [line for name, text in rows if text for line in _row(name, text)]
        return "\n".join(lines)


@dataclass(frozen=True)
class GraphReport:
    """Every softmax of one graph, what stopped the graph as a whole, the seconds each stage took, and what else is worth knowing."""

    name: str
    sites: tuple[SiteReport, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[Refusal, ...] = ()
    """Where attention may be that the graph does not hold. They are no verdicts: neither counters nor ``strict`` heed them."""
    relies_on: tuple[str, ...] = ()
    """What buffers held when the graph was compiled, and must hold for it to be used."""

    @property
    def fused(self) -> int:
        return sum(site.fused for site in self.sites)

    @property
    def refused(self) -> int:
        return len(self.sites) - self.fused

    def __str__(self) -> str:
        lines = [f"{self.name}: {_plural(len(self.sites), 'softmax', 'softmaxes')}, {self.fused} fused, {self.refused} not"]
        if self.seconds:
            lines.append("  " + ", ".join(f"{stage} {seconds * 1000:.0f} ms" for stage, seconds in self.seconds.items()))
        lines += [f"  relies on {what}" for what in self.relies_on]
        for refusal in self.refusals:
            lines += [f"  the whole graph was left to Inductor: {refusal}", *_row("advice", refusal.advice)]
        for note in self.notes:
            lines += [f"  {note}", *_row("advice", note.advice)]
        for alike in self._alike():
            lines += ["", alike[0].block(alike)]
        return "\n".join(lines)

    def _alike(self) -> list[tuple[SiteReport, ...]]:
        """Sites with the same verdict for the same reasons on the same line, together: the layers of a model."""
        groups: dict[SiteReport, list[SiteReport]] = {}
        for site in self.sites:
            groups.setdefault(dataclasses.replace(site, index=0, softmax="", module_path="", refusal=_without_node(site.refusal)), []).append(site)
        return [tuple(group) for group in groups.values()]

    def to_json(self) -> str:
        """Everything in the report; each refusal with its advice."""
        return json.dumps(_plain(self), indent=2)


_collectors: ContextVar[tuple[list[GraphReport], ...]] = ContextVar("collectors", default=())


@contextlib.contextmanager
def collecting() -> Iterator[list[GraphReport]]:
    """The list receives every report that this thread publishes inside the ``with`` block."""
    reports: list[GraphReport] = []
    token = _collectors.set((*_collectors.get(), reports))
    try:
        yield reports
    finally:
        _collectors.reset(token)


def publish(report: GraphReport) -> None:
    """Hand a finished report to whoever collects, and log one line per softmax."""
    for reports in _collectors.get():
        reports.append(report)
    logger = log.get("report")
    for refusal in report.refusals:
        logger.info("%s: left to Inductor: %s", report.name, refusal)
    for note in report.notes:
        logger.info("%s: %s", report.name, note)
    for site in report.sites:
        logger.info("%s [%d] %s %s%s", report.name, site.index, site.location, site.verdict, f": {site.refusal.text}" if site.refusal else "")


def source_of(location: str) -> str:
    """The source line at "file:line", stripped; empty where it cannot be read."""
    file, _, line = location.rpartition(":")
    return linecache.getline(file, int(line)).strip() if file and line.isdigit() else ""


def _without_node(refusal: Refusal | None) -> Refusal | None:
    return refusal and dataclasses.replace(refusal, node="")


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers in short: "0-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _elsewhere(refusal: Refusal, location: str) -> list[tuple[str, str]]:
    """Where the refusal points, if that is not the softmax itself."""
    if not refusal.location or refusal.location == location:
        return []
    return [("see", f"{refusal.location}  {source_of(refusal.location)}".strip())]


def _row(name: str, text: str) -> list[str]:
    """``name`` and its text, continued lines aligned below the first."""
    first, *rest = text.splitlines()
    return [f"    {name:<16} {first}", *(f"    {'':<16} {line}" for line in rest)]


def _plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _plain(value: object) -> object:
    """JSON form of a report: dataclasses as dictionaries."""
    if isinstance(value, Refusal):
        return {"code": value.code, "text": value.text, "node": value.node, "location": value.location, "advice": value.advice}
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
