"""The kernels by name, imported when first used (Triton is only needed by the kernel that is written in it)."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import cast

from .request import Kernel

ORDER = {"cpu": ("torch_sdpa", "tiled"), "cuda": ("torch_sdpa", "triton_fa2", "tiled")}
"""Which kernels are asked, by device type, in order of preference; other devices ask ``tiled``."""
CHOICES = ("torch_sdpa", "triton_fa2", "tiled")
"""What the option ``kernel`` may name."""
NAMES = (*CHOICES, "reference")


@cache
def kernel_named(name: str) -> Kernel:
    if name not in NAMES:
        raise ValueError(f"no kernel is called {name!r}; there are {', '.join(NAMES)}")
    return cast(Kernel, import_module(f"fa_inductor.kernels.{name}").KERNEL)


def kernels_for(device: str, forced: str | None) -> tuple[Kernel, ...]:
    """Kernels to ask, best first; ``forced`` leaves only that one."""
    names = (forced,) if forced else ORDER.get(device, ("tiled",))
    return tuple(kernel_named(n) for n in names)
