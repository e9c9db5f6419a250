"""A cheap look at Dynamo graphs: is there a softmax at all, and are there some where nothing is searched?"""

from __future__ import annotations

import re

from torch import fx

from .normalize import Normalized
from .refusal import declare

IN_BODY = declare(
    "operator_body",
    "attention inside cond, scan, map or a torch.autograd.Function runs as written; move it out, or use torch.utils.checkpoint, whose body is searched",
)

_NAMED = re.compile(r"softmax|softmin|multi_head_attention")
_SUM = re.compile(r"^sum$")
_BY_HAND = re.compile(rf"{_NAMED.pattern}|\bexp_?\b")
_POWER = re.compile(r"\br?pow\b")
_SIGNS = re.compile(rf"{_NAMED.pattern}|\bexp2?_?\b|logsumexp|scaled_dot_product")


def has_softmax(gm: fx.GraphModule) -> bool:
    """May there be one? Graphs without softmax or exp are not retraced."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    return any(_calls(n, _SIGNS) or _raises_number(n) for g in graphs for n in g.nodes)


def in_bodies(normal: Normalized) -> list[fx.Node]:
    """Softmaxes in the bodies of higher-order operators that are not searched."""
    searched = {"", *(path for path, _ in normal.subgraphs)}
    bodies = [m for path, m in normal.gm.named_modules() if path not in searched and isinstance(m, fx.GraphModule)]
    return [n for body in bodies for n in body.graph.nodes if _calls(n, _BY_HAND if any(_calls(m, _SUM) for m in body.graph.nodes) else _NAMED)]


def _raises_number(node: fx.Node) -> bool:
    """2 ** x, but not x ** 2, which most models hold."""
    return _calls(node, _POWER) and len(node.args) == 2 and isinstance(node.args[0], (int, float))


def _calls(node: fx.Node, names: re.Pattern[str]) -> bool:
    target = node.target
    return node.op.startswith("call") and names.search(target if isinstance(target, str) else getattr(target, "__name__", str(target))) is not None
