"""The transpose of ``load``: adding what a gradient program yields for its loads into the captured tensors' gradients.

``grad capture[index(b, h, q, k)] += dload(b, h, q, k)`` for all (b, h, q, k) of a box. Plain broadcast loads are reduced by
sums over the axes they do not read; loads by index expression are accumulated element by element, after summing over the
axes on which no index depends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .derivative import differentiate
from .evaluate import Coordinates, load_axes
from .ir import ScoreProgram

_NAMES = ("b", "h", "q", "k")


@dataclass(frozen=True)
class LoadSite:
    """One load whose gradient is wanted. ``axes``: as ``load_axes``; ``indices``: result positions of its index nodes if that is None."""

    capture: int
    axes: tuple[str | int, ...] | None
    indices: tuple[int, ...] = ()


@dataclass(frozen=True)
class GradientProgram:
    """``program`` has results ``(y, dscore, dload per site…, index values of the sites read by expression…)``."""

    program: ScoreProgram
    sites: tuple[LoadSite, ...]


def gradient_program(program: ScoreProgram, wanted: Collection[int] = ()) -> GradientProgram:
    """``differentiate`` with the index values needed to scatter the gradients of loads by index expression."""
    derivative, loads = differentiate(program, wanted)
    results = list(derivative.results)
    sites = []
    for capture, node in loads:
        axes = load_axes(derivative, derivative.nodes[node])
        indices: tuple[int, ...] = ()
        if axes is None:
            args = derivative.nodes[node].args
            indices = tuple(range(len(results), len(results) + len(args)))
            results += args
        sites.append(LoadSite(capture, axes, indices))
    return GradientProgram(ScoreProgram(derivative.nodes, tuple(results), derivative.captures, derivative.n_sizes), tuple(sites))


def scatter_loads(gradient: GradientProgram, values: Sequence[Tensor], coordinates: Coordinates, targets: Sequence[Tensor | None]) -> None:
    """Add the gradients in ``values`` (the evaluated results of ``gradient.program``) to ``targets``, one per capture, contiguous."""
    box = tuple(stop - start for start, stop in (coordinates.range(n) for n in _NAMES))
    for i, site in enumerate(gradient.sites):
        target = targets[site.capture]
        if target is None:
            continue
        dload = values[2 + i].to(target.dtype).expand(box)
        if site.axes is None:
            _scatter_indexed(target, dload, [values[p] for p in site.indices])
        else:
            _scatter_plain(target, dload, site.axes, coordinates)


def _scatter_plain(target: Tensor, dload: Tensor, axes: tuple[str | int, ...], coordinates: Coordinates) -> None:
    present = [a for a in axes if isinstance(a, str)]
    missing = [i for i, n in enumerate(_NAMES) if n not in present]
    total = dload.sum(missing) if missing else dload
    order = [n for n in _NAMES if n in present]
    view = target[tuple(a if isinstance(a, int) else slice(*coordinates.range(a)) for a in axes)]
    view.add_(total.permute([order.index(n) for n in present]))


def _scatter_indexed(target: Tensor, dload: Tensor, indices: list[Tensor]) -> None:
    indices = [i if i.dim() else i.reshape(1, 1, 1, 1) for i in indices]  # a constant may come as a scalar
    unread = [d for d in range(4) if all(i.shape[d] == 1 for i in indices)]
    total = dload.sum(unread, keepdim=True) if unread else dload
    if target.device.type != "cpu":
        target.index_put_(tuple(i.expand(total.shape) for i in indices), total, accumulate=True)
        return
    # index_put_ on the CPU adds with atomics from all threads: slow where few entries take all sums, and in no fixed order
    place = torch.zeros((1, 1, 1, 1), dtype=torch.int64)
    for index, size, stride in zip(indices, target.shape, target.stride(), strict=True):
        place = place + torch.remainder(index, size) * stride  # negative indices count from the end, as in a load
    target.view(-1).scatter_add_(0, place.expand(total.shape).reshape(-1), total.reshape(-1))
