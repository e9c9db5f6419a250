"""Eager evaluation of a score program on tensors: the oracle of every other form of the program, and the tiled kernel's body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .ir import Node, ScoreProgram

_DIMENSION = {"b": 0, "h": 1, "q": 2, "k": 3}


@dataclass(frozen=True)
class Coordinates:
    """A box of the (B, H, Lq, Lk) score tensor: half-open ranges of b, h, q and k."""

    b: tuple[int, int]
    h: tuple[int, int]
    q: tuple[int, int]
    k: tuple[int, int]

    def range(self, name: str) -> tuple[int, int]:
        return {"b": self.b, "h": self.h, "q": self.q, "k": self.k}[name]

    def tensor(self, name: str, device: torch.device) -> Tensor:
        """int64 indices, shaped to broadcast over (B, H, Lq, Lk)."""
        start, stop = self.range(name)
        shape = [1, 1, 1, 1]
        shape[_DIMENSION[name]] = stop - start
        return torch.arange(start, stop, device=device).view(shape)


def evaluate(
    program: ScoreProgram,
    coordinates: Coordinates,
    *,
    score: Tensor | None = None,
    grad: Tensor | None = None,
    keep: Tensor | None = None,
    captures: Sequence[Tensor] = (),
    sizes: Sequence[int] = (),
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Results of ``program`` on a box of the score tensor.

    Args:
        score, grad: (B, H, Lq, Lk) blocks for the leaves of that name, in ``dtype``.
        keep: the same block of the mask that the program draws.
        captures, sizes: what ``load`` and ``size`` nodes read.
        dtype: precision of float arithmetic (float32, or float64 for the oracle).
    Returns:
        one tensor per result, of a shape that broadcasts against (B, H, Lq, Lk): a result that does not depend on ``q``
        has size 1 there.
    """
    values: list[Tensor] = []
    for node in program.nodes:
        args = [values[a] for a in node.args]
        if node.op == "score":
            assert score is not None, "this program reads the score"
            values.append(score)
        elif node.op == "grad":
            assert grad is not None, "this program reads the incoming gradient"
            values.append(grad)
        elif node.op == "keep":
            assert keep is not None, "this program draws a mask"
            values.append(keep)
        elif node.op == "const":
            values.append(torch.full((1, 1, 1, 1), node.value, device=device, dtype=_torch_dtype(node, dtype)))  # type: ignore[arg-type]
        elif node.op == "index":
            values.append(coordinates.tensor(str(node.value), device))
        elif node.op == "size":
            values.append(torch.full((1, 1, 1, 1), sizes[int(node.value)], device=device, dtype=torch.int64))  # type: ignore[arg-type]
        elif node.op == "load":
            values.append(_load(program, node, captures[int(node.value)], args, coordinates, dtype))  # type: ignore[arg-type]
        else:
            values.append(_OPERATIONS[node.op](node, dtype, *args))
    return [values[r] for r in program.results]


def _torch_dtype(node: Node, dtype: torch.dtype) -> torch.dtype:
    return {"float": dtype, "int": torch.int64, "bool": torch.bool}[node.type]


def _load(program: ScoreProgram, node: Node, tensor: Tensor, args: list[Tensor], coordinates: Coordinates, dtype: torch.dtype) -> Tensor:
    names = load_axes(program, node)
    value = tensor[tuple(args)] if names is None else _slice(tensor, names, coordinates)
    return value.to(_torch_dtype(node, dtype))


def load_axes(program: ScoreProgram, node: Node) -> tuple[str | int, ...] | None:
    """How a ``load`` reads each dimension if it does so plainly: an index name (each at most once) or a constant; else None."""
    axes: list[str | int] = []
    for a in node.args:
        index = program.nodes[a]
        if index.op == "const" and isinstance(index.value, int):
            axes.append(index.value)
        elif index.op == "index" and index.value not in axes:
            axes.append(str(index.value))
        else:
            return None
    return tuple(axes)


def _slice(tensor: Tensor, axes: tuple[str | int, ...], coordinates: Coordinates) -> Tensor:
    """A broadcastable (b, h, q, k) view of ``tensor`` by slicing alone: no gather, no copy."""
    view = tensor[tuple(a if isinstance(a, int) else slice(*coordinates.range(a)) for a in axes)]
    present = [a for a in axes if isinstance(a, str)]
    view = view.permute([present.index(name) for name in _DIMENSION if name in present])
    for position, name in enumerate(_DIMENSION):
        if name not in present:
            view = view.unsqueeze(position)
    return view


def _arithmetic(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda node, dtype, *args: function(*args)


def _round(node: Node, dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.to({"f16": torch.float16, "bf16": torch.bfloat16}[str(node.value)]).to(dtype)


_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "add": _arithmetic(torch.add),
    "sub": _arithmetic(torch.sub),
    "mul": _arithmetic(torch.mul),
    "div": _arithmetic(torch.div),
    "floordiv": _arithmetic(lambda x, y: torch.div(x, y, rounding_mode="floor")),
    "mod": _arithmetic(torch.remainder),
    "min": _arithmetic(torch.minimum),
    "max": _arithmetic(torch.maximum),
    "neg": _arithmetic(torch.neg),
    "abs": _arithmetic(torch.abs),
    "exp": _arithmetic(torch.exp),
    "log": _arithmetic(torch.log),
    "exp2": _arithmetic(torch.exp2),
    "expm1": _arithmetic(torch.expm1),
    "log1p": _arithmetic(torch.log1p),
    "erf": _arithmetic(torch.erf),
    "sin": _arithmetic(torch.sin),
    "cos": _arithmetic(torch.cos),
    "tanh": _arithmetic(torch.tanh),
    "sigmoid": _arithmetic(torch.sigmoid),
    "sqrt": _arithmetic(torch.sqrt),
    "lt": _arithmetic(torch.lt),
    "le": _arithmetic(torch.le),
    "gt": _arithmetic(torch.gt),
    "ge": _arithmetic(torch.ge),
    "eq": _arithmetic(torch.eq),
    "ne": _arithmetic(torch.ne),
    "and": _arithmetic(torch.logical_and),
    "or": _arithmetic(torch.logical_or),
    "not": _arithmetic(torch.logical_not),
    "where": _arithmetic(torch.where),
    "round": _round,
    "to_float": lambda node, dtype, x: x.to(dtype),
    "to_int": lambda node, dtype, x: x.to(torch.int64),
    "to_bool": lambda node, dtype, x: x.to(torch.bool),
}
