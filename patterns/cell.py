"""One element of a pointwise node, as the rules for elementwise ops see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from fa_inductor.program import ProgramBuilder
from fa_inductor.program.ir import Type

from .views import argument


@dataclass(frozen=True)
class Cell:
    """One element of a pointwise node: ``read(x)`` is the program value of argument ``x`` (node or literal) there."""

    builder: ProgramBuilder
    node: fx.Node
    read: Callable[[object], int]

    def arg(self, position: int, name: str = "", default: object = None) -> object:
        return argument(self.node, position, name, default)

    def typed(self, position: int, kind: Type, name: str = "", default: object = None) -> int:
        return self.builder.convert(self.read(self.arg(position, name, default)), kind)

    @property
    def kind(self) -> Type:
        return kind_of(self.node.meta["val"].dtype)


def kind_of(dtype: torch.dtype) -> Type:
    return "bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "int"


Rule = Callable[[Cell], "int | None"]


def rounded(value: float, dtype: torch.dtype) -> float:
    """A literal as a tensor of ``dtype`` holds it: -1e9 is -inf in float16."""
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))
