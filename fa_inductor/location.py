"""Where a graph node comes from: source line, file and module path, from the metadata that Dynamo leaves on nodes."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.*)$')
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(__file__) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_KEYED = re.compile(r"""(?:\._modules)?\[['"]?(?P<key>[^'"\]]+)['"]?\]""")
_ROOT = re.compile(r"""^[LG]\[['"](?P<name>[^'"]+)['"]\]""")

_COMPILED = ("self", "fn")
"""What Dynamo calls the compiled module itself: ``fn`` where it has no forward in Python, as nn.Sequential."""


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    source: str
    function: str = ""

    @property
    def internal(self) -> bool:
        """Part of PyTorch, of Python or of this package, or code that has no file."""
        python = self.file.startswith(_PYTHON) and not any(f"{os.sep}{folder}{os.sep}" in self.file for folder in ("site-packages", "dist-packages"))
        return python or self.file.startswith((_TORCH, _OWN, "<"))


def frames_of(node: fx.Node) -> list[Frame]:
    """The node's stack, outermost first."""
    lines = (node.stack_trace or "").splitlines()
    frames = []
    for i, line in enumerate(lines):
        match = _FRAME.match(line)
        if match:
            source = lines[i + 1].strip() if i + 1 < len(lines) and not _FRAME.match(lines[i + 1]) else ""
            frames.append(Frame(match["file"], int(match["line"]), source, match["function"]))
    return frames


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame outside PyTorch and Python; failing that, the innermost that is not this package's."""
    own = [frame for frame in frames if not frame.internal] or [frame for frame in frames if not frame.file.startswith(_OWN)]
    return own[-1] if own else None


def _short(path: str) -> str:
    """Relative to site-packages or to the current directory where it lies below one; else the path itself."""
    _, found, below = path.rpartition(f"{os.sep}site-packages{os.sep}")
    if found:
        return below
    here = os.getcwd() + os.sep
    return path[len(here) :] if path.startswith(here) else path


def location_of(node: fx.Node) -> str:
    """``file.py:123`` of the innermost frame outside PyTorch (model libraries count as the user's code); empty if unknown."""
    return place_of(frames_of(node))


def place_of(frames: Sequence[Frame]) -> str:
    """The same of a stack."""
    frame = user_frame(frames)
    return f"{_short(frame.file)}:{frame.line}" if frame else ""


def source_line_of(node: fx.Node) -> str:
    """The text of the line that ``location_of`` names; empty if unknown."""
    frame = user_frame(frames_of(node))
    return frame.source if frame else ""


def module_path_of(node: fx.Node) -> str:
    """The innermost module, like ``transformer.h.0.attn``; empty at the top level or if unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    root = _ROOT.match(path)
    if root:
        path = path[root.end() :] if root["name"] in _COMPILED else root["name"] + path[root.end() :]
    return without_keys(path)


def without_keys(path: str) -> str:
    """``layers.3`` for ``_modules['layers']._modules['3']`` and the like."""
    return _KEYED.sub(lambda m: f".{m['key']}", f".{path}").strip(".")
