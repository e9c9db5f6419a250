"""Score programs: the value that says what one attention does to its scores (see ``ir``)."""

from .builder import ProgramBuilder, pruned
from .derivative import differentiate
from .evaluate import Coordinates, evaluate
from .ir import Capture, Node, ProgramError, ScoreProgram, dependencies, verify
from .text import from_text, to_text

__all__ = [
    "Capture",
    "Coordinates",
    "Node",
    "ProgramBuilder",
    "ProgramError",
    "ScoreProgram",
    "dependencies",
    "differentiate",
    "evaluate",
    "from_text",
    "pruned",
    "to_text",
    "verify",
]
