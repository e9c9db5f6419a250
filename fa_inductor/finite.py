"""Is a softmax's input surely finite? Only then may probabilities be chosen away after the softmax by a factor: 0 * NaN is NaN.

Queries, keys and what the model learns or multiplies are taken to be finite, tensors that it is given are not: an additive mask may
hold -inf for all keys of a row.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from .facts import ProgramFacts
from .patterns import joins, views
from .patterns.contraction import is_contraction
from .patterns.views import name_of
from .program.bounds import surely_finite
from .site import AttentionSite

_MOVES = frozenset({*views.RULES, *joins.NAMES, "gather", "index", "index_select", "embedding", "to", "_to_copy", "neg"})
_ARITHMETIC = frozenset({"add", "sub", "mul", "div"})


def scores_are_finite(site: AttentionSite, facts: ProgramFacts) -> bool:
    """Each row of the softmax has a finite largest score, and no NaN."""
    visible = facts.mask is not None and facts.mask.every_row_visible and facts.mask.fill == -math.inf
    finite = {i for i, c in enumerate(site.captures) if like_scores(c.node)}
    return surely_finite(site.program, fill=-math.inf if visible else None, finite=finite)


def like_scores(node: fx.Node) -> bool:
    """Made of parameters and matrix products alone, moved about, scaled and added: as finite as the scores are."""
    seen, queue = {node}, [node]
    while queue:
        node = queue.pop()
        if is_contraction(node) or isinstance(node.meta.get("example_value", node.meta.get("val")), torch.nn.Parameter):
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
