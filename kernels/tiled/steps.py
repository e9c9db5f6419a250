"""A score program as steps on a block of scores, writing over a block whose value is not needed again.

The program is split in three: nodes that read neither the score nor the gradient are evaluated at their own broadcast shape
(``evaluate``); the others run in place on full blocks. ``scale * score + bias`` at the head of the program is left to the matrix
product (``baddbmm`` with alpha and beta), and a factor at the end of ``dscore`` to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fa_inductor.program import Coordinates, Node, ScoreProgram, dependencies, evaluate, pruned

Buffer = Callable[[str], Tensor]
"""A block by name, of the scores' shape, whose contents may be written over in the next block."""


class Steps:
    """``program`` has results ``(y, dscore, …)`` or just ``(y,)``; see ``begin`` and ``finish``."""

    def __init__(self, program: ScoreProgram) -> None:
        self.nodes = program.nodes
        self.results = list(program.results)
        self.depends = dependencies(program.nodes)
        self.uses = self._count_uses()
        self.scale, self.bias, self.head = self._head()
        self.dscore_scale = self._fold_dscore_scale()
        live = self._live()
        self.first = [i for i in live if "grad" not in self.depends[i]]
        self.second = [i for i in live if "grad" in self.depends[i]]
        self.last_use = self._last_use()
        outside = {a for i in live for a in self.nodes[i].args} | set(self.results)
        self.bias_split = False
        if self.bias is not None:
            node = self.nodes[self.bias]
            self.bias_split = node.op in ("add", "sub", "mul", "div") and self.bias not in outside
            outside |= set(node.args) if self.bias_split else {self.bias}
        free = [i for i in sorted(outside) if self._is_free(i)]
        self.constants = {i: torch.tensor(self.nodes[i].value) for i in free if self.nodes[i].op == "const"}
        self.broadcast = [i for i in free if i not in self.constants]
        self.broadcast_program = pruned(program, *self.broadcast) if self.broadcast else None

    @property
    def y_is_free(self) -> bool:
        """The block of y may be written over once the probabilities are made from it."""
        return self._is_block(self.results[0]) and self.last_use.get(self.results[0], -1) < 0 and self.results.count(self.results[0]) == 1

    def before(self, box: Coordinates, captures: Sequence[Tensor], sizes: Sequence[int], device: torch.device, keep: Tensor | None = None) -> dict[int, Tensor]:
        """Values of the nodes that do not depend on the score."""
        values = {i: c.to(device) for i, c in self.constants.items()}
        if self.broadcast_program is not None:
            found = evaluate(self.broadcast_program, box, keep=keep, captures=captures, sizes=sizes, device=device)
            values.update(zip(self.broadcast, found, strict=True))
        return values

    def write_bias(self, values: dict[int, Tensor], out: Tensor) -> None:
        """The bias, broadcast into ``out``; its last operation writes there, since it is often the one that makes it large (ALiBi)."""
        assert self.bias is not None
        args = [values[a] for a in self.nodes[self.bias].args] if self.bias_split else []
        if args and torch.broadcast_shapes(*(a.shape for a in args)) == out.shape:
            _apply(self.nodes[self.bias], args, out)
        else:
            out.copy_(_apply(self.nodes[self.bias], args, None) if args else values[self.bias])

    def begin(self, values: dict[int, Tensor], score: Tensor, buffer: Buffer) -> Tensor:
        """y for a block that holds ``scale * score + bias``; may write over it."""
        values[self.head] = score
        self._run(self.first, values, buffer)
        return values[self.results[0]]

    def finish(self, values: dict[int, Tensor], grad: Tensor, buffer: Buffer) -> list[Tensor]:
        """All results for the incoming gradient; may write over it. The second one is ``dscore / dscore_scale``."""
        for i, node in enumerate(self.nodes):
            if node.op == "grad":
                values[i] = grad
        self._run(self.second, values, buffer)
        return [values.get(r, grad) for r in self.results]

    # -- analysis ------------------------------------------------------------------------------------------------------
    def _count_uses(self) -> list[int]:
        uses = [0] * len(self.nodes)
        for node in self.nodes:
            for a in node.args:
                uses[a] += 1
        for r in self.results:
            uses[r] += 1
        return uses

    def _is_free(self, i: int) -> bool:
        return not self.depends[i] & {"score", "grad"}

    def _is_block(self, i: int) -> bool:
        return not self._is_free(i)

    def _only_user(self, i: int) -> int | None:
        users = [j for j, n in enumerate(self.nodes) if i in n.args]
        return users[0] if len(users) == 1 and self.uses[i] == 1 else None

    def _head(self) -> tuple[float, int | None, int]:
        """(scale, bias node, node that the matrix product computes)."""
        scores = [i for i, n in enumerate(self.nodes) if n.op == "score"]
        if not scores:
            return 1.0, None, -1
        head, scale = scores[0], 1.0
        user = self._only_user(head)
        if user is not None and self.nodes[user].op in ("mul", "div"):
            x, y = self.nodes[user].args
            other = self.nodes[y] if x == head else self.nodes[x]
            if other.op == "const" and (self.nodes[user].op == "mul" or (x == head and other.value)):
                value = float(other.value)  # type: ignore[arg-type]
                head, scale = user, value if self.nodes[user].op == "mul" else 1 / value
                user = self._only_user(head)
        if user is not None and self.nodes[user].op == "add":
            x, y = self.nodes[user].args
            bias = y if x == head else x
            if self._is_free(bias):
                return scale, bias, user
        return scale, None, head

    def _fold_dscore_scale(self) -> float:
        """Take a constant factor off dscore."""
        if len(self.results) < 2:
            return 1.0
        node = self.nodes[self.results[1]]
        if node.op == "mul" and self.uses[self.results[1]] == 1:
            x, y = node.args
            constant = self.nodes[y]
            if constant.op == "const" and self._is_block(x):
                self.results[1] = x
                return float(constant.value)  # type: ignore[arg-type]
        return 1.0

    def _live(self) -> list[int]:
        """Block nodes to compute, in order: those that the results need, down to the head and the gradient leaf."""
        live: set[int] = set()
        stack = [r for r in self.results if self._is_block(r)]
        while stack:
            i = stack.pop()
            if i in live or i == self.head or self.nodes[i].op in ("grad", "score"):
                continue
            live.add(i)
            stack += [a for a in self.nodes[i].args if self._is_block(a)]
        return sorted(live)

    def _last_use(self) -> dict[int, int]:
        """Position (in first, then second, counted from 0 at the start of ``second``) of the last step that reads each node."""
        last: dict[int, int] = {}
        for position, i in enumerate(self.first):
            for a in self.nodes[i].args:
                last[a] = position - len(self.first)
        for position, i in enumerate(self.second):
            for a in self.nodes[i].args:
                last[a] = position
        return last

    def _run(self, steps: list[int], values: dict[int, Tensor], buffer: Buffer) -> None:
        start = -len(steps) if steps is self.first else 0
        for position, i in enumerate(steps, start):
            node = self.nodes[i]
            args = [values[a] for a in node.args]
            target = None
            for a, value in zip(node.args, args, strict=True):
                if self._is_block(a) and self.last_use[a] == position and a not in self.results and node.type == self.nodes[a].type == "float":
                    target = value
            if target is None and node.type == "float":
                target = buffer(f"step {i}")  # all float steps are of the block's shape
            values[i] = _apply(node, args, target)


def _apply(node: Node, args: list[Tensor], out: Tensor | None) -> Tensor:
    """One operation, into ``out`` where given (a block of the result's shape and type that is read for the last time)."""
    if node.op == "floordiv":
        return torch.div(*args, rounding_mode="floor")
    if node.op.startswith("to_"):
        return args[0].to({"to_float": torch.float32, "to_int": torch.int64, "to_bool": torch.bool}[node.op])
    function = _FUNCTIONS[node.op]
    return function(*args) if out is None else function(*args, out=out)


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "min": torch.minimum,
    "max": torch.maximum,
    "mod": torch.remainder,
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sqrt": torch.sqrt,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
    "where": torch.where,
}
