"""Graph breaks: where Dynamo ended a graph, why, and what the user can change.

What lies before and after a break reaches the backend as separate graphs. Each graph module says why it ended; one that begins after
a break says nothing. But the function that was broken is then still being called: its line on the Python stack is that of the break.
"""

from __future__ import annotations

import linecache
import logging
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from .location import Frame, frames_of, place_of, without_keys
from .refusal import Refusal, declare

PRINT = declare(
    "break_print",
    "remove the call, or name it in torch._dynamo.config: print in reorderable_logging_functions, a logger's method in ignore_logging_functions",
)
VALUE = declare(
    "break_value",
    "keep the decision on the device: torch.where instead of a branch, torch._check instead of an assertion, no .item(), .tolist() or boolean index",
)
ASKED = declare("break_asked", "remove the call of torch._dynamo.graph_break")
UNCOMPILED = declare(
    "break_disabled",
    "what such a function computes is not compiled, attention included: take the mark off, or keep products and softmax on one side of the call",
)
CHECKPOINT = declare("break_checkpoint", "a checkpoint with a graph break inside runs uncompiled, attention included: remove the break")
CALLER = declare("break_caller", "TORCH_LOGS=graph_breaks names the break in that function: remove it, or take it out of the loop, try or with that it is in")
BREAK = declare("graph_break", "change that line so that Dynamo can trace it (TORCH_LOGS=graph_breaks says why it cannot), or move it out of the attention")

_KINDS = (
    (UNCOMPILED, re.compile(r"compiler\.disable|_dynamo\.disable"), "a function marked torch.compiler.disable is called"),
    (ASKED, re.compile(r"_dynamo\.graph_break|User-inserted"), "torch._dynamo.graph_break is called"),
    (PRINT, re.compile(r"operator `print`|logging\.Logger|`_?warnings\.warn`|`write` of class `TextIO"), "print or a logger is called"),
    (VALUE, re.compile(r"generic_jump|[Dd]ata.dependent|\.item\(\)|tolist\(\)|Dynamic shape operator"), "the value of a tensor decides what Python does"),
)
_EXAMPLE = re.compile(r" \(e\.g\.[^)]*\)")
_NAME = re.compile(r"`(?P<name>[^`]+?)\.?`")
_FUNCTION = re.compile(r"function `?<(?:bound method|function) (?P<name>[\w.]+(?:<locals>\.\w+)*)|when calling `L\[\S+?\]\.(?P<path>\S+)`")
_WRAPPERS = (
    (re.compile(r"hook\("), "nn/modules/module.py", "in a hook"),
    (re.compile(r""), "_functorch/autograd_function.py", "in a torch.autograd.Function"),
)
_CHECKPOINT = re.compile(r"\bcheckpoint(_sequential)?\(|_checkpointing_func\(")
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(?P<function>.+)_at_(?P<line>\d+)$")

_HERE = os.path.dirname(__file__) + os.sep

Shape = tuple[Any, ...]
"""dtype and sizes of a tensor; a symbolic size is None."""


@dataclass(frozen=True)
class Break:
    """Why a graph ended, the stack there (outermost first), and which of its outputs may be scores of an attention."""

    reason: str
    frames: tuple[Frame, ...]
    scores: tuple[Shape, ...] = ()

    @property
    def at(self) -> tuple[str, int]:
        """Where the function that was being compiled stopped."""
        return self.frames[0].file, self.frames[0].line

    @property
    def said(self) -> str:
        """Dynamo's message without hints and examples."""
        return _EXAMPLE.sub("", re.split(r"\n\s*(?:Hint|Developer debug context):", self.reason.strip())[0])

    @property
    def kind(self) -> tuple[str, str]:
        """The code, and what happens there in words of our own; none for what is rare."""
        if any(f.file == logging.__file__ for f in self.frames):
            return PRINT, "a logger is called"
        return next(((code, words) for code, sign, words in _KINDS if sign.search(self.said)), (BREAK, ""))

    @property
    def sentence(self) -> str:
        """What happens at that line, in a few words."""
        code, words = self.kind
        function = _FUNCTION.search(self.said)
        if code == UNCOMPILED and function:
            name = function["name"] or f"the module {without_keys(function['path'])}"
            words = f"{name} is called, which is marked torch.compiler.disable"
        return ", ".join(filter(None, (words or _title(self.said), self.inside)))

    @property
    def inside(self) -> str:
        """What PyTorch called the code with the break for; empty where it was not PyTorch."""
        return next((words for line, file, words in _WRAPPERS for f in self.frames if f.file.endswith(file) and line.search(f.source)), "")

    def refusal(self, where: str, node: str = "") -> Refusal:
        """``where``: what the break lies between."""
        return Refusal(self.kind[0], f"{where}: {self.sentence}", node, place_of(self.frames))

    @property
    def note(self) -> Refusal | None:
        """What is not compiled because of the break, where that is more than a line."""
        if self.kind[0] == UNCOMPILED or (self.scores and self.inside):  # a softmax module with a hook may run uncompiled
            return self.refusal("the graph ends")
        if any(_CHECKPOINT.search(f.source) for f in self.frames[:-1]):
            return Refusal(CHECKPOINT, f"the graph ends, and the checkpoint is not compiled: {self.sentence}", location=place_of(self.frames))
        return None


def _title(said: str) -> str:
    """The first line of a message, and what it is about."""
    title, _, explanation = said.partition("\n")
    about = _NAME.search(explanation)
    title = title.rstrip(".: ") or "Dynamo ended the graph there"
    return f"{title}: {about['name']}" if about and "`" not in title else title


def ended_by(gm: fx.GraphModule) -> Break | None:
    """The break at the end of a graph as Dynamo made it."""
    return read(getattr(gm, "compile_subgraph_reason", None))


def read(reason: Any) -> Break | None:
    """The same of Dynamo's ``GraphCompileReason``."""
    stack = getattr(reason, "user_stack", None)
    if not stack or not getattr(reason, "graph_break", False):
        return None
    return Break(str(reason.reason), tuple(Frame(f.filename, f.lineno or 0, (f.line or "").strip(), f.name) for f in stack))


# -- breaks that a graph begins after ---------------------------------------------------------------------------------------
_lock = threading.Lock()
_last: deque[tuple[int, Break]] = deque(maxlen=64)
"""By thread. Only used where the function that was broken is on the Python stack, at that line."""


def remember(broken: Break) -> None:
    """For the graphs that the rest of the function, and what it calls, are compiled to."""
    thread = threading.get_ident()
    with _lock:
        for old in [entry for entry in _last if entry[0] == thread and entry[1].at == broken.at]:
            _last.remove(old)
        _last.append((thread, broken))


def forget() -> None:
    """Used by ``fa_inductor.reset``."""
    with _lock:
        _last.clear()


def active() -> list[Break]:
    """Breaks of the functions that are being called, the innermost first."""
    thread = threading.get_ident()
    with _lock:
        known = {b.at: b for t, b in _last if t == thread}
    for broken in of_dynamo():
        known.setdefault(broken.at, broken)
    return [known[at] for at in dict.fromkeys(_calls()) if at in known]


def of_dynamo() -> list[Break]:
    """All since Dynamo was reset, the newest first; also those that ended a graph without operators, which no backend sees."""
    from torch._dynamo import utils

    reasons = [read(reason) for reason in reversed(list(getattr(utils, "graph_break_reasons", ())))]
    return [b for b in reasons if b is not None]


def _calls() -> Iterator[tuple[str, int]]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]


def uncompiled_caller() -> Frame | None:
    """Where the function that is being compiled is called, if the caller itself runs uncompiled.

    Dynamo gives a function up that has a break in a loop, try or with, and says so to nobody; it goes on with what that calls.
    """
    frame, called = sys._getframe(1), False
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        called = called or file.endswith("convert_frame.py")  # what lies inside is the compiler: backends and their wrappers
        if function == "compile_wrapper" and file.endswith("eval_frame.py"):  # what torch.compile returned: its caller is not meant to be compiled
            return None
        found = Frame(file, frame.f_lineno, linecache.getline(file, frame.f_lineno).strip(), function)
        if called and not found.internal and not file.startswith(_HERE):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


def resumed(node: fx.Node) -> tuple[str, int] | None:
    """The line after which the function that ``node`` belongs to goes on, if its graph begins after a break."""
    for frame in reversed(frames_of(node)):
        if found := _RESUMED.match(frame.function):
            return frame.file, int(found["line"])
    return None


def function_of(node: fx.Node) -> tuple[str, str] | None:
    """File and name of the function that was compiled."""
    frames = frames_of(node)
    if not frames:
        return None
    found = _RESUMED.match(frames[0].function)
    return frames[0].file, found["function"] if found else frames[0].function
