"""What a rewrite must know about the whole graph: order, aliasing writes, grad mode, which values need gradients, sizes."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from .index import Expr, as_expr
from .normalize.aliases import storage_keys, writes
from .patterns.generators import reads
from .patterns.views import name_of
from .sizes import definition
from .stored import Stored, StoredMask

if TYPE_CHECKING:
    from .band import Band
    from .refusal import Refused


class GraphContext:
    """Facts about one normalised graph, computed once; ``size_node`` may add nodes.

    ``outside``: for the body of a checkpoint, the storages that the graph around it writes to, before or after it runs. ``stored``: inputs
    whose content is known.
    """

    def __init__(self, gm: fx.GraphModule, grad_enabled: bool, outside: frozenset[int] | None = None, stored: Stored | None = None) -> None:
        self.stored = stored or Stored()
        self.gm = gm
        self.graph = gm.graph
        self.order: dict[fx.Node, int] = {}
        self.grad_mode: dict[fx.Node, bool] = {}
        self.needs_grad: set[fx.Node] = set()
        self.bands: list[Band] = []
        """What ``band`` has proved of softmaxes of this graph."""
        self.no_bands: dict[object, Refused] = {}
        """Refusals by the place in the code and the shapes: what cannot be proved of one layer is not tried again for the next."""
        self.writes: list[fx.Node] = []
        self._size_nodes: dict[Expr, Any] = {}
        self.recomputed = outside is not None and grad_enabled
        self.outside = outside or frozenset()
        self._scan(grad_enabled)
        self.written = frozenset(s for w in self.writes for t in writes(w) for s in storage_keys(t))

    # -- facts -----------------------------------------------------------------------------------------------------------
    def stored_mask(self, node: fx.Node) -> StoredMask | None:
        """What ``node``, a buffer that the graph does not write to, holds."""
        found = self.stored.mask(node)
        return None if found is None or self.is_written(node) or storage_keys(node) & self.outside else found

    def is_written(self, node: fx.Node) -> bool:
        """Does some op of the graph write to the storage of ``node``?"""
        return any(s in self.written for s in storage_keys(node))

    def is_written_after(self, node: fx.Node, position: int) -> bool:
        return bool(storage_keys(node) & self.outside) or self.written_between({node}, position, len(self.order)) is not None

    def copies_and_changes(self, node: fx.Node, below: fx.Node) -> bool:
        """``node`` is a copy of ``below`` (not a view of it) that is written to: it does not hold what ``below`` holds."""
        return self.is_written(node) and not storage_keys(node) & storage_keys(below)

    def first_read(self, node: fx.Node, within: set[fx.Node], last: int) -> int:
        """Position of the first op of ``within`` that reads ``node``, directly or through views of it; ``last`` if there is none."""
        first, queue, seen = last, [node], {node}
        while queue:
            for user in queue.pop().users:
                if user in seen or user not in within or user not in self.order:
                    continue
                seen.add(user)
                if storage_keys(user) & storage_keys(node):
                    queue.append(user)
                else:
                    first = min(first, self.order[user])
        return first

    def written_between(self, nodes: set[fx.Node], first: int, last: int) -> fx.Node | None:
        """A node at a position in (first, last) that writes to storage which one of ``nodes`` shares."""
        storages = {s for n in nodes for s in storage_keys(n)}
        for write in self.writes:
            if first < self.order[write] < last and any(s in storages for t in writes(write) for s in storage_keys(t)):
                return write
        return None

    def gradient_reaches(self, start: fx.Node, end: fx.Node) -> bool:
        """Does eager's gradient of ``end`` reach ``start``? Through a comparison none does: that is None, not zeros."""
        seen, queue = {start}, [start]
        while queue:
            node = queue.pop()
            if node is end:
                return node in self.needs_grad
            found = [u for u in node.users if u in self.needs_grad and u not in seen and self.order.get(u, -1) <= self.order[end]]
            seen.update(found)
            queue += found
        return False

    def _scan(self, grad_enabled: bool) -> None:
        mode = grad_enabled
        for position, node in enumerate(self.graph.nodes):
            self.order[node] = position
            if node.target is torch._C._set_grad_enabled:
                mode = bool(node.args[0])
            self.grad_mode[node] = mode
            if self._wants_grad(node, mode, grad_enabled):
                self.needs_grad.add(node)
            if writes(node):
                self.writes.append(node)
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, torch.SymInt):
                self._size_nodes.setdefault(value.node.expr, node)
                self._size_nodes.setdefault(as_expr(value), node)

    def _wants_grad(self, node: fx.Node, mode: bool, grad_enabled: bool) -> bool:
        value = node.meta.get("val")
        if node.op in ("placeholder", "get_attr"):
            example = node.meta.get("example_value", value)
            return grad_enabled and isinstance(example, torch.Tensor) and example.requires_grad
        if not mode or name_of(node) == "detach":
            return False
        if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point:
            return False
        return any(n in self.needs_grad for n in reads(node))

    # -- sizes ---------------------------------------------------------------------------------------------------------
    def size_node(self, expr: Expr, before: fx.Node) -> Any:
        """``expr`` as a literal int or as a node that is computed before ``before``."""
        expr = sympy.expand(expr)
        if expr.is_Integer:
            return int(expr)
        known = self._size_nodes.get(expr)
        if known is not None:
            return known
        if isinstance(expr, sympy.Symbol):
            quotient = definition(expr)
            return self._read_size(expr) if quotient is None else self.size_node(quotient, before)
        with self.graph.inserting_before(before):
            return self._arithmetic(expr, before)

    def _read_size(self, symbol: Expr) -> fx.Node:
        """A size symbol from the shape of the first placeholder that has it."""
        last = None
        for node in self.graph.nodes:
            if node.op != "placeholder":
                break
            last = node
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if node.op != "placeholder" or not isinstance(value, torch.Tensor):
                continue
            for dim, size in enumerate(value.shape):
                if as_expr(size) == symbol or (isinstance(size, torch.SymInt) and size.node.expr == symbol):
                    assert last is not None
                    with self.graph.inserting_after(last):
                        read = self.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                    read.meta["val"] = size
                    self._size_nodes[symbol] = read
                    return read
        raise KeyError(f"no input of the graph carries the size {symbol}")

    def _arithmetic(self, expr: Expr, before: fx.Node) -> Any:
        operands = [self.size_node(a, before) for a in expr.args]
        if expr.is_Add or expr.is_Mul:
            function = operator.add if expr.is_Add else operator.mul
        elif type(expr).__name__ == "FloorDiv":
            function = operator.floordiv
        elif type(expr).__name__ in ("Mod", "PythonMod"):
            function = operator.mod
        elif expr.is_Pow and expr.args[1].is_Integer and expr.args[1] > 0:
            function, operands = operator.mul, [operands[0]] * int(expr.args[1])
        else:
            raise KeyError(f"cannot compute the size {expr} in the graph")
        result = operands[0]
        for operand in operands[1:]:
            with self.graph.inserting_before(before):
                node = self.graph.call_function(function, (result, operand))
            node.meta["val"] = function(*(x.meta["val"] if isinstance(x, fx.Node) else x for x in (result, operand)))
            result = node
        return result
