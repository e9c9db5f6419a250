"""What a kernel is asked for (AttentionRequest), what it answers (Plan), and the protocol every kernel folder implements."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from .facts import Affine, MaskFacts, MaskTerm, ProgramFacts
from .program import ScoreProgram, from_text, to_text
from .refusal import Refusal

Size = Any
"""int or torch.SymInt: a length that may be symbolic. Kernels must not force a guard on one (no ``if size == …``)."""


@dataclass(frozen=True)
class TensorSpec:
    """Metadata of an input: shape and strides may hold SymInts."""

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: torch.dtype
    requires_grad: bool = False


@dataclass(frozen=True)
class AttentionRequest:
    """One attention site, as kernels see it.

    Layouts: q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), any strides (stride 0 included); Hq % Hkv == 0 and
    query head h reads key head ``h // (Hq // Hkv)``. All three have the same dtype. Captures are read in place.
    """

    q: TensorSpec
    k: TensorSpec
    v: TensorSpec
    program: ScoreProgram
    facts: ProgramFacts
    captures: tuple[TensorSpec, ...] = ()
    sizes: tuple[Size, ...] = ()
    post: ScoreProgram | None = None
    """Factor that multiplies the probabilities after normalisation (reads no score, no ``grad``); same captures and sizes."""
    dropout_p: float = 0.0
    """Of the probabilities; a program that drops scores says so itself (``ScoreProgram.drop_p``)."""
    device: str = "cpu"
    capability: tuple[int, int] | None = None
    tf32: bool = False
    """fp32 products may use TF32 (torch.get_float32_matmul_precision() != "highest")."""
    deterministic: bool = False
    recomputed: bool = False
    """The site is in the body of a checkpoint, which may run again in the backward pass."""
    masked_rows: Literal["eager", "zero"] = "eager"
    lse: bool = False
    """The lse is used, and differentiated where the output is."""

    @property
    def hides_by_bias(self) -> bool:
        """Tiles that the bias may hide are worth looking for: nothing trains it, and all heads share it."""
        bias = self.facts.hiding_bias
        return bias is not None and not self.captures[int(self.program.nodes[bias].value)].requires_grad  # type: ignore[arg-type]

    @property
    def needs_grad(self) -> bool:
        return any(t.requires_grad for t in (self.q, self.k, self.v, *self.captures))


_LINE = "|"
"""Between the lines of a program in a plan's text."""


@dataclass(frozen=True)
class Plan:
    """A kernel's answer: everything it needs besides tensors, sizes and the seed. Travels through the graph by value, as text."""

    kernel: str
    program: ScoreProgram
    facts: ProgramFacts
    post: ScoreProgram | None = None
    config: tuple[tuple[str, int | str | bool], ...] = ()
    """Kernel-specific choices (tile sizes, backend …)."""
    tf32: bool = False
    deterministic: bool = False
    masked_rows: Literal["eager", "zero"] = "eager"
    source_hash: str = ""
    """Hash of the kernel's sources: a changed kernel invalidates cached graphs."""
    reason: str = field(default="", compare=False)
    """One sentence for ``explain``: why this kernel and this config."""

    def get(self, name: str) -> int | str | bool:
        return dict(self.config)[name]

    def to_text(self) -> str:
        """Canonical text: equal plans give equal text. Without double quotes and backslashes, which Inductor's C++ wrapper does not escape."""
        text = json.dumps(
            {
                "kernel": self.kernel,
                "program": to_text(self.program).replace("\n", _LINE),
                "post": to_text(self.post).replace("\n", _LINE) if self.post else None,
                "facts": _facts_to_json(self.facts),
                "config": sorted(self.config),
                "tf32": self.tf32,
                "deterministic": self.deterministic,
                "masked_rows": self.masked_rows,
                "source": self.source_hash,
            },
            sort_keys=True,
            separators=(",", ":"),
        )
        assert not set(text) & {"'", "\\"}, f"a plan's words need no quotes or backslashes: {text}"
        return text.replace('"', "'")

    @staticmethod
    def from_text(text: str) -> Plan:
        data = json.loads(text.replace("'", '"'))
        return Plan(
            kernel=data["kernel"],
            program=from_text(data["program"].replace(_LINE, "\n")),
            post=from_text(data["post"].replace(_LINE, "\n")) if data["post"] else None,
            facts=_facts_from_json(data["facts"]),
            config=tuple((name, value) for name, value in data["config"]),
            tf32=data["tf32"],
            deterministic=data["deterministic"],
            masked_rows=data["masked_rows"],
            source_hash=data["source"],
        )


@dataclass(frozen=True)
class Forward:
    """Result of a kernel's forward.

    out: (B, Hq, Lq, Dv) in q's dtype, dimensions in q's stride order. lse: natural log, fp32, (B, Hq, Lq).
    extra: two tensors that the kernel's own backward wants saved (empty tensors where it wants none).
    """

    out: Tensor
    lse: Tensor
    extra: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Gradients:
    """Gradients of q, k, v and each capture; None where not asked for (``needs``)."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    captures: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class TileLists:
    """What a plan's kernels must know of the mask's tiles before they run: sites with equal ones, on the same tensors, share the answer.

    text: for ``Kernel.find_tiles``. captures, sizes: positions among the plan's that it reads. kernel: whose text it is.
    """

    kernel: str
    text: str
    captures: tuple[int, ...]
    sizes: tuple[int, ...]
    shapes: Callable[[Sequence[Size]], list[tuple[Size, ...]]] = field(compare=False)
    """Of the tensors of the answer, from batch, query heads, queries and keys; all are int32."""


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call. ``seed``: int64 tensor of 2 elements where something is dropped, else None.

    ``tiles``: the answer of ``Kernel.find_tiles``, where the graph computes it beside the call.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    captures: Sequence[Tensor]
    sizes: Sequence[Size]
    dropout_p: float
    seed: Tensor | None
    tiles: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Needs:
    """Which gradients the caller wants."""

    q: bool
    k: bool
    v: bool
    captures: tuple[bool, ...]


class Kernel(Protocol):
    """What each ``kernels/<name>/__init__.py`` exports as ``KERNEL``.

    ``forward`` and ``backward`` run eagerly, on fake tensors, and under AOTAutograd's tracing: they may only use ATen calls,
    ``torch.library.wrap_triton`` launches and the folder's own opaque custom ops; no data-dependent Python branches.
    """

    name: str

    def why_not(self, request: AttentionRequest) -> list[Refusal]:
        """Every reason against this kernel; empty when it serves the request exactly."""
        ...

    def plan(self, request: AttentionRequest) -> Plan:
        """Choose the configuration: a pure function of the request (called only when ``why_not`` is empty)."""
        ...

    def splits_lse(self, plan: Plan) -> bool:
        """Does ``extra[0]`` hold what rounding took from the lse, so that their sum tells rows apart whose scores are all a huge fill?

        Without it the lse is exact within rounding for every row of the plan.
        """
        ...

    def tile_lists(self, plan: Plan, backward: bool) -> TileLists | None:
        """What ``find_tiles`` is to compute for this plan (and for its backward pass); None where the kernel needs nothing."""
        return None

    def find_tiles(self, text: str, captures: Sequence[Tensor], sizes: Sequence[Size], shape: Sequence[Size], device: torch.device) -> list[Tensor]:
        """The tensors that ``Inputs.tiles`` brings; ``shape``: batch, query heads, queries, keys. On fake tensors too."""
        raise NotImplementedError(f"{self.name} asks for no lists of tiles")

    def forward(self, plan: Plan, inputs: Inputs) -> Forward: ...

    def backward(self, plan: Plan, inputs: Inputs, result: Forward, grad_out: Tensor, needs: Needs, grad_lse: Tensor | None = None) -> Gradients: ...


def _facts_to_json(facts: ProgramFacts) -> dict[str, object]:
    mask = facts.mask
    return {
        "scale": facts.scale,
        "bias": facts.bias,
        "softcap": facts.softcap,
        "plain": facts.plain,
        "labels": list(facts.labels),
        "hiding_bias": facts.hiding_bias,
        "mask": mask
        and {
            "fill": repr(mask.fill),
            "hidden": mask.hidden,
            "every_row_visible": mask.every_row_visible,
            "skip_above": repr(mask.skip_above),
            "every_row_keeps_a_key": mask.every_row_keeps_a_key,
            "places": list(mask.places),
            "terms": [[t.kind, t.node, t.bound and [t.bound.constant, [list(x) for x in t.bound.terms]]] for t in mask.terms],
        },
    }


def _facts_from_json(data: dict[str, Any]) -> ProgramFacts:
    mask = data["mask"]
    if mask is not None:
        terms = tuple(MaskTerm(kind, node, bound and Affine(bound[0], tuple((p, c) for p, c in bound[1]))) for kind, node, bound in mask["terms"])
        known = (mask["every_row_visible"], float(mask["skip_above"]), mask["every_row_keeps_a_key"], tuple(mask["places"]))
        mask = MaskFacts(float(mask["fill"]), mask["hidden"], terms, *known)
    return ProgramFacts(mask, data["scale"], data["bias"], data["softcap"], data["plain"], tuple(data["labels"]), data["hiding_bias"])
