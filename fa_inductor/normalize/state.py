"""Grad mode and autocast as they are around a trace: reading, setting and restoring them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx

Ambient = tuple[bool, tuple[tuple[str, bool, torch.dtype], ...]]
"""Grad mode and, per device type, whether autocast is on and to which dtype."""

_AUTOCAST_DEVICES = ("cpu", "cuda")


def ambient() -> Ambient:
    autocast = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES)
    return torch.is_grad_enabled(), autocast


def autocast_at_nodes(graph: fx.Graph) -> dict[fx.Node, Ambient]:
    """Without gradient, the autocast at each node: the present one where the graph begins, and what its switches make of it."""
    state = ambient()[1]
    outside: list[tuple[tuple[str, bool, torch.dtype], ...]] = []
    found: dict[fx.Node, Ambient] = {}
    for node in graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            outside.append(state)
            device, dtype, enabled, _ = node.args
            state = tuple((d, bool(enabled), dtype or t) if d == device else (d, on, t) for d, on, t in state)
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            state = outside.pop()
        found[node] = (False, state)
    return found


@contextmanager
def restored(state: Ambient | None = None) -> Iterator[None]:
    """Run under ``state`` (default: as it is now); afterwards grad mode and autocast are what they were before, whatever happened."""
    before = ambient()
    _set_ambient(state or before)
    try:
        yield
    finally:
        _set_ambient(before)


def _set_ambient(state: Ambient) -> None:
    grad, autocast = state
    torch._C._set_grad_enabled(grad)
    for device, enabled, dtype in autocast:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
