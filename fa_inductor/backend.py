"""The backend ``flashattn``: the pipeline on one page.

    Dynamo graph -> normalize -> find -> lift (analyse) -> recognise -> select -> rewrite -> Inductor

Without a site the original Dynamo graph goes to Inductor untouched. Every softmax ends in the report, fused or with a reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from . import breaks, library_calls, log, report, sums
from .analyse import NO_SCORES
from .counters import record_graph
from .dump import Dump
from .emptiness import empty_tiles
from .find import Candidate, find
from .finite import check_cleaned, rule_for_rows
from .graph import GraphContext
from .inductor import Contents, compile_with_inductor
from .joined import search
from .library_calls import LIBRARY, LibraryCall
from .location import location_of, module_path_of, source_line_of
from .normalize import Normalized, normalize
from .options import Options, parse
from .patterns.views import value_of
from .recognise import recognise_site
from .refusal import Refusal, Refused, StrictError, declare
from .region import DTYPE, NOT_ATTENTION
from .report import GraphReport, KernelRefusals, SiteReport
from .request import AttentionRequest, Plan
from .rewrite import Placed, SiteEmitter, discard, place, replace
from .rewrite_joined import gather_before, replace_joined
from .rewrite_tiles import share_tiles
from .select import NO_KERNEL, Selection, select
from .signs import IN_BODY, has_softmax, in_bodies
from .site import AttentionSite
from .stored import Guarded, Reliance, Stored, buffers, in_words, of_body, of_inputs
from .torn import left_by, torn

DISABLED = declare("disabled", "unset FA_INDUCTOR_DISABLE to fuse attention again")
DROPOUT_RANDOM = declare("fallback_random", "a fused dropout cannot draw eager's random numbers; unset torch._inductor.config.fallback_random to fuse")
POST_MASK_NAN = declare(
    "post_mask_nan",
    "eager turns such a row's NaN into 0 after the softmax: give each row a visible key, use a finite fill, or drop one of the two masks",
)
SHARED = declare("shared_output", "one softmax for each matmul is fused; this one is computed as before, and multiplies the other's probabilities")
INTERNAL = declare("internal_error", "this is a bug in fa_inductor: the site runs unfused; please report the message with the code at that line")

_names = iter(range(10**9))


def flashattn(gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """``torch.compile(model, backend="flashattn", mode=…, options=…)``.

    Args:
        gm, example_inputs: what Dynamo hands to a backend.
        mode: an Inductor mode ("reduce-overhead", "max-autotune", …).
        options: ours (see ``Options``) and any Inductor setting.
    """
    parsed = parse(options, mode)
    for message in parsed.messages:
        log.warn_once(f"{message}; it is ignored")
    settings: Any = torch._inductor.config.patch(parsed.inductor) if parsed.inductor else nullcontext()
    with settings:
        compilation = Compilation(gm, parsed.options, example_inputs)
        rewritten = compilation.run()
        compiled = compile_with_inductor(rewritten, example_inputs, parsed.inductor, compilation.contents)
    compilation.announce()  # only now: Dynamo may have torn the compilation down to start again
    return compilation.guarded(compiled)


@dataclass
class _Verdict:
    """What became of one softmax."""

    candidate: Candidate
    site: AttentionSite | None = None
    refusal: Refusal | None = None
    plans: tuple[Plan, ...] = ()
    """Of the fused calls that the softmax became: one, or one for each of its pieces."""
    passed_over: tuple[tuple[str, tuple[Refusal, ...]], ...] = ()
    shapes: str = ""


class _Planned(NamedTuple):
    """A site whose operands are in the graph, and what will compute it."""

    emitter: SiteEmitter
    placed: Placed
    request: AttentionRequest
    plan: Plan


@dataclass
class Compilation:
    """One graph on its way through the pipeline."""

    original: fx.GraphModule
    options: Options
    inputs: Sequence[Any] = ()
    """Examples; without them nothing is known of what buffers hold."""
    relied_on: dict[int, Reliance] = field(default_factory=dict)
    """Inputs whose content the result relies on, by number."""
    seconds: dict[str, float] = field(default_factory=dict)
    fused: int = 0
    differentiated: int = 0
    """Of the fused sites, those that need a gradient."""
    broken: bool = False
    searched: bool = False
    report: GraphReport | None = None
    calls: dict[fx.Node, LibraryCall] = field(default_factory=dict)
    """Library calls that are written out; by their softmax."""
    sums: dict[fx.GraphModule, list[sums.Sum]] = field(default_factory=dict)
    """Products of sums of probabilities that are written out."""
    end: breaks.Break | None = None
    """The graph break that ended the graph."""

    def run(self) -> fx.GraphModule:
        """The graph for Inductor: rewritten, or the original if nothing was."""
        dump = Dump.open(self.options.dump)
        dump.write("dynamo", lambda: str(self.original.graph))
        name = f"graph {next(_names)}"
        self.end = left_by(self.original)
        promising = has_softmax(self.original)
        if self.options.disabled:
            why = (Refusal(DISABLED, "FA_INDUCTOR_DISABLE is set"),) if promising else ()
            return self._finish(name, dump, (), why, self.original)
        self.searched = promising
        start = time.perf_counter()
        normal = normalize(self.original) if promising else None
        self.seconds["normalize"] = time.perf_counter() - start
        if not isinstance(normal, Normalized):
            return self._finish(name, dump, (), () if normal is None else (normal,), self.original)
        dump.write("normalized", lambda: str(normal.gm.graph))
        start = time.perf_counter()
        for gm in (normal.gm, *(gm for _, gm in normal.subgraphs)):
            self.calls |= library_calls.write_out(gm)
            self.sums[gm] = sums.write_out(gm)
        known_buffers = buffers(self.original, self.inputs) if self.options.read_buffers else {}
        grad, stored = torch.is_grad_enabled(), Stored(of_inputs(normal.gm, known_buffers))
        outer = GraphContext(normal.gm, grad, stored=stored)
        inner = [(gm, Stored(of_body(normal.gm, path, gm, stored))) for path, gm in normal.subgraphs]
        bodies = [GraphContext(gm, grad, outer.written, known) for gm, known in inner]
        verdicts = [v for context in (outer, *bodies) for v in self._graph(context)]
        for verdict in verdicts:
            if verdict.refusal is not None and verdict.refusal.code in (NO_SCORES, NOT_ATTENTION) and verdict.candidate.anchor.output in outer.order:
                self._guarded(verdict, self._look_for_break)
        self.seconds["rewrite"] = time.perf_counter() - start
        self.fused = 0 if self.broken else sum(len(v.plans) for v in verdicts)
        self.relied_on = {n: used for known in (stored, *(known for _, known in inner)) for n, used in known.used.items()} if self.fused else {}
        self._dump_stages(dump, verdicts)
        dump.write("rewritten", lambda: str(normal.gm.graph))
        return self._finish(name, dump, verdicts, (), normal.gm if self.fused else self.original, in_bodies(normal))

    def _finish(
        self,
        name: str,
        dump: Dump,
        verdicts: Sequence[_Verdict],
        refusals: tuple[Refusal, ...],
        gm: fx.GraphModule,
        unsearched: Sequence[fx.Node] = (),
    ) -> fx.GraphModule:
        sites = tuple(_site_report(i, v) for i, v in enumerate(verdicts))
        sites += tuple(_body_report(i, node) for i, node in enumerate(unsearched, len(sites)))
        self.report = result = GraphReport(name, sites, refusals, self.seconds, _notes(self.end, sites), in_words(self.original, self.relied_on))
        dump.write("report.txt", lambda: str(result))
        dump.write("report.json", result.to_json)
        missed = [s for s in sites if not s.fused and s.refusal is not None and s.refusal.code != "not_attention"]
        if self.options.strict and (missed or refusals):
            raise StrictError("option strict is set and attention stays unfused:\n" + "\n".join(map(str, missed or refusals)))
        return gm

    def guarded(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled``, for as long as what it relies on holds."""
        return Guarded(compiled, self.original, self.relied_on) if self.relied_on else compiled

    def announce(self) -> None:
        """Count and publish the report (which logs a line per softmax)."""
        assert self.report is not None
        for site in self.report.sites:
            if site.refusal is not None and site.refusal.code in (DTYPE, NO_KERNEL):
                log.warn_once(f"attention at {site.location or site.softmax} stays unfused: {site.refusal.text}; {site.refusal.advice}")
        if self.end is not None:
            breaks.remember(self.end)
        record_graph(self.report)
        report.publish(self.report)

    def _dump_stages(self, dump: Dump, verdicts: Sequence[_Verdict]) -> None:
        dump.write("sites", lambda: "\n\n".join(f"{v.candidate.anchor.output.name}: {v.site or v.refusal}" for v in verdicts))
        dump.write("programs", lambda: "\n\n".join(f"{v.candidate.anchor.output.name}\n{_programs(v.site)}" for v in verdicts if v.site))
        dump.write("selection", lambda: "\n\n".join(_selection(v) for v in verdicts))

    @property
    def contents(self) -> Contents:
        """Of the graph that ``run`` returned."""
        return Contents(self.fused, self.differentiated, self.searched)

    # -- one graph ---------------------------------------------------------------------------------------------------------
    def _graph(self, context: GraphContext) -> list[_Verdict]:
        """Analyse every softmax first, then rewrite: the analyses see the graph as the user wrote it."""
        verdicts = [_Verdict(c) for c in find(context.graph)]
        for verdict in verdicts:
            self._guarded(verdict, lambda v: setattr(v, "site", search(context, v.candidate)))
        self._refuse_of_outputs(verdicts)
        claimed: set[fx.Node] = set()
        # the last output first: it may read an earlier one, a node that the rewrite replaces
        for verdict in sorted((v for v in verdicts if v.site), key=lambda v: max(context.order[n] for n in v.site.outputs), reverse=True):  # type: ignore[union-attr]
            assert verdict.site is not None
            if verdict.site.outputs & claimed:
                softmax = verdict.candidate.anchor.output
                verdict.refusal = Refusal(SHARED, "another softmax is fused with the matmul that this one feeds", softmax.name, location_of(softmax))
                continue
            self._guarded(verdict, lambda v: self._rewrite(context, v))
            if verdict.plans:
                claimed |= verdict.site.outputs
        for written in self.sums[context.gm]:
            written.settle()
        for verdict in (library := [v for v in verdicts if v.candidate.anchor.output in self.calls]):
            self.calls[verdict.candidate.anchor.output].settle(bool(verdict.plans))
        verdicts = [v for v in verdicts if v.plans or v not in library]
        share_tiles(context.graph)
        self._guarded_graph(context.gm, verdicts)
        return verdicts

    def _refuse_of_outputs(self, verdicts: list[_Verdict]) -> None:
        """A softmax over what another attention puts out is no attention of its own: its score product is the other's product with the values."""
        outputs = {n: v for v in verdicts if v.site is not None for n in v.site.outputs}
        for verdict in verdicts:
            if verdict.site is not None and any(outputs.get(n, verdict) is not verdict for n in verdict.site.region - verdict.site.outputs):
                node = verdict.candidate.anchor.output
                verdict.site, verdict.refusal = None, Refusal(NOT_ATTENTION, "it runs over the output of an attention", node.name, location_of(node))

    def _guarded_graph(self, gm: fx.GraphModule, verdicts: list[_Verdict]) -> None:
        """A graph that does not hold together after the rewrites is given up, loudly: the original is compiled."""
        try:
            gm.graph.lint()
            gm.recompile()
        except Exception as error:
            self.broken = True
            for verdict in verdicts:
                where = location_of(verdict.candidate.anchor.output)
                verdict.plans, verdict.refusal = (), Refusal(INTERNAL, f"the rewritten graph is not valid: {error}", location=where)
            log.get().warning("the rewritten graph is not valid: %s", error, exc_info=True)

    def _guarded(self, verdict: _Verdict, stage: Callable[[_Verdict], None]) -> None:
        """A stage that cannot go on says why; an unexpected error costs the site, loudly, but never the model."""
        try:
            stage(verdict)
        except Refused as refused:
            verdict.refusal = refused.refusal
        except Exception as error:
            node = verdict.candidate.anchor.output
            verdict.refusal = Refusal(INTERNAL, f"{type(error).__name__}: {error}", node.name, location_of(node))
            log.get().warning("%s", verdict.refusal, exc_info=True)

    def _rewrite(self, context: GraphContext, verdict: _Verdict) -> None:
        site = verdict.site
        assert site is not None
        if site.joined:
            self._rewrite_joined(context, verdict, site)
            return
        sites = sorted((site, *site.beside), key=lambda s: context.order[s.output.node], reverse=True)
        made = self._all_planned(context, verdict, sites)
        call = self.calls.get(site.anchor.output)
        if call is not None and not call.gains(made[0].request, made[0].plan):
            discard(made[0].emitter)
            node = site.output.node
            raise Refused(Refusal(LIBRARY, "PyTorch's own kernel serves the call", node.name, location_of(node)))
        for one, planned in zip(sites, made, strict=True):
            replace(context, one, planned.emitter, planned.placed, planned.plan, self.options.masked_rows == "zero")
        self._count(verdict, made)

    def _rewrite_joined(self, context: GraphContext, verdict: _Verdict, site: AttentionSite) -> None:
        made = self._all_planned(context, verdict, [piece.site for piece in site.joined], gather_before(context, site))
        replace_joined(context, site, [(p.emitter, p.placed, p.plan) for p in made], self.options.masked_rows == "zero")
        self._count(verdict, made)

    def _count(self, verdict: _Verdict, made: list[_Planned]) -> None:
        verdict.plans = tuple(p.plan for p in made)
        self.differentiated += sum(p.request.needs_grad for p in made)

    def _all_planned(self, context: GraphContext, verdict: _Verdict, sites: list[AttentionSite], before: fx.Node | None = None) -> list[_Planned]:
        """Of all sites or, where one is refused, of none."""
        made: list[_Planned] = []
        for site in sites:
            try:
                made.append(self._planned(context, verdict, site, before))
            except Refused:
                for planned in reversed(made):
                    discard(planned.emitter)
                raise
        return made

    def _planned(self, context: GraphContext, verdict: _Verdict, site: AttentionSite, before: fx.Node | None = None) -> _Planned:
        """The operands of ``site``, placed (before the output of another piece, perhaps), and a kernel's plan; raises Refused."""
        node = site.output.node
        shared = bool(site.columns) or before is not None
        facts = recognise_site(site)
        if site.random and torch._inductor.config.fallback_random:
            raise Refused(Refusal(DROPOUT_RANDOM, "dropout with torch._inductor.config.fallback_random", node.name, location_of(node)))
        rows = rule_for_rows(site, facts)
        if rows is None or (rows == "zero" and before is not None):
            again = "probabilities are masked again after a softmax that may have rows of -inf alone, or NaN"
            why = "probabilities that may be 0 for a whole row are multiplied by what may be infinite" if site.cleaned else again
            raise Refused(Refusal(POST_MASK_NAN, why, node.name, location_of(node)))
        if site.cleaned:
            check_cleaned(site, facts, node in context.needs_grad)
        if any(n._erased for n in (node, *site.reads)):
            raise Refused(Refusal(SHARED, "it shares a product with a softmax that was fused before it", node.name, location_of(node)))
        emitter, placed = place(context, site, before)
        specs = placed.specs(context)
        device = placed.q.meta["val"].device
        request = AttentionRequest(
            q=specs[0],
            k=specs[1],
            v=specs[2],
            program=site.program,
            facts=facts,
            captures=specs[3:],
            sizes=tuple(value_of(s) for s in placed.sizes),
            post=site.post,
            dropout_p=site.dropout_p,
            device=device.type,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            tf32=torch.get_float32_matmul_precision() != "highest",
            deterministic=self._deterministic(),
            # with columns or other pieces, all probability is theirs
            masked_rows="zero" if shared or site.anchor.zero_rows or rows == "zero" else self.options.masked_rows,
            lse=shared,
            recomputed=context.recomputed,
        )
        selection: Selection = select(request, self.options.kernel)
        verdict.passed_over += tuple(p for p in selection.passed_over if p not in verdict.passed_over)
        verdict.shapes += ("; " if verdict.shapes else "") + _shapes(request)
        if selection.plan is None:
            discard(emitter)
            reasons = "; ".join(f"{k}: {', '.join(r.text for r in rs)}" for k, rs in selection.passed_over)
            raise Refused(Refusal(NO_KERNEL, reasons, node.name, location_of(node)))
        return _Planned(emitter, placed, request, selection.plan)

    def _look_for_break(self, verdict: _Verdict) -> None:
        """Is what the softmax lacks in another graph?"""
        verdict.refusal = torn(verdict.candidate, self.end) or verdict.refusal

    def _deterministic(self) -> bool:
        asked = self.options.deterministic
        return torch.are_deterministic_algorithms_enabled() if asked is None else asked


def _selection(verdict: _Verdict) -> str:
    said = [f"{kernel}: {reason}" for kernel, reasons in verdict.passed_over for reason in reasons]
    return "\n".join([verdict.candidate.anchor.output.name, *map(str, verdict.plans), *said])


def _programs(site: AttentionSite) -> str:
    parts = [p.site for p in site.joined] or [site]
    lines = [line for part in parts for line in (str(part.program), f"post: {part.post}")]
    return "\n".join([*lines, *(f"also over {c.length} columns: {c.program}" for c in site.columns)])


def _shapes(request: AttentionRequest) -> str:
    names = ("q", "k", "v")
    return ", ".join(f"{n} {tuple(t.shape)}" for n, t in zip(names, (request.q, request.k, request.v))) + f" {str(request.q.dtype).removeprefix('torch.')}"


def _notes(end: breaks.Break | None, sites: Sequence[SiteReport]) -> tuple[Refusal, ...]:
    """Attention may hide behind the end of the graph: in a call that is not compiled."""
    note = end.note if end else None
    if note is None or any(s.refusal is not None and s.refusal.location == note.location for s in sites):
        return ()
    return (note,)


def _body_report(index: int, node: fx.Node) -> SiteReport:
    where = location_of(node)
    refusal = Refusal(IN_BODY, "it is inside the body of a higher-order operator", node.name, where)
    return SiteReport(index, node.name, where, source_line_of(node), module_path_of(node), refusal=refusal)


def _site_report(index: int, verdict: _Verdict) -> SiteReport:
    node, site, plan = verdict.candidate.anchor.output, verdict.site, verdict.plans[0] if verdict.plans else None
    return SiteReport(
        index=index,
        softmax=node.name,
        location=location_of(node),
        source_line=source_line_of(node),
        module_path=module_path_of(node),
        fused=plan is not None,
        refusal=verdict.refusal,
        kernel="+".join(dict.fromkeys(p.kernel for p in verdict.plans)) or None,
        config=", ".join(f"{n}={v}" for n, v in plan.config) if plan else "",
        reason=plan.reason if plan else "",
        labels=_labels(site) if site else (),
        program=_computes(site) if site else "",
        tiles=_tiles(site) if site and plan is not None else "",
        shapes=verdict.shapes,
        passed_over=tuple(KernelRefusals(k, r) for k, r in verdict.passed_over),
    )


def _labels(site: AttentionSite) -> tuple[str, ...]:
    parts = [p.site for p in site.joined] or [site]
    words = dict.fromkeys(word for part in parts for word in recognise_site(part).labels if word != "plain" or len(parts) == 1)
    more = {"joined": site.joined, "sink": site.columns, "several products": site.beside, "probabilities kept": site.escapes}
    return (*words, *(word for word, holds in more.items() if holds))


def _tiles(site: AttentionSite) -> str:
    if site.joined:
        return ""
    with _disable_current_modes():
        return empty_tiles(site.program, recognise_site(site).mask, site.axes.q, site.axes.k, site.size_symbols)


def _computes(site: AttentionSite) -> str:
    """The scores of each piece, and those of the columns beside them."""
    pieces = [report.program_maths(p.site.program) for p in site.joined] or [report.program_maths(site.program)]
    return "; softmax also over ".join([*pieces, *(report.program_maths(c.program) for c in site.columns)])
