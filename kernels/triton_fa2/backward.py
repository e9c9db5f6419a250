"""Launches of the backward kernels, and the sums that turn their partial results into gradients of captured tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa_inductor.program import Coordinates, evaluate
from fa_inductor.request import Forward, Gradients, Inputs, Needs, Plan, Size

from .codegen import columns_kernel, delta_kernel, dense_kernel, rows_kernel, sum_kernel, traits_of, whole_kernel
from .launch import common_arguments, empty_like_order, launch, tensor_arguments, tiles
from .template_backward import ROW_PAD, Wanted, statistics
from .text import strided
from .tile_lists import lists_for
from .traits import LoadGradient, Traits

_MOST_ENTRIES = 4096
_PROGRAMS = 1024  # dense gradients: programs that keep a large GPU busy
_RESIDENT = 264  # of the kernel for whole score matrices: two on each processor is what their registers allow


def backward(plan: Plan, inputs: Inputs, result: Forward, grad_out: Tensor, grad_lse: Tensor | None, needs: Needs) -> Gradients:
    traits = traits_of(plan)
    wanted = tuple(i for i, n in enumerate(needs.captures) if n)
    _, gradients = traits.backward_flavour(True, wanted)
    dense = [g for g in gradients if {"q", "k"} <= set(g.letters)]
    by_key = tuple(g for g in gradients if "k" in g.letters and "q" not in g.letters)
    by_row = tuple(g for g in gradients if "k" not in g.letters)
    if plan.get("whole") and grad_lse is None and not by_key and not by_row and len(dense) <= 1 and not any(_is_table(plan, inputs, g) for g in dense):
        return _whole(plan, inputs, result, grad_out, needs, dense[0] if dense else None)
    shared = _shared(traits, inputs, result, grad_out, grad_lse)
    sums: list[tuple[LoadGradient, Tensor]] = []
    walks = _walks(plan, inputs, needs.q or bool(by_row), needs.k or needs.v or bool(by_key))
    dq = _rows(plan, inputs, shared | walks.get("rows", {}), needs.q, by_row, sums)
    dk, dv = _columns(plan, inputs, shared | walks.get("columns", {}), needs, by_key, sums)
    tables: list[tuple[int, Tensor]] = []
    for gradient in dense:
        if _is_table(plan, inputs, gradient):
            tables.append((gradient.capture, _table(plan, inputs, shared, gradient)))
        else:
            sums.append((gradient, _dense(plan, inputs, shared, gradient)))
    captures = tuple(
        _gather(inputs, c, [s for s in sums if s[0].capture == c], [t for n, t in tables if n == c]) if c in wanted else None
        for c in range(len(needs.captures))
    )
    return Gradients(dq, dk, dv, captures)


def _shared(traits: Traits, inputs: Inputs, result: Forward, grad_out: Tensor, grad_lse: Tensor | None) -> dict[str, Any]:
    """Arguments of every gradient kernel; runs the kernel that computes delta."""
    q, out = inputs.q, result.extra[1] if traits.exact_delta else result.out
    batch, heads, length, _ = q.shape
    padded = tiles(length, ROW_PAD) * ROW_PAD
    own: dict[str, Any] = {name: torch.empty((batch, heads, padded), dtype=torch.float32, device=q.device) for name in statistics(traits)}
    if traits.flag_below is not None:
        own["FLAG"] = torch.zeros((batch * heads,), dtype=torch.int32, device=q.device)
    arguments = tensor_arguments({"O": out, "DO": grad_out}) | own | {"LSE": result.lse, "H": heads, "Lq": length}
    if traits.split_lse:
        arguments["LSE_LOW"] = result.extra[0]
    if grad_lse is not None:
        arguments["DLSE"] = grad_lse.contiguous()
    kernel = delta_kernel(traits.plan, grad_lse is not None)
    launch(kernel, tiles(padded, 64) * batch * heads, arguments, BLOCK_M=64, num_warps=4, num_stages=1)
    return tensor_arguments({"Q": q, "K": inputs.k, "V": inputs.v, "DO": grad_out}) | own | common_arguments(traits, inputs)


def _walks(plan: Plan, inputs: Inputs, rows: bool, columns: bool) -> dict[str, dict[str, Tensor]]:
    """The argument of the kernels that follow lists, by kernel."""
    kernels = [name for name, wanted in (("rows", rows), ("columns", columns)) if wanted]
    if not traits_of(plan).lists or not kernels:
        return {}
    return {name: {"WALK": found} for name, found in lists_for(plan, inputs, kernels).items()}


def _rows(
    plan: Plan, inputs: Inputs, shared: dict[str, Any], need: bool, partials: tuple[LoadGradient, ...], sums: list[tuple[LoadGradient, Tensor]]
) -> Tensor | None:
    if not need and not partials:
        return None
    q = inputs.q
    batch, heads, length, _ = q.shape
    dq = empty_like_order(q, q.shape) if need else None
    want = Wanted(frozenset("q" if need else ""), tuple(sorted({g.capture for g in partials})))
    arguments = dict(shared)
    if dq is not None:
        arguments |= tensor_arguments({"DQ": dq})
    for i, gradient in enumerate(partials):
        arguments[f"G{i}"] = torch.empty((batch, heads, length), dtype=torch.float32, device=q.device)
        sums.append((gradient, arguments[f"G{i}"].unsqueeze(3)))
    size = int(plan.get("rows_m"))
    launch(rows_kernel(plan, want, partials), tiles(length, size) * batch * heads, arguments, **_options(plan, "rows"))
    return dq


def _columns(
    plan: Plan, inputs: Inputs, shared: dict[str, Any], needs: Needs, partials: tuple[LoadGradient, ...], sums: list[tuple[LoadGradient, Tensor]]
) -> tuple[Tensor | None, Tensor | None]:
    if not (needs.k or needs.v or partials):
        return None, None
    k, v = inputs.k, inputs.v
    batch, kv_heads, length, _ = k.shape
    dk = empty_like_order(k, k.shape) if needs.k else None
    dv = empty_like_order(v, v.shape) if needs.v else None
    arguments = shared | tensor_arguments({name: t for name, t in (("DK", dk), ("DV", dv)) if t is not None})
    for i, gradient in enumerate(partials):
        arguments[f"G{i}"] = torch.empty((batch, inputs.q.shape[1], length), dtype=torch.float32, device=k.device)
        sums.append((gradient, arguments[f"G{i}"].unsqueeze(2)))
    programs = tiles(length, int(plan.get("columns_n"))) * batch * kv_heads
    for tensors, loads in _parts(plan, needs, partials):
        want = Wanted(tensors, tuple(sorted({g.capture for g in loads})))
        left_out = {name for letter in "kv" if letter not in tensors for name in strided((f"D{letter.upper()}",))}
        left_out |= set() if loads else {f"G{i}" for i, _ in enumerate(partials)}
        launch(columns_kernel(plan, want, loads), programs, {a: x for a, x in arguments.items() if a not in left_out}, **_options(plan, "columns"))
    return dk, dv


def _parts(plan: Plan, needs: Needs, partials: tuple[LoadGradient, ...]) -> list[tuple[frozenset[str], tuple[LoadGradient, ...]]]:
    """Launches of the columns kernel: one, or two where both accumulators do not fit into registers."""
    both = frozenset(("k" if needs.k else "") + ("v" if needs.v else ""))
    if not plan.get("split") or not needs.v or not (needs.k or partials):
        return [(both, partials)]
    return [(frozenset("v"), ()), (both - {"v"}, partials)]


def _options(plan: Plan, kernel: str) -> dict[str, Any]:
    names = {"BLOCK_M": "m", "BLOCK_N": "n", "num_warps": "warps", "num_stages": "stages"}
    return {option: plan.get(f"{kernel}_{name}") for option, name in names.items()}


def _whole(plan: Plan, inputs: Inputs, result: Forward, grad_out: Tensor, needs: Needs, gradient: LoadGradient | None) -> Gradients:
    """Every gradient in one launch, where each (b, h) is one tile."""
    traits, q = traits_of(plan), inputs.q
    letters = "".join(name for name, wanted in (("q", needs.q), ("k", needs.k), ("v", needs.v)) if wanted)
    want = Wanted(frozenset(letters), (gradient.capture,) if gradient is not None else ())
    found = {name: empty_like_order(getattr(inputs, name), getattr(inputs, name).shape) for name in letters}
    tensors = {"Q": q, "K": inputs.k, "V": inputs.v, "DO": grad_out} | {f"D{name.upper()}": t for name, t in found.items()}
    arguments = tensor_arguments(tensors) | {"LSE": result.lse, **common_arguments(traits, inputs)}
    if traits.split_lse:
        arguments["LSE_LOW"] = result.extra[0]
    sums = _Sums(inputs, gradient, 1, _RESIDENT) if gradient is not None else None
    programs = sums.programs if sums is not None else q.shape[0] * q.shape[1]
    arguments |= sums.arguments() if sums is not None else {"B": q.shape[0], "CHUNKS": 1}
    launch(whole_kernel(plan, want, gradient), programs, arguments, **_options(plan, "whole"))
    captures: list[Tensor | None] = [torch.zeros_like(c) if n else None for c, n in zip(inputs.captures, needs.captures, strict=True)]
    if gradient is not None and sums is not None:
        captures[gradient.capture] = _gather(inputs, gradient.capture, [(gradient, sums.total(plan))], [])
    return Gradients(found.get("q"), found.get("k"), found.get("v"), tuple(captures))


class _Sums:
    """Where the gradient of a capture that is indexed by q and k goes: as (B or 1, H or 1, Lq, Lk), in chunks that ``fa2_sum`` adds up."""

    def __init__(self, inputs: Inputs, gradient: LoadGradient, tiles_each: Size, programs: int = _PROGRAMS) -> None:
        self.batch = inputs.q.shape[0]
        (batches, heads), self.chunks = _kept(inputs, gradient, tiles_each, programs)
        self.shape = (batches, heads, inputs.q.shape[2], inputs.k.shape[2])
        self.elements = self.shape[0] * self.shape[1] * self.shape[2] * self.shape[3]
        self.whole = {"b", "h"} <= set(gradient.letters)
        self.programs = tiles_each * batches * heads * self.chunks
        dtype = torch.float32 if gradient.axes is None else inputs.captures[gradient.capture].dtype
        self.out = torch.empty(self.shape, dtype=dtype, device=inputs.q.device)
        # flat, so that no shape holds the number of chunks and nothing asks whether it is 1
        self.parts = self.out if self.whole else torch.empty((self.chunks * self.elements,), dtype=torch.float32, device=inputs.q.device)

    def arguments(self) -> dict[str, Any]:
        return {"G0": self.parts, "B": self.batch, "CHUNKS": self.chunks}

    def total(self, plan: Plan) -> Tensor:
        if not self.whole:
            sizes = {"PARTS": self.parts, "OUT": self.out, "elements": self.elements, "CHUNKS": self.chunks}
            launch(sum_kernel(plan), tiles(self.elements, 1024), sizes, BLOCK=1024, num_warps=4, num_stages=1)
        return self.out


def _dense(plan: Plan, inputs: Inputs, shared: dict[str, Any], gradient: LoadGradient) -> Tensor:
    """Gradient indexed by q and k, as (B or 1, H or 1, Lq, Lk)."""
    options = _options(plan, "dense")
    sums = _Sums(inputs, gradient, tiles(inputs.q.shape[2], options["BLOCK_M"]) * tiles(inputs.k.shape[2], options["BLOCK_N"]))
    launch(dense_kernel(plan, gradient), sums.programs, shared | sums.arguments(), **options)
    return sums.total(plan)


def _is_table(plan: Plan, inputs: Inputs, gradient: LoadGradient) -> bool:
    """A small table that is read by position; its entries take atomic additions, in no fixed order."""
    by_position = gradient.table_dimension
    entries = inputs.captures[gradient.capture].shape[by_position] if by_position is not None else None
    return isinstance(entries, int) and entries <= _MOST_ENTRIES and not plan.deterministic


def _table(plan: Plan, inputs: Inputs, shared: dict[str, Any], gradient: LoadGradient) -> Tensor:
    """Gradient of a table, in fp32, without a (q, k) tensor in memory."""
    options = _options(plan, "dense")
    grid = tiles(inputs.q.shape[2], options["BLOCK_M"]) * tiles(inputs.k.shape[2], options["BLOCK_N"])
    (batches, heads), chunks = _kept(inputs, gradient, grid, _PROGRAMS)
    out = torch.zeros(inputs.captures[gradient.capture].shape, dtype=torch.float32, device=inputs.q.device)
    launch(dense_kernel(plan, gradient, True), grid * batches * heads * chunks, shared | {"G0": out, "B": inputs.q.shape[0], "CHUNKS": chunks}, **options)
    return out


def _kept(inputs: Inputs, gradient: LoadGradient, tiles_each: Size, programs: int) -> tuple[tuple[Size, Size], Size]:
    """Batches and heads with sums of their own, and the chunks that each sum over the others is split into, so that about so many programs run.

    May be symbolic.
    """
    batch, heads = inputs.q.shape[:2]
    by_batch, by_head = ("b" in gradient.letters), ("h" in gradient.letters)
    kept = (batch if by_batch else 1, heads if by_head else 1)
    if by_batch and by_head:
        return kept, 1
    wanted = torch.sym_max(1, programs // (tiles_each * kept[0] * kept[1]))
    return kept, torch.sym_min(wanted, (1 if by_batch else batch) * (1 if by_head else heads))


def _gather(inputs: Inputs, capture: int, sums: list[tuple[LoadGradient, Tensor]], tables: list[Tensor]) -> Tensor:
    """Add up what each load of a captured tensor contributes, in the tensor's own shape and dtype."""
    tensor = inputs.captures[capture]
    total = None
    for table in tables:
        total = table if total is None else total + table
    for gradient, partial in sums:
        missing = [d for d, letter in enumerate("bhqk") if letter not in gradient.letters]
        if gradient.axes is None:
            placed = _scatter(inputs, gradient, partial.sum(missing, keepdim=True) if missing else partial)
        else:
            placed = _place(tensor, gradient, partial.sum(missing) if missing else partial)
        total = placed if total is None else total + placed
    return torch.zeros_like(tensor) if total is None else total.to(tensor.dtype)


def _place(tensor: Tensor, gradient: LoadGradient, value: Tensor) -> Tensor:
    """Permute (b, h, q, k) order into the tensor's, at the constant indices that the load uses; zeros where it reads nothing."""
    assert gradient.axes is not None
    letters = [a for a in gradient.axes if isinstance(a, str)]
    value = value.permute([gradient.letters.index(a) for a in letters])
    for d, axis in enumerate(gradient.axes):
        if isinstance(axis, int):
            size = tensor.shape[d]
            value = value.unsqueeze(d)
            if not (isinstance(size, int) and size == 1):  # zeros at the indices that are never read
                after = value.ndim - 1 - d
                value = torch.constant_pad_nd(value, [0, 0] * after + [axis % size, size - 1 - axis % size])
        else:
            value = _lengthened(value, d, tensor.shape[d])
    return value


def _lengthened(value: Tensor, d: int, size: Size) -> Tensor:
    """Zeros behind dimension ``d`` up to ``size``: a tensor may be longer than what is read of it. Nothing asks whether a symbol is 0."""
    rest = size - value.shape[d]
    if (rest.node.expr if isinstance(rest, torch.SymInt) else rest) == 0:
        return value
    return torch.cat([value, value.new_zeros([rest if i == d else n for i, n in enumerate(value.shape)])], d)


def _scatter(inputs: Inputs, gradient: LoadGradient, value: Tensor) -> Tensor:
    """Add ``value``, of rank 4, at the entries that the load's index expressions name."""
    assert gradient.indices is not None
    q, tensor = inputs.q, inputs.captures[gradient.capture]
    box = Coordinates((0, q.shape[0]), (0, q.shape[1]), (0, q.shape[2]), (0, inputs.k.shape[2]))
    indices = evaluate(gradient.indices, box, captures=inputs.captures, sizes=inputs.sizes, device=q.device)
    zeros = torch.zeros(tensor.shape, dtype=value.dtype, device=q.device)
    return zeros.index_put([i.expand(value.shape) for i in indices], value, accumulate=True)
