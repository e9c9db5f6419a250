"""An attention site: what lifting proves about one softmax between two contractions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import fx

from .index import Expr
from .patterns.softmax import Softmax
from .program import ScoreProgram


@dataclass(frozen=True)
class Axes:
    """Extents of the canonical dimensions."""

    b: Expr
    hq: Expr
    hkv: Expr
    q: Expr
    k: Expr
    d: Expr
    dv: Expr


@dataclass(frozen=True)
class Atom:
    """One factor of a tensor dimension: canonical dimension (b, h, q, k, d), its expression and its extent.

    Atoms of one canonical dimension are ordered from the slowest varying; ``dimension`` is the tensor's dimension it is in.
    """

    axis: Literal["b", "h", "q", "k", "d"]
    expr: Expr
    extent: Expr


@dataclass(frozen=True)
class View4:
    """A tensor that is a reshape/permute of a canonical 4-D operand: for each dimension its atoms, slowest first.

    ``windows``: (dimension, start, length) where the operand is a slice of the tensor.
    """

    node: fx.Node
    dimensions: tuple[tuple[Atom, ...], ...]
    windows: tuple[tuple[int, Expr, Expr], ...] = ()


@dataclass(frozen=True)
class Captured:
    """A tensor (or symbolic float) that the program reads; ``split`` gives each dimension's parts where some are read apart.

    ``dtype``: a narrower integer format that holds all its values. ``order``: of the dimensions (after ``split``) in a copy that the kernel reads.
    """

    node: fx.Node
    split: tuple[tuple[Expr, ...], ...] | None = None
    dtype: str | None = None
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Column:
    """Scores that each row's normaliser sums besides those of the keys (attention sinks): ``program(b, h, q, k)``, no score, k < ``length``."""

    program: ScoreProgram
    captures: tuple[Captured, ...]
    size_symbols: tuple[Expr, ...]
    length: Expr


@dataclass(frozen=True)
class AttentionSite:
    """``output = dropout(softmax(program(Q K^T)) * post) V``; Q, K, V and the output in canonical (B, H, L, D) form.

    With ``columns`` the softmax runs over these scores too, though no value belongs to them.

    ``dtype`` is that of the fused call: what both products compute in. ``region`` holds the nodes the fused call replaces.
    """

    anchor: Softmax
    output: View4
    q: View4
    k: View4
    v: View4
    axes: Axes
    program: ScoreProgram
    post: ScoreProgram | None
    captures: tuple[Captured, ...]
    size_symbols: tuple[Expr, ...]
    dropout_p: float
    dtype: object
    region: frozenset[fx.Node]
    escapes: bool
    """The probabilities are used elsewhere too: the original nodes stay for those users."""
    columns: tuple[Column, ...] = ()
    cleaned: bool = False
    """A row of NaN is 0 after the softmax."""
    zeroed: tuple[ScoreProgram, ...] = ()
    """Conditions under which a probability is replaced by 0, also one of NaN; elsewhere ``post`` multiplies it."""
    joined: tuple[Piece, ...] = ()
    """With these the softmax runs over the keys of several products: this site is that of the first piece."""
    beside: tuple[AttentionSite, ...] = ()
    """The other products that take the same probabilities: attentions of their own, where nothing else takes them."""

    @property
    def random(self) -> bool:
        """The call draws from a seed."""
        return self.dropout_p > 0 or self.program.drop_p is not None

    @property
    def reads(self) -> list[fx.Node]:
        """The nodes that a fused call and what is around it read."""
        return [self.q.node, self.k.node, self.v.node, *(c.node for c in (*self.captures, *(c for column in self.columns for c in column.captures)))]

    @property
    def outputs(self) -> set[fx.Node]:
        return {p.site.output.node for p in self.joined} or {s.output.node for s in (self, *self.beside)}


@dataclass(frozen=True)
class Piece:
    """A part of the keys of a softmax as an attention of its own; ``rows``: the tensor of the softmax's rows in terms of the site's b, h and q."""

    site: AttentionSite
    rows: View4
