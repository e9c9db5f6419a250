"""From a softmax candidate to an AttentionSite, or the Refusal that says what stands in the way: which products the region lies between."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from .columns import JOINED
from .find import Candidate, blocker, reachable, reaches_contraction, score_contractions
from .graph import GraphContext
from .index import shape_of
from .lift import DETACHED, REINDEXED, UNSUPPORTED_OP, hooked, refuse, unsupported
from .patterns.contraction import OTHER_PRODUCTS, is_contraction
from .patterns.views import name_of
from .refusal import Refused, declare
from .region import NOT_ATTENTION, NOT_CANONICAL, OPERANDS, OTHER_AXIS, REDUCTIONS, RENORMALISED, Region
from .site import AttentionSite

PRODUCT = declare("unsupported_product", "write the product as @, matmul, bmm, baddbmm or einsum, without out=")
NO_SCORES = declare("no_score_matmul", "the softmax's input must be a matrix product of queries and keys, followed by elementwise code alone")
BLOCKED = declare(
    "blocked_probabilities", "between softmax and matmul only views, casts, dropout and products with a factor can be fused; move this op out of that path"
)
BY_INDEX = (OTHER_AXIS, NOT_CANONICAL, OPERANDS, JOINED, REINDEXED, UNSUPPORTED_OP)


def analyse(context: GraphContext, candidate: Candidate) -> AttentionSite:
    """The first contraction after the softmax that makes an attention, and the others if all do; raises Refused with the reason of the nearest try."""
    anchor = candidate.anchor
    if candidate.miss is not None:
        raise Refused(candidate.miss)
    if not candidate.contractions:
        for node in candidate.others:
            if name_of(node) in REDUCTIONS and any(_feeds_contraction(u) for u in node.users):
                raise refuse(RENORMALISED, f"{node.target} over the probabilities stands between the softmax and the second matmul", node)
        blocked = next((n for n in candidate.others if n.op == "call_function" and reaches_contraction(n)), None)
        if blocked is not None and name_of(blocked) == "detach":
            raise refuse(DETACHED, "the probabilities are detached before the product with the values, so eager gets no gradient through them", blocked)
        if blocked is not None and hooked(blocked):
            raise unsupported(blocked, "stands between the softmax and the matmul")
        if blocked is not None:
            raise refuse(BLOCKED, f"{blocked.target} stands between the softmax and the matmul", blocked)
        product = next((n for n in candidate.others if name_of(n) in OTHER_PRODUCTS), None)
        if product is not None:
            raise refuse(PRODUCT, f"{product.target} takes the probabilities", product)
        raise refuse(NOT_ATTENTION, "in this graph its result reaches no matrix product through elementwise code", anchor.output)
    firsts, ends = score_contractions(anchor.input)
    if not firsts:
        blocked = blocker(ends)
        if blocked is not None and name_of(blocked) == "detach":
            raise refuse(DETACHED, "the scores are detached before the softmax, so eager gets no gradient through them", blocked)
        if blocked is not None:
            raise unsupported(blocked, "stands between the score matmul and the softmax")
        product = next((n for n in ends if name_of(n) in OTHER_PRODUCTS), None)
        if product is not None:
            raise refuse(PRODUCT, f"the scores come from {product.target}", product)
        raise refuse(NO_SCORES, "its input does not come from a matrix product", anchor.output)
    failure: Refused | None = None
    reached = False
    for second in candidate.contractions:
        for first in firsts:
            region = Region(context, candidate, second, first)
            try:
                return _with_others(context, candidate, region.site(), firsts)
            except Refused as refused:
                if failure is None or (region.reads_scores and not reached):
                    failure, reached = refused, region.reads_scores
    assert failure is not None
    raise failure


def with_symbols(refused: Refused, candidate: Candidate) -> Refused:
    """``refused``, which also says that sizes are symbols where that may be why an index was not understood."""
    products = [*candidate.contractions, *score_contractions(candidate.anchor.input)[0]]
    tensors = {n for product in products for n in (product, *product.all_input_nodes) if isinstance(n.meta.get("val"), torch.Tensor)}
    names = sorted({str(s) for n in tensors for size in shape_of(n.meta["val"]) for s in size.free_symbols})
    if not names or refused.refusal.code not in BY_INDEX:
        return refused
    text = f"{refused.refusal.text} (sizes are symbols, {', '.join(names)}: what is not known for all their values does not count)"
    return Refused(replace(refused.refusal, text=text))


def _with_others(context: GraphContext, candidate: Candidate, site: AttentionSite, firsts: list[fx.Node]) -> AttentionSite:
    """``site`` with those of the other products, if then nothing needs the probabilities any more; without them the probabilities stay."""
    seconds = [n for n in candidate.contractions if n not in site.region]
    if not seconds or candidate.anchor.quotient is not None:
        return site
    found = [site]
    for second in seconds:
        tries = (_tried(Region(context, candidate, second, first)) for first in firsts)
        other = next((x for x in tries if x is not None), None)
        if other is None:
            return site
        found.append(other)
    together = set().union(*(s.region for s in found))
    results = {s.output.node for s in found}
    after = reachable(candidate.anchor.output, max(context.order[n] for n in results), context.order, results)
    if any(u not in together for n in together & after for u in n.users):
        return site
    return replace(site, escapes=False, beside=tuple(replace(s, escapes=False) for s in found[1:]))


def _tried(region: Region) -> AttentionSite | None:
    try:
        return region.site()
    except Refused:  # of the product that was tried first; this one only stays as it is
        return None


def _feeds_contraction(node: fx.Node) -> bool:
    return is_contraction(node) or any(is_contraction(u) for u in node.users)
