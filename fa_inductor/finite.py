"""Is a softmax's input surely finite? Only then may probabilities be chosen away after the softmax by a factor: 0 * NaN is NaN.

Queries, keys and what the model learns or multiplies are taken to be finite, tensors that it is given are not: an additive mask may
hold -inf for all keys of a row.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import fx

from .facts import ProgramFacts
from .patterns import joins, views
from .patterns.contraction import is_contraction
from .patterns.views import name_of
from .program import ProgramBuilder, ScoreProgram
from .program.bounds import surely_finite
from .site import AttentionSite

_MOVES = frozenset({*views.RULES, *joins.NAMES, "gather", "index", "index_select", "embedding", "to", "_to_copy", "neg"})
_ARITHMETIC = frozenset({"add", "sub", "mul", "div"})


def rule_for_rows(site: AttentionSite, facts: ProgramFacts) -> Literal["eager", "zero"] | None:
    """How rows without a visible key must come out so that the factor after the softmax does what the choice did; None if neither way does.

    "zero": what is hidden by -inf before the softmax is exactly what is set to 0 after it, so that a row of NaN becomes 0.
    """
    if site.post is None or not any(n.op == "where" for n in site.post.nodes):
        return "eager"
    visible = facts.mask is not None and facts.mask.every_row_visible and facts.mask.fill == -math.inf
    finite = {i for i, c in enumerate(site.captures) if like_scores(c.node)}
    if surely_finite(site.program, fill=-math.inf if visible else None, finite=finite):
        return "eager"
    hidden = _chosen(site.program, site.program.result, -math.inf)
    finite_but_hidden = surely_finite(site.program, fill=-math.inf, finite=finite)
    return "zero" if hidden is not None and finite_but_hidden and hidden in _zeroed(site.post) else None


def _chosen(program: ScoreProgram, at: int, literal: float) -> ScoreProgram | None:
    """Where node ``at`` is ``literal`` by choice: the condition as a program of its own."""
    node = program.nodes[at]
    arms = [program.nodes[a] for a in node.args[1:]] if node.op == "where" else []
    here = [arm.op == "const" and arm.value == literal for arm in arms]
    if sum(here) != 1:
        return None
    builder = ProgramBuilder()
    builder.captures, builder.n_sizes = list(program.captures), program.n_sizes
    condition = builder.inline(program)[node.args[0]]
    return builder.finish(condition if here[0] else builder.emit("not", condition))


def _zeroed(post: ScoreProgram) -> list[ScoreProgram]:
    """Conditions under which ``post`` is 0: those of its factors."""
    found, queue = [], [post.result]
    while queue:
        at = queue.pop()
        condition = _chosen(post, at, 0.0)
        if condition is not None:
            found.append(condition)
        queue += post.nodes[at].args if post.nodes[at].op == "mul" else ()
    return found


def like_scores(node: fx.Node) -> bool:
    """Made of trained parameters and matrix products alone, moved about, scaled and added: as finite as the scores are."""
    seen, queue = {node}, [node]
    while queue:
        node = queue.pop()
        value = node.meta.get("example_value", node.meta.get("val"))
        if is_contraction(node) or (isinstance(value, torch.nn.Parameter) and value.requires_grad):
            continue
        inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor) and n.meta["val"].is_floating_point()]
        if not inputs or not _keeps_finite(node):
            return False
        queue += [n for n in inputs if n not in seen]
        seen.update(inputs)
    return True


def _keeps_finite(node: fx.Node) -> bool:
    name, numbers = name_of(node), [x for x in node.args if isinstance(x, (int, float))]
    if name in ("constant_pad_nd", "pad"):
        filled = node.args[-1] if len(node.args) == (3 if name == "constant_pad_nd" else 4) else 0
        return filled is None or (isinstance(filled, (int, float)) and math.isfinite(filled))
    if name in _ARITHMETIC:
        return all(abs(x) < 1e6 for x in numbers) and (name != "div" or (isinstance(node.args[1], (int, float)) and node.args[1] != 0))
    return name in _MOVES
