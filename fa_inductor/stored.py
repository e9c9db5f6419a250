"""Masks that a model keeps in a buffer: read where the graph is compiled, replaced by arithmetic on positions, and guarded.

A matrix that is a band holds one value where ``low <= column - row <= high`` and another elsewhere: the triangle that GPT-2's code stores, a
window, a constant. Its element is then known without reading it, so that the mask is causal and not just a tensor. The compiled graph is used
as long as each such input is a tensor that was seen to hold this band and has not been written to since (``Tensor._version``); a
tensor not seen before is looked at. Otherwise Dynamo compiles anew, and a buffer that was changed is then read in every call. What writes
behind the version counter (``tensor.data``, raw pointers) is not noticed: ``options={"read_buffers": False}``.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from . import log
from .index import Expr
from .program import ProgramBuilder

_MOST_ELEMENTS = 1 << 28
_MOST_COMPILATIONS = 4
_CHUNK = 1 << 24
"""Elements that are compared at a time."""


State = tuple[int, int]


def state_of(tensor: Tensor) -> State:
    """Address and version: what a write that PyTorch knows of changes."""
    return (tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version)


class Reader(Protocol):
    """What turns index expressions into program values: the lifter."""

    builder: ProgramBuilder

    def size(self, expr: Expr) -> int: ...


@dataclass(frozen=True, eq=False)
class StoredMask:
    """``inside`` where low <= column - row <= high, else ``outside``; a bound of None holds everywhere."""

    low: int | None
    high: int | None
    inside: bool | int | float
    outside: bool | int | float

    def __eq__(self, other: object) -> bool:
        """0.0, -0.0, 0 and False are different."""
        return isinstance(other, StoredMask) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    @staticmethod
    def of(tensor: object) -> StoredMask | None:
        """Of a matrix, perhaps behind dimensions of size 1; None for anything else, and for tensors whose changes nobody counts."""
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.requires_grad or tensor.is_inference() or tensor.dtype.is_complex:
            return None
        if tensor.dim() < 2 or not 0 < tensor.numel() <= _MOST_ELEMENTS or tensor.numel() != tensor.shape[-1] * tensor.shape[-2]:
            return None
        with _disable_current_modes(), torch.no_grad():  # type: ignore[no-untyped-call]
            matrix = tensor.detach().reshape(tensor.shape[-2:])
            if not _constant_along_diagonals(_bits(matrix)):
                return None
            profile = torch.cat([matrix[:, 0].flip(0), matrix[0, 1:]]).cpu()
        found = _of_profile(profile, 1 - matrix.shape[0])
        return found if found is not None and all(_exact(v, tensor.dtype) for v in (found.inside, found.outside)) else None

    def __str__(self) -> str:
        bounds = [f"{low} <= " for low in (self.low,) if low is not None] + ["column - row"] + [f" <= {high}" for high in (self.high,) if high is not None]
        return f"{self.inside} everywhere" if len(bounds) == 1 else f"{self.inside} where {''.join(bounds)}, else {self.outside}"

    def element(self, reader: Reader, index: tuple[Expr, ...]) -> int:
        """The program value at ``index``."""
        b = reader.builder
        holds = b.const(True)
        offset = b.emit("sub", reader.size(index[-1]), reader.size(index[-2]))
        for word, bound in (("ge", self.low), ("le", self.high)):
            if bound is not None:
                holds = b.emit("and", holds, b.emit(word, offset, b.const(bound)))
        if isinstance(self.inside, bool):
            negated = b.emit("not", holds)
            return {(True, False): holds, (False, True): negated}.get((self.inside, bool(self.outside)), b.const(self.inside))
        return b.emit("where", holds, b.const(self.inside), b.const(self.outside))


_FILLS = frozenset({torch.finfo(torch.float32).min, *(-(10.0**n) for n in range(3, 11))})


def _exact(value: bool | int | float, dtype: torch.dtype) -> bool:
    """Is arithmetic on the value, and a comparison with a literal, the same in Python as in ``dtype``? Not so for 0.1, nor for what -1e12 is rounded to."""
    if isinstance(value, bool) or math.isinf(value):
        return True
    return (float(value).is_integer() and abs(value) <= 64) or (dtype == torch.float32 and value in _FILLS)


def _bits(matrix: Tensor) -> Tensor:
    """Floats as integers: 0.0 and -0.0 differ."""
    if not matrix.dtype.is_floating_point:
        return matrix
    return matrix.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[matrix.element_size()])


def _constant_along_diagonals(matrix: Tensor) -> bool:
    rows = max(1, _CHUNK // matrix.shape[1])
    return all(torch.equal(matrix[i : i + rows + 1][1:, 1:], matrix[i : i + rows + 1][:-1, :-1]) for i in range(0, matrix.shape[0] - 1, rows))


def _of_profile(profile: Tensor, first: int) -> StoredMask | None:
    """``profile[i]`` is what stands at column - row = first + i."""
    bits = _bits(profile)
    changes = (bits[1:] != bits[:-1]).nonzero().flatten().tolist()
    values = [profile[i].item() for i in (0, *(c + 1 for c in changes))]
    if len(changes) > 2 or any(v != v for v in values) or (len(changes) == 2 and repr(values[0]) != repr(values[2])):
        return None
    if len(changes) < 2:
        return StoredMask(None, first + changes[0] if changes else None, values[0], values[-1])
    return StoredMask(first + changes[0] + 1, first + changes[1], values[1], values[0])


@dataclass(frozen=True)
class Reliance:
    """That an input holds ``mask``, as ``example`` did, whose state was taken before it was looked at."""

    mask: StoredMask
    example: Tensor
    state: State


class Stored:
    """The masks among the inputs of one graph, each looked at when it is asked for.

    Args:
        inputs: number and example of the inputs that a placeholder may be given: one, or several for the body of a repeated layer.
    """

    def __init__(self, inputs: Mapping[fx.Node, Sequence[tuple[int, Tensor]]] | None = None) -> None:
        self.inputs = dict(inputs or {})
        self.used: dict[int, Reliance] = {}
        """What compiled code relies on, by number of the input."""
        self._states = {number: state_of(tensor) for entries in self.inputs.values() for number, tensor in entries}
        self._masks: dict[fx.Node, StoredMask | None] = {}

    def mask(self, node: fx.Node) -> StoredMask | None:
        if node not in self.inputs:
            return None
        if node not in self._masks:
            found = {StoredMask.of(tensor) for _, tensor in self.inputs[node]}
            self._masks[node] = found.pop() if len(found) == 1 else None
        return self._masks[node]

    def element(self, node: fx.Node, mask: StoredMask, reader: Reader, index: tuple[Expr, ...]) -> int:
        self.used |= {number: Reliance(mask, tensor, self._states[number]) for number, tensor in self.inputs[node]}
        return mask.element(reader, index)


def buffers(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[int, Tensor]:
    """The inputs that Dynamo knows to be a module's own (or marked as static) and that nothing trains.

    None for code that was compiled several times: each of its masks may hold something else, and code that reads them serves all. None for
    code that is to be saved (``aot_compile``): its guards would not go with it.
    """
    if getattr(torch._functorch.config, "bundled_autograd_cache", False):
        return {}
    identity = torch._guards.CompileContext.current_compile_id()
    if (getattr(identity, "frame_compile_id", None) or 0) >= _MOST_COMPILATIONS:
        return {}
    found = {}
    for i, (node, example) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False)):
        if "_dynamo_static_input_type" in node.meta.get("tensor_dict", {}) and type(example) is Tensor and example not in _changed:
            found[i] = example
    return found


def source_of(node: fx.Node) -> str:
    """Where a graph input comes from, in the user's terms as far as Dynamo says it."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    text = str(name() if callable(name) else name or node.name)
    return ".".join(re.findall(r"_(?:modules|buffers)\['([^']+)'\]", text)) or text


def of_inputs(gm: fx.GraphModule, tensors: Mapping[int, Tensor]) -> dict[fx.Node, list[tuple[int, Tensor]]]:
    """For ``Stored``: the placeholders of the graph."""
    found = gm.graph.find_nodes(op="placeholder")
    return {found[number]: [(number, tensor)] for number, tensor in tensors.items()}


def of_body(gm: fx.GraphModule, path: str, body: fx.GraphModule, stored: Stored) -> dict[fx.Node, list[tuple[int, Tensor]]]:
    """For ``Stored``: the placeholders of a higher-order node's body, by what all nodes that call it are given."""
    placeholders = body.graph.find_nodes(op="placeholder")
    calls = [user.args[1:] for node in gm.graph.find_nodes(op="get_attr") if node.target == path for user in node.users]
    found: dict[fx.Node, list[tuple[int, Tensor]]] = {}
    for at, placeholder in enumerate(placeholders):
        given = [call[at] if len(call) == len(placeholders) else None for call in calls]
        if given and all(isinstance(x, fx.Node) and x in stored.inputs for x in given):
            found[placeholder] = [entry for x in given for entry in stored.inputs[x]]  # type: ignore[index]
    return found


def in_words(gm: fx.GraphModule, relied_on: Mapping[int, Reliance]) -> tuple[str, ...]:
    """For the report: by mask, the first input that holds it."""
    inputs = gm.graph.find_nodes(op="placeholder")
    sources: dict[StoredMask, list[str]] = {}
    for number, reliance in sorted(relied_on.items()):
        sources.setdefault(reliance.mask, []).append(source_of(inputs[number]))
    return tuple(f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {mask}" for mask, names in sources.items())


# -- guards ----------------------------------------------------------------------------------------------------------------
class Check:
    """Does an input hold the band that compiled code relies on? Tensors that were seen to do so are known by their state then."""

    def __init__(self, relied_on: Reliance) -> None:
        self.mask = relied_on.mask
        self.seen = WeakIdKeyDictionary()
        self._last: Callable[[], Tensor | None]
        self._state: State
        self._remember(relied_on.example, relied_on.state, True)

    def knows(self, tensor: object) -> bool:
        """As ``holds``, but that the tensor seen last may have been written to."""
        return (tensor is not None and self._last() is tensor) or self.holds(tensor)

    def holds(self, tensor: object) -> bool:
        last = self._last()
        if last is not None and last is tensor and self._state == state_of(last):
            return True
        if type(tensor) is not Tensor or tensor.is_inference():
            return False
        state = state_of(tensor)
        known = self.seen.get(tensor)  # type: ignore[no-untyped-call]
        if known is not None and known[0] == state:
            self._remember(tensor, state, known[1])
            return bool(known[1])
        verdict = StoredMask.of(tensor) == self.mask
        if known is not None and known[1] and not verdict:
            _changed[tensor] = True
        self._remember(tensor, state, verdict)
        return verdict

    def _remember(self, tensor: Tensor, state: State, verdict: bool) -> None:
        self.seen[tensor] = (state, verdict)
        if verdict:
            self._last, self._state = weakref.ref(tensor), state


_changed = WeakIdKeyDictionary()
"""Buffers that were changed after they had been relied on: they may change again, so that code compiled from now on reads them."""


class Validity:
    """Of compiled code; all that its guards know of it, since Dynamo keeps guards for ever."""

    holds = True


class Guarded:
    """``compiled`` as long as its inputs pass, else ``original``, the graph as the user wrote it; then Dynamo is to compile anew."""

    def __init__(self, compiled: Callable[..., Any], original: fx.GraphModule, relied_on: Mapping[int, Reliance]) -> None:
        self.compiled, self.original, self.validity = compiled, original, Validity()
        self.checks = [(number, Check(reliance)) for number, reliance in sorted(relied_on.items())]
        inputs = original.graph.find_nodes(op="placeholder")
        self.names = {number: source_of(inputs[number]) for number in relied_on}
        self.watched = self._watch(inputs)

    def __call__(self, *args: Any) -> Any:
        for number, check in self.checks:
            if not check.holds(args[number]):
                return self._as_written(args)
        return self.compiled(*args)

    def _as_written(self, args: Sequence[Any]) -> Any:
        failed = [number for number, check in self.checks if not check.holds(args[number])]  # all: each is remembered as changed
        self.validity.holds = self.validity.holds and not any(args[number] in _changed for number in failed)
        if not self.watched or self.validity.holds:
            names = ", ".join(self.names[number] for number in failed)
            log.warn_once(f"{names} does not hold the mask that it held when its model was compiled: the graph runs as it is written, unfused")
        return self.original(*args)

    def _watch(self, inputs: Sequence[fx.Node]) -> bool:
        """Guards, by which Dynamo compiles anew: false where they cannot be reached.

        A guard of an input sees another tensor, but not always a write to the same one: Dynamo skips guards below modules that look unchanged.
        So there is one that is asked in every call, of what the calls found.
        """
        try:
            guards = torch._guards.TracingContext.get().guards_context.dynamo_guards
            for number, check in self.checks:
                guards.add(torch._guards.Guard(inputs[number].meta["grapharg"].source, partial(_add_guards, self.validity, check)))
        except (AttributeError, KeyError, TypeError, AssertionError) as error:  # another Dynamo
            log.get().debug("no guards of buffers: %s: %s", type(error).__name__, error)
            return False
        return True


def _add_guards(validity: Validity, check: Check, builder: Any, guard: Any) -> None:
    builder.get_guard_manager(guard).add_lambda_guard(check.knows, [f"{guard.name} holds {check.mask}  # read by fa_inductor"], guard.user_stack)
    builder.guard_manager.root.add_lambda_guard(lambda _: validity.holds, [f"{guard.name} was not written to  # read by fa_inductor"], guard.user_stack)
