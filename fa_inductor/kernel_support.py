"""What every kernel folder needs: a hash of its sources, and the layout of its output."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from .request import Size, TensorSpec

OutputLayout = Literal["bhld", "blhd"]


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Autocast off, on devices that have it."""
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


@cache
def source_hash(folder: str) -> str:
    """Short hash of the Python sources of a kernel folder: part of every plan, so that a changed kernel invalidates cached graphs."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def output_layout(q: TensorSpec) -> OutputLayout:
    """Order of the output's dimensions in memory: q's.

    Decided without a guard: with lengths first in memory ("blhd") both strides are products of head count and head size
    alone, which are fixed numbers; a stride that holds a symbolic length is that of heads outside lengths.
    """
    heads, lengths = q.stride[1], q.stride[2]
    return "blhd" if isinstance(heads, int) and isinstance(lengths, int) and 0 < heads < lengths else "bhld"


def empty_output(q: Tensor, head_size: Size, layout: str) -> Tensor:
    """An uninitialised (B, H, Lq, head_size) tensor in ``q``'s dtype with dimensions in memory as ``layout`` says."""
    batch, heads, length, _ = q.shape
    if layout == "blhd":
        return torch.empty((batch, length, heads, head_size), dtype=q.dtype, device=q.device).transpose(1, 2)
    return torch.empty((batch, heads, length, head_size), dtype=q.dtype, device=q.device)
