"""Arguments and launches, the same eagerly, under AOTAutograd's tracing and in Triton's interpreter.

Lengths may be symbolic: nothing here branches on one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fa_inductor.request import Inputs, Size

from .text import indirect
from .traits import Traits


def tensor_arguments(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Each tensor and its strides, under the names that ``text.strided`` declares."""
    out: dict[str, Any] = {}
    for name, tensor in tensors.items():
        out[name] = tensor
        for d, stride in enumerate(tensor.stride()):
            out[f"{name}_s{d}"] = stride
    return out


def common_arguments(traits: Traits, inputs: Inputs) -> dict[str, Any]:
    """Captured tensors, sizes, dropout state and lengths."""
    out: dict[str, Any] = {}
    lengths = indirect(traits)
    for c in traits.captures:
        capture = inputs.captures[c]
        out |= tensor_arguments({f"C{c}": capture})
        if c in lengths:
            out |= {f"C{c}_n{d}": n for d, n in enumerate(capture.shape)}
    out |= {f"Z{i}": inputs.sizes[i] for i in traits.sizes}
    if traits.random:
        out["SEED"] = inputs.seed
    if traits.dropout:
        out["dropout_p"] = inputs.dropout_p
    return out | {"H": inputs.q.shape[1], "Lq": inputs.q.shape[2], "Lk": inputs.k.shape[2]}


def launch(kernel: Any, programs: Size, arguments: Mapping[str, Any], **options: Any) -> None:
    """Run ``programs`` instances of a kernel."""
    from torch.library import wrap_triton

    wrap_triton(kernel)[(programs,)](**arguments, **options)


def tiles(length: Size, size: int) -> Size:
    return (length + size - 1) // size


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest in memory, decided without a guard: unknown comparisons keep the given order."""
    order: list[int] = []
    for d in range(tensor.ndim):
        place = len(order)
        while place and _surely_less(tensor.stride(order[place - 1]), tensor.stride(d)):
            place -= 1
        order.insert(place, d)
    return tuple(order)


def _surely_less(a: Size, b: Size) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return 0 < a < b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a < b)


def empty_like_order(tensor: Tensor, shape: Sequence[Size], dtype: torch.dtype | None = None) -> Tensor:
    """A dense tensor of ``shape`` whose dimensions lie in memory in ``tensor``'s order."""
    order = memory_order(tensor)
    dense = torch.empty([shape[d] for d in order], dtype=dtype or tensor.dtype, device=tensor.device)
    return dense.permute([order.index(d) for d in range(len(order))])
