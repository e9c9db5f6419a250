"""Is a softmax's input surely finite? Only then may probabilities be chosen away after the softmax by a factor: 0 * NaN is NaN.

Queries, keys and what the model learns or multiplies are taken to be finite, tensors that it is given are not: an additive mask may
hold -inf for all keys of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import fx

from .facts import ProgramFacts
from .location import location_of
from .patterns import joins, views
from .patterns.contraction import is_contraction
from .patterns.views import name_of
from .program import ProgramBuilder, ScoreProgram
from .program.bounds import moderate, surely_finite
from .refusal import Refusal, Refused, declare
from .site import AttentionSite

NAN_ROWS = declare("nan_rows", "call softmax, or subtract the row's maximum: then a row is NaN only where all of it is hidden")
NAN_GRADIENT = declare(
    "nan_gradient", "hide scores by masked_fill or where instead of adding -inf, or use a finite fill; without gradients the site can be fused as it is"
)
_MOVES = frozenset({*views.RULES, *joins.NAMES, "gather", "index", "index_select", "embedding", "to", "_to_copy", "neg", "tanh", "sigmoid"})
_LARGE = 2.0**14
_ARITHMETIC = frozenset({"add", "sub", "mul", "div"})


def rule_for_rows(site: AttentionSite, facts: ProgramFacts) -> Literal["eager", "zero"] | None:
    """How rows without a visible key must come out so that the factor after the softmax does what the choice did; None if neither way does.

    "eager": no row is NaN, or none whose elements are all chosen to be 0: these have one finite number for all scores.
    "zero": what is hidden by -inf before the softmax is exactly what is set to 0 after it, so that a row of NaN becomes 0.
    """
    finite = finite_among(c.node for c in site.captures)
    if site.cleaned:
        return "zero" if site.post is None or surely_finite(site.post, finite=finite) else None
    if not site.zeroed or no_row_is_nan(site, facts) or set(site.zeroed) <= set(_filled(site.program)):
        return "eager"
    hidden = _chosen(site.program, site.program.result, -math.inf)
    finite_but_hidden = surely_finite(site.program, fill=-math.inf, finite=finite)
    return "zero" if hidden is not None and finite_but_hidden and hidden in site.zeroed else None


def finite_among(nodes: Iterable[fx.Node]) -> set[int]:
    return {i for i, n in enumerate(nodes) if like_scores(n)}


def no_row_is_nan(site: AttentionSite, facts: ProgramFacts) -> bool:
    """Has every row of scores a finite one, and none that is NaN or +inf?"""
    kept = facts.mask is not None and facts.mask.every_row_keeps_a_key
    return surely_finite(site.program, fill=-math.inf if kept else None, finite=finite_among(c.node for c in site.captures))


def check_cleaned(site: AttentionSite, facts: ProgramFacts, trained: bool) -> None:
    """Rows of NaN that are 0 after the softmax: is that all that can be seen of them? Raises Refused where it is not.

    Eager's gradient of such a row's scores is NaN. It ends where the hidden scores were replaced; where -inf was added it goes on.
    """
    node = site.anchor.output
    if not site.anchor.guarded:
        text = "rows of NaN are turned into 0 after a softmax by hand without the maximum, which makes them of small scores too"
        raise Refused(Refusal(NAN_ROWS, text, node.name, location_of(node)))
    if not _holds_in_half(site):
        text = "rows of NaN are turned into 0, and the sum of a float16 score and a mask may be -inf, which it is not in float32"
        raise Refused(Refusal(NAN_ROWS, text, node.name, location_of(node)))
    surely = no_row_is_nan(site, facts) and all(surely_finite(c.program, finite=finite_among(x.node for x in c.captures)) for c in site.columns)
    if trained and not surely and (site.columns or not _hidden_by_choice(site)):
        text = "a row that is -inf alone, or NaN, is turned into 0 after the softmax, but its gradient in eager is NaN"
        raise Refused(Refusal(NAN_GRADIENT, text, node.name, location_of(node)))


def _holds_in_half(site: AttentionSite) -> bool:
    """Scores that eager computes in float16 are infinite only where they are in fp32: nothing is added to them that may be as large as its range."""
    if not any(isinstance(n.meta["val"], torch.Tensor) and n.meta["val"].dtype == torch.float16 for n in site.region):
        return True
    nodes, at = site.program.nodes, site.program.result
    while nodes[at].op == "where" and nodes[nodes[at].args[2]].op == "const":
        at = nodes[at].args[1]
    core = ProgramBuilder.like(site.program)
    return moderate(core.finish(core.inline(site.program)[at]), _LARGE, finite_among(c.node for c in site.captures))


def _hidden_by_choice(site: AttentionSite) -> bool:
    """Nothing but choices makes a score -inf, whose gradient the choice drops."""
    program, at = site.program, site.program.result
    while True:
        node = program.nodes[at]
        other = program.nodes[node.args[-1]] if node.args else node
        if node.op == "where" and other.op == "const" and other.value == -math.inf:
            at = node.args[1]
        elif node.op in ("mul", "div") and other.op == "const" and 0 < float(other.value or 0) < math.inf:
            at = node.args[0]
        else:
            break
    core = ScoreProgram(program.nodes, (at,), program.captures, program.n_sizes)
    return surely_finite(core, finite=finite_among(c.node for c in site.captures))


def _chosen(program: ScoreProgram, at: int, literal: float) -> ScoreProgram | None:
    """Where node ``at`` is ``literal`` by choice: the condition as a program of its own."""
    node = program.nodes[at]
    arms = [program.nodes[a] for a in node.args[1:]] if node.op == "where" else []
    here = [arm.op == "const" and arm.value == literal for arm in arms]
    if sum(here) != 1:
        return None
    builder = ProgramBuilder.like(program)
    condition = builder.inline(program)[node.args[0]]
    return builder.finish(condition if here[0] else builder.emit("not", condition))


def _filled(program: ScoreProgram) -> list[ScoreProgram]:
    """Conditions under which a score is a finite number, whatever else it might be."""
    found, at = [], program.result
    while program.nodes[at].op == "where":
        arms = [program.nodes[a] for a in program.nodes[at].args[1:]]
        fill = next((arm for arm in arms if arm.op == "const" and math.isfinite(float(arm.value or 0))), None)
        condition = _chosen(program, at, float(fill.value or 0)) if fill is not None else None
        if condition is None:
            break
        found.append(condition)
        at = next(a for a in program.nodes[at].args[1:] if program.nodes[a] is not fill)
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
