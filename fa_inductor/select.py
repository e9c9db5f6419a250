"""Selecting: the first kernel with nothing against it gives the plan."""

from __future__ import annotations

from dataclasses import dataclass

from .kernel_table import kernels_for
from .refusal import Refusal, declare
from .request import AttentionRequest, Plan

NO_KERNEL = declare("no_kernel", "no kernel takes this site; the report lists each kernel's reasons")


@dataclass(frozen=True)
class Selection:
    """The chosen plan (None if every kernel refused) and what the kernels that were asked before it said."""

    plan: Plan | None
    passed_over: tuple[tuple[str, tuple[Refusal, ...]], ...]


def select(request: AttentionRequest, forced: str | None = None) -> Selection:
    passed: list[tuple[str, tuple[Refusal, ...]]] = []
    for kernel in kernels_for(request.device, forced):
        reasons = kernel.why_not(request)
        if not reasons:
            return Selection(kernel.plan(request), tuple(passed))
        passed.append((kernel.name, tuple(reasons)))
    return Selection(None, tuple(passed))
