"""One model of a zoo in one variant: what was rewritten and what was not, and errors against eager. ``coverage.py`` runs and tabulates it."""

from __future__ import annotations

import collections
import contextlib
import pathlib
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import zoo_errors
from torch import nn
from zoo_errors import Outcome
from zoo_models import Skipped, Trial, Zoo, cast, doubled

import fa_inductor
from fa_inductor.op import count_calls
from fa_inductor.report import GraphReport, collecting


class FinalGraphs:
    """Counts what the graphs hold that reach Inductor's code generation; unless ``codegen``, interprets them instead, which is far quicker."""

    def __init__(self, codegen: bool, softmaxes: Callable[[Any], Sequence[Any]]) -> None:
        from functorch.compile import make_boxed_func
        from torch._inductor import compile_fx

        self.counts: collections.Counter[str] = collections.Counter()
        generate = compile_fx._compile_fx_inner

        def inner(gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            backward = bool(kwargs.get("is_backward"))
            self.counts["backward" if backward else "forward"] += count_calls(gm, backward)
            if not backward:
                self.counts["softmaxes"] += sum(len(softmaxes(m)) for m in gm.modules() if isinstance(m, torch.fx.GraphModule))
            return generate(gm, inputs, **kwargs) if codegen else make_boxed_func(gm.forward)

        compile_fx._compile_fx_inner = inner


class TimeUp(BaseException):
    """Not an Exception, which compilers catch."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise ``TimeUp`` in the ``with`` block after so many seconds."""

    def stop(*unused: object) -> None:
        raise TimeUp(f"{seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def measure(trial: Trial, zoo: Zoo, final: FinalGraphs, timeout: int) -> dict[str, Any]:
    """The record of one trial, in which a compiled model has ``timeout`` seconds; nothing that goes wrong in it is raised."""
    record = {**trial.about, **zoo.known(trial.name)}
    began = time.perf_counter()
    try:
        record |= _Run(trial, zoo, final, timeout).record()
    except Skipped as why:
        record["skipped"] = str(why)
    except Exception as error:
        record["error"] = f"eager: {_said(error)}"
    return {**record, "seconds": round(time.perf_counter() - began, 1)}


class _Run:
    """One trial on its way: eager, eager again, fused, and, where these differ, plain Inductor and float64."""

    def __init__(self, trial: Trial, zoo: Zoo, final: FinalGraphs, timeout: int) -> None:
        self.trial, self.zoo, self.final, self.timeout = trial, zoo, final, timeout
        self.autocast = trial.variant == "autocast"
        self.model, self.inputs = zoo.build(trial)
        self.state = {n: t.clone() for n, t in self.model.state_dict().items()}

    def record(self) -> dict[str, Any]:
        eager = self._step(self.model)
        if self.trial.train and not eager.gradients:
            raise Skipped("no output depends on what trains")
        noise = zoo_errors.largest(self._step(self.model), eager)
        ours, counted = self._attempt("flashattn", eager)
        found = {"noise": max(noise["err"], noise["grad_err"]), **counted}
        if self.autocast or not zoo_errors.is_close(found):
            exact, found["reference"] = self._exact()
            least = zoo_errors.SMALL_BFLOAT16 if self.autocast else zoo_errors.SMALL
            found["eager_exact"] = zoo_errors.norms(eager, exact, least)
            if ours is not None:
                found["exact"] = zoo_errors.norms(ours, exact, least)
            if zoo_errors.verdict(found) != "ok":
                plain, found["plain"] = self._attempt("inductor", eager)
                if plain is not None:
                    found["plain"]["exact"] = zoo_errors.norms(plain, exact, least)
        return zoo_errors.shortened(found) | {"verdict": zoo_errors.verdict(found)}

    def _step(self, call: Callable[..., Any], inputs: Any = None) -> Outcome:
        return self.zoo.step(self.trial, call, self.model, self.inputs if inputs is None else inputs, self.autocast)

    def _attempt(self, backend: str, eager: Outcome) -> tuple[Outcome | None, dict[str, Any]]:
        """The compiled model's outcome, if it has one, and what is recorded of it."""
        self.model.load_state_dict(self.state)
        torch._dynamo.reset()
        fa_inductor.reset()
        self.final.counts.clear()
        compiled = torch.compile(self.model, backend=backend, dynamic=self.trial.variant == "dynamic")
        with collecting() as reports:
            try:
                with limited(self.timeout):
                    outcome = self._step(compiled)
            except (Exception, TimeUp) as error:
                return None, {"error": _said(error)}
        seen = zoo_errors.largest(outcome, eager)
        if backend == "flashattn":
            counts: dict[str, Any] = {**fa_inductor.counters()}
            seen |= {k: counts[k] for k in ("graphs", "rewritten", "forward", "backward")}
            seen |= {"final": dict(self.final.counts), **_verdicts(reports)}
        if self.trial.variant == "dynamic":
            seen["other_batch"] = self._other_batch(compiled)
        return outcome, seen

    def _exact(self) -> tuple[Outcome, str]:
        """Eager in float64, without autocast; in float32 where the model cannot be run so."""
        try:
            return self._eager_in(torch.float64), "float64"
        except Exception:
            return self._eager_in(torch.float32), "float32"

    def _eager_in(self, dtype: torch.dtype) -> Outcome:
        model, inputs = self.zoo.build(self.trial)
        model = model.to(dtype)
        return self.zoo.step(self.trial, model, model, cast(inputs, dtype), autocast=False)

    def _other_batch(self, compiled: nn.Module) -> float | str:
        """Error of the same compiled model on twice the batch, where eager takes one."""
        inputs = doubled(self.inputs)
        self.model.load_state_dict(self.state)
        try:
            eager = self._step(self.model, inputs)
        except Exception:
            return "eager takes no other batch"
        self.model.load_state_dict(self.state)
        try:
            with limited(self.timeout):
                found = zoo_errors.largest(self._step(compiled, inputs), eager)
        except (Exception, TimeUp) as error:
            return f"failed: {_said(error)}"
        return float(max(found["err"], found["grad_err"]))


def _verdicts(reports: Sequence[GraphReport]) -> dict[str, Any]:
    """Kernels and refusals of the collected reports; what is not attention is left out."""
    sites = [s for r in reports for s in r.sites]
    kernels = collections.Counter(s.kernel for s in sites if s.fused)
    refused = [
        {"code": s.refusal.code, "text": s.refusal.text, "at": s.location, "line": s.source_line, "see": s.refusal.location}
        for s in sites
        if s.refusal is not None and s.refusal.code != "not_attention"
    ]
    graphs = [{"code": x.code, "text": x.text, "at": x.location} for r in reports for x in r.refusals]
    return {"kernels": dict(kernels), "refused": refused, "graph_refusals": graphs}


def _said(error: BaseException) -> str:
    """The error in a line, with the last place in this project that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    where = next((f"{pathlib.Path(f.filename).name}:{f.lineno}" for f in reversed(frames) if "fa_inductor" in f.filename), "")
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}" + (f" ({where})" if where else "")
