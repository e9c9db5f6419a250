"""Grad mode and autocast as they are around a trace: reading, setting and restoring them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Ambient = tuple[bool, tuple[tuple[str, bool, torch.dtype], ...]]
"""Grad mode and, per device type, whether autocast is on and to which dtype."""

_AUTOCAST_DEVICES = ("cpu", "cuda")


def ambient() -> Ambient:
    autocast = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES)
    return torch.is_grad_enabled(), autocast


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
