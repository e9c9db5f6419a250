"""Forward and backward over query tiles and key blocks with an online softmax; memory grows with the lengths, not their product.

Forward, for each query tile and its blocks of keys (Milakov and Gimelshein, 2018, arXiv:1805.02867; Dao et al., 2022,
arXiv:2205.14135), all in fp32::

    S = program(Q K^T)    m' = max(m, max_k S)    P = exp(S - m')    l' = l exp(m - m') + sum_k P
    O' = O exp(m - m') + (P post keep) V          at the end  O / l,  lse = m + log l

lse is kept as ``hi + lo`` so that it still tells rows apart when m is the huge fill of a row without a visible key.
Backward, with ``delta = rowsum(dO O)``::

    P = exp(S - hi - lo)   dV += (P post keep)^T dO   dS = P (post keep (dO V^T) - delta)   dscore = program' dS
    dQ += dscore K         dK += dscore^T Q
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fa_inductor.kernel_support import empty_output
from fa_inductor.program import Coordinates, ProgramBuilder, ScoreProgram, evaluate
from fa_inductor.program.scatter import GradientProgram, gradient_program, scatter_loads
from fa_inductor.program.tile_map import Truth
from fa_inductor.request import Plan

from .dropout import Dropout
from .schedule import FINE, Range, Shape, Tiles, Visibility, choose_tiles, ranges, runs
from .steps import Steps

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Derivative:
    """Gradient programs of the score function and of the post factor (if it reads a wanted capture)."""

    score: GradientProgram
    steps: Steps
    post: GradientProgram | None


@dataclass(frozen=True)
class Compiled:
    """A plan's programs, analysed once. ``masked``: the mask is applied by ``Visibility`` and ``core`` is the program without it."""

    plan: Plan
    masked: bool
    core: ScoreProgram
    forward: Steps
    derivatives: dict[tuple[int, ...], Derivative] = field(default_factory=dict)

    def derivative(self, wanted: tuple[int, ...]) -> Derivative:
        """For the captures of these numbers."""
        if wanted not in self.derivatives:
            score = gradient_program(self.core, wanted)
            post = gradient_program(self.plan.post, wanted) if self.plan.post is not None and wanted else None
            self.derivatives[wanted] = Derivative(score, Steps(score.program), post)
        return self.derivatives[wanted]


def _used_elsewhere(program: ScoreProgram, predicates: Sequence[int]) -> bool:
    """Some conjunct of the mask has another use: where it is false a hidden score, to which the fill is added, is not what it would be as a visible one."""
    uses = Counter(a for node in program.nodes for a in set(node.args))
    return any(uses[p] > 1 for p in predicates)


def compile_plan(plan: Plan) -> Compiled:
    """Take the mask off the program, if it hides all scores in one way."""
    mask, core = plan.facts.mask, plan.program
    predicates = (*(t.node for t in mask.terms), *mask.places) if mask is not None else ()
    masked = mask is not None and (mask.hidden == "replace" or (mask.hidden == "add" and not _used_elsewhere(core, predicates)))
    if mask is not None and masked:
        builder = ProgramBuilder.like(core)
        visible = builder.const(True)
        placed = builder.inline(core, dict.fromkeys(predicates, visible))
        core = builder.finish(placed[core.result])
    return Compiled(plan, masked, core, Steps(core))


def exp2_(x: Tensor) -> Tensor:
    """2^x in place, 0 below 2^-100: a denormal number costs some CPUs a hundred cycles in each product that it enters."""
    return torch.threshold_(x, -100.0, -math.inf).exp2_()


def exp_(x: Tensor) -> Tensor:
    """exp in place; PyTorch's vectorised exp2 is four times as fast on the CPU as its exp."""
    return exp2_(x.mul_(LOG2E))


class Workspace:
    """Buffers by name that grow to the largest size asked for: no allocation, hence no page faults, inside the loops."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: dict[str, Tensor] = {}

    def get(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        count = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < count:
            self.buffers[name] = torch.empty(count, dtype=dtype, device=self.device)
        return self.buffers[name][:count].view(shape)


@dataclass(frozen=True)
class Chunk:
    """A range of batches and key heads, with K and V as fp32 (batches * key heads, Lk, D)."""

    b: Range
    kv: Range
    heads: Range
    k: Tensor
    v: Tensor

    @property
    def count(self) -> int:
        return (self.b[1] - self.b[0]) * (self.kv[1] - self.kv[0])


def _part(tile_map: Tensor, chunk: Chunk, row: int) -> Tensor:
    """A row of tiles of a (B or 1, H or 1, q tiles, k tiles) map, (batches and heads of the chunk, k tiles)."""
    place = (chunk.b, chunk.heads)
    box = tuple(slice(*part) if n > 1 else slice(None) for part, n in zip(place, tile_map.shape[:2], strict=True))
    return tile_map[box][:, :, row].flatten(0, 1)


class Attention:
    """One call: what forward and backward share."""

    def __init__(
        self, compiled: Compiled, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], sizes: Sequence[int], dropout_p: float, seed: Tensor | None
    ) -> None:
        self.compiled, self.plan = compiled, compiled.plan
        self.q, self.k, self.v, self.captures, self.sizes = q, k, v, captures, sizes
        self.device = q.device
        self.shape = Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        self.tiles: Tiles = choose_tiles(self.shape, int(self.plan.get("q_tile")), int(self.plan.get("k_tile")), int(self.plan.get("elements")))
        self.mask = self.plan.facts.mask
        by_bias = bool(self.plan.get("by_bias"))
        bias = self.plan.facts.hiding_bias if by_bias else None
        self.visibility = Visibility(self.mask, self.plan.program, self.shape, captures, sizes, self.device, bias)
        self.skips_above = self.plan.facts.skips_above(by_bias)
        self.key_blocks = self.visibility.key_blocks(self.tiles.k)
        self.map = self.visibility.tile_map(self.tiles)
        self.dropout = None
        if dropout_p > 0:
            assert seed is not None, "dropout needs a seed"
            self.dropout = Dropout(seed, dropout_p, self.shape.heads, self.shape.lq)
        self.score_dropout = None
        if self.plan.program.drop_p is not None:
            assert seed is not None, "dropout needs a seed"
            self.score_dropout = Dropout(seed, self.plan.program.drop_p, self.shape.heads, self.shape.lq, scores=True)
        self.work = Workspace(self.device)

    # -- walking -------------------------------------------------------------------------------------------------------
    def chunks(self) -> Iterator[Chunk]:
        group = self.shape.group
        for b in ranges(self.shape.batch, self.tiles.batches):
            for kv in ranges(self.shape.kv_heads, self.tiles.kv_heads):
                k, v = (t[b[0] : b[1], kv[0] : kv[1]].to(torch.float32).flatten(0, 1) for t in (self.k, self.v))
                yield Chunk(b, kv, (kv[0] * group, kv[1] * group), k, v)

    def tile(self, tensor: Tensor, chunk: Chunk, rows: Range) -> Tensor:
        """Rows of a (B, Hq, Lq, …) tensor as fp32 (batches * key heads, group * rows, …)."""
        part = tensor[chunk.b[0] : chunk.b[1], chunk.heads[0] : chunk.heads[1], rows[0] : rows[1]].to(torch.float32)
        return part.reshape(chunk.count, self.shape.group * (rows[1] - rows[0]), -1)

    def box_shape(self, chunk: Chunk, rows: Range, columns: int) -> tuple[int, int, int, int]:
        return chunk.b[1] - chunk.b[0], chunk.heads[1] - chunk.heads[0], rows[1] - rows[0], columns

    def key_ranges(self, chunk: Chunk, rows: Range, everything: bool) -> list[tuple[Range, bool]]:
        """Blocks of keys to visit for a tile, each with whether more than the bounds hides some of it; ``everything``: skip none."""
        start, stop = (0, self.shape.lk) if everything else self.visibility.key_range(rows)
        may, must = self._seen(self.map, chunk, rows) if self.map is not None else (None, None)
        found = []
        for keys in ranges(stop, self.tiles.k, start) if may is None or everything else runs(may, FINE, (start, stop), self.tiles.k):
            some, every = self._by_key(chunk, keys)
            if everything or some:
                full = must is None or all(must[keys[0] // FINE : (keys[1] - 1) // FINE + 1])
                found.append((keys, not (every and full)))
        return found

    def _by_key(self, chunk: Chunk, keys: Range) -> tuple[bool, bool]:
        """Does some head of the chunk see some key of a block, and do all see all, by the key predicate?"""
        if self.key_blocks is None:
            return True, True
        some, every = self.key_blocks
        aligned = range(keys[0] // self.tiles.k, (keys[1] - 1) // self.tiles.k + 1)
        inside = [(b, a) for b in range(*chunk.b) for a in aligned]
        return any(some[b][a] for b, a in inside), all(every[b][a] for b, a in inside)

    def _seen(self, tile_map: Truth, chunk: Chunk, rows: Range) -> tuple[list[bool], list[bool]]:
        """Of each ``FINE`` keys: may some head of the chunk see some of them, and do all see all of them?"""
        may, must = (_part(x, chunk, rows[0] // self.tiles.q) for x in tile_map)
        return may.any(0).tolist(), must.all(0).tolist()

    # -- one block -----------------------------------------------------------------------------------------------------
    def scores(self, steps: Steps, chunk: Chunk, rows: Range, keys: Range, apart: bool, q: Tensor) -> tuple[Tensor, dict[int, Tensor], Coordinates]:
        """The program's value on a block, (batches * key heads, group * rows, keys), and what ``Steps.finish`` needs."""
        columns = keys[1] - keys[0]
        shape4 = self.box_shape(chunk, rows, columns)
        score = self.work.get("score", *q.shape[:2], columns)
        box = Coordinates(chunk.b, chunk.heads, rows, keys)
        kept = self.kept(self.score_dropout, chunk, rows, keys)
        values = steps.before(box, self.captures, self.sizes, self.device, None if kept is None else kept != 0)
        k = chunk.k[:, keys[0] : keys[1]].transpose(1, 2)
        if steps.bias is None:
            torch.baddbmm(score, q, k, beta=0, alpha=steps.scale, out=score)
        else:
            steps.write_bias(values, score.view(shape4))
            score.baddbmm_(q, k, alpha=steps.scale)
        y = steps.begin(values, score.view(shape4), lambda name: self.work.get(name, *shape4))
        if y.shape != shape4:
            y = y.expand(shape4).contiguous()
        if self.compiled.masked:
            if not steps.y_is_free:
                y = self.work.get("y", *shape4).copy_(y)
            self.hide(y, chunk, rows, keys, apart)
        return y.view(score.shape), values, box

    def touched(self, chunk: Chunk, rows: Range, keys: Range, apart: bool) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
        """The column ranges of a block that the mask touches, with its bits there."""
        if apart:
            yield slice(None), self.visibility.bits(rows, keys, chunk.b, chunk.heads)
            return
        start, stop = self.visibility.seen_by_all(rows, keys)
        for part in ((keys[0], start), (stop, keys[1])):
            if part[0] < part[1]:
                yield slice(part[0] - keys[0], part[1] - keys[0]), self.visibility.bits(rows, part, None, None)

    def hide(self, y: Tensor, chunk: Chunk, rows: Range, keys: Range, apart: bool) -> None:
        """Apply the mask in place. Replacing works on bits: exact for every value (NaN too) and faster than ``where``."""
        assert self.mask is not None
        for columns, (visible, fill_bits, fill) in self.touched(chunk, rows, keys, apart):
            part = y[..., columns]
            if self.mask.hidden == "replace":
                part.view(torch.int32).bitwise_and_(visible).bitwise_or_(fill_bits)
            else:
                part.add_(fill)

    def hide_gradient(self, ds: Tensor, chunk: Chunk, rows: Range, keys: Range, apart: bool) -> None:
        """A replaced score has no gradient; an added fill passes it on."""
        assert self.mask is not None
        if self.mask.hidden == "replace":
            for columns, (visible, _, _) in self.touched(chunk, rows, keys, apart):
                ds[..., columns].view(torch.int32).bitwise_and_(visible)

    def factors(self, chunk: Chunk, rows: Range, keys: Range) -> tuple[Tensor | None, Tensor | None]:
        """(post factor, kept bits) of a block."""
        post = None
        if self.plan.post is not None:
            box = Coordinates(chunk.b, chunk.heads, rows, keys)
            (post,) = evaluate(self.plan.post, box, captures=self.captures, sizes=self.sizes, device=self.device)
        return post, self.kept(self.dropout, chunk, rows, keys)

    def kept(self, dropout: Dropout | None, chunk: Chunk, rows: Range, keys: Range) -> Tensor | None:
        """Kept bits of a block, until the next are asked for."""
        if dropout is None:
            return None
        shape4 = self.box_shape(chunk, rows, keys[1] - keys[0])
        bits, scratch = (self.work.get(name, *shape4, dtype=torch.int32) for name in ("kept", "scratch"))
        return dropout.keep_bits(chunk.b, chunk.heads, rows, keys, bits, scratch)

    def apply(self, block: Tensor, post: Tensor | None, kept: Tensor | None) -> Tensor:
        """``block`` times post factor and kept bits, in place; the 1 / (1 - p) is left to ``keep_scale``."""
        if post is not None:
            block.mul_(post)
        if kept is not None:
            block.view(torch.int32).bitwise_and_(kept)
        return block

    @property
    def keep_scale(self) -> float:
        return 1.0 if self.dropout is None else self.dropout.scale

    # -- forward -------------------------------------------------------------------------------------------------------
    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        s = self.shape
        out = empty_output(self.q, s.dv, str(self.plan.get("layout")))
        hi, lo = (torch.empty((s.batch, s.heads, s.lq), dtype=torch.float32, device=self.device) for _ in range(2))
        if s.lk == 0:
            return out.zero_(), hi.fill_(-math.inf), lo.zero_()  # an empty sum
        least = self.skips_above
        for chunk in self.chunks():
            for rows in ranges(s.lq, self.tiles.q):
                q = self.tile(self.q, chunk, rows)
                m, total, acc = self.forward_tile(chunk, rows, q, everything=False)
                if least is not None and least > -math.inf and bool((m < least).any()):
                    # some row has no visible key: what was skipped matters to it
                    m, total, acc = self.forward_tile(chunk, rows, q, everything=True)
                self.store(chunk, rows, m, total, acc, out, hi, lo)
        return out, hi, lo

    def forward_tile(self, chunk: Chunk, rows: Range, q: Tensor, everything: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Running maximum, sum and unnormalised output of a tile."""
        n, r = q.shape[:2]
        m = torch.full((n, r, 1), -math.inf, device=self.device)
        total = torch.zeros((n, r, 1), device=self.device)
        acc = self.work.get("acc", n, r, self.shape.dv).zero_()
        first = True
        for keys, apart in self.key_ranges(chunk, rows, everything):
            y, _, _ = self.scores(self.compiled.forward, chunk, rows, keys, apart, q)
            m_new = torch.maximum(m, y.amax(-1, keepdim=True))
            offset = torch.where(m_new == -math.inf, 0.0, m_new)  # -inf minus itself would be NaN
            p = exp_(torch.sub(y, offset, out=y))
            if not first:
                old = torch.exp(torch.where(m == -math.inf, m, m - offset))
                total.mul_(old)
                acc.mul_(old)
            total.add_(p.sum(-1, keepdim=True))
            post, kept = self.factors(chunk, rows, keys)
            self.apply(p.view(self.box_shape(chunk, rows, p.shape[-1])), post, kept)
            acc.baddbmm_(p, chunk.v[:, keys[0] : keys[1]])
            m, first = m_new, False
        return m, total, acc

    def store(self, chunk: Chunk, rows: Range, m: Tensor, total: Tensor, acc: Tensor, out: Tensor, hi: Tensor, lo: Tensor) -> None:
        shape4 = self.box_shape(chunk, rows, 1)
        if self.plan.masked_rows == "zero":
            acc.div_(torch.where(m == -math.inf, 1.0, total))
        else:
            acc.div_(total)
        if self.dropout is not None:
            acc.mul_(self.keep_scale)
        place = (slice(*chunk.b), slice(*chunk.heads), slice(*rows))
        out[place] = acc.view(*shape4[:3], -1).to(out.dtype)
        log = total.log_()
        high = torch.where(m == -math.inf, m, m + log)
        hi[place] = high.view(shape4[:3])
        # what rounding took from m + log l (Knuth's two-sum); rows of -inf or NaN have no low part
        part = high - m
        low = (m - (high - part)) + (log - part)
        lo[place] = torch.where(high.isfinite(), low, 0.0).view(shape4[:3])

    # -- backward ------------------------------------------------------------------------------------------------------
    def backward(self, out: Tensor, hi: Tensor, lo: Tensor, grad_out: Tensor, grad_lse: Tensor | None, needs: Sequence[bool]) -> list[Tensor]:
        return Backward(self, out, hi, lo, grad_out, grad_lse, needs).run()


class Backward:
    """State of one backward call; results in the order q, k, v, captures, empty where not needed."""

    def __init__(self, call: Attention, out: Tensor, hi: Tensor, lo: Tensor, grad_out: Tensor, grad_lse: Tensor | None, needs: Sequence[bool]) -> None:
        self.call, self.needs = call, needs
        self.out, self.hi, self.lo, self.grad_out, self.grad_lse = out, hi, lo, grad_out, grad_lse
        plan = call.plan
        wanted = tuple(i for i, need in enumerate(needs[3:]) if need)
        derivative = call.compiled.derivative(wanted)
        self.gradient, self.steps, self.post = derivative.score, derivative.steps, derivative.post
        self.needs_scores = needs[0] or needs[1] or bool(wanted)
        self.targets = [torch.zeros(c.shape, dtype=torch.float32, device=c.device) if n else None for c, n in zip(call.captures, needs[3:], strict=True)]
        layout = str(plan.get("layout"))
        self.results = [empty_output(t, t.shape[-1], layout) if need else t.new_empty(0) for t, need in zip((call.q, call.k, call.v), needs, strict=False)]

    def run(self) -> list[Tensor]:
        call = self.call
        for chunk in call.chunks():
            dk, dv = torch.zeros_like(chunk.k), torch.zeros_like(chunk.v)
            for rows in ranges(call.shape.lq, call.tiles.q):
                self.tile(chunk, rows, dk, dv)
            key = (self.results[1], dk, self.steps.dscore_scale, self.needs[1])
            value = (self.results[2], dv, call.keep_scale, self.needs[2])
            for result, gradient, scale, need in (key, value):
                if need:
                    place = result[chunk.b[0] : chunk.b[1], chunk.kv[0] : chunk.kv[1]]
                    place.copy_(gradient.mul_(scale).view(place.shape))
        captures = [c.new_empty(0) if t is None else t.to(c.dtype) for t, c in zip(self.targets, call.captures, strict=True)]
        return [*self.results, *captures]

    def tile(self, chunk: Chunk, rows: Range, dk: Tensor, dv: Tensor) -> None:
        call = self.call
        q, out, d_o, hi, lo = (call.tile(t, chunk, rows) for t in (call.q, self.out, self.grad_out, self.hi, self.lo))
        everything = self.visit_everything(hi)
        if call.plan.masked_rows == "zero":
            # such a row has probabilities 0 (S - 0 = -inf) and output 0
            hi = torch.where(hi == -math.inf, 0.0, hi)
        low = lo * -LOG2E
        dq = call.work.get("dq", *q.shape).zero_()
        blocks = list(call.key_ranges(chunk, rows, everything))
        # dS of a row adds up to 0 in eager. Of a whole row it does so here too; elsewhere two roundings are subtracted
        delta = None if len(blocks) == 1 else (out * d_o).sum(-1, keepdim=True)
        shift = None if self.grad_lse is None else call.tile(self.grad_lse, chunk, rows)
        for keys, apart in blocks:
            y, values, box = call.scores(self.steps, chunk, rows, keys, apart, q)
            target = y if call.compiled.masked or self.steps.y_is_free else call.work.get("y", *y.shape)
            p = torch.sub(y, hi, out=target)
            exp2_(torch.add(low, p, alpha=LOG2E, out=p))
            ds = self.block(chunk, rows, keys, apart, p, d_o, delta, shift, dv)
            if ds is None:
                continue
            results = self.steps.finish(values, ds, lambda name, shape=ds.shape: call.work.get(name, *shape))
            scatter_loads(self.gradient, results, box, self.targets)
            dscore = results[1].expand(ds.shape).reshape(p.shape)
            if self.needs[0]:
                dq.baddbmm_(dscore, chunk.k[:, keys[0] : keys[1]])
            if self.needs[1]:
                dk[:, keys[0] : keys[1]].add_(torch.bmm(dscore.transpose(1, 2), q, out=call.work.get("dk", chunk.count, p.shape[2], q.shape[2])))
        if self.needs[0]:
            place = self.results[0][chunk.b[0] : chunk.b[1], chunk.heads[0] : chunk.heads[1], rows[0] : rows[1]]
            place.copy_(dq.mul_(self.steps.dscore_scale).view(place.shape))

    def visit_everything(self, hi: Tensor) -> bool:
        """A row without a visible key is there (or cannot be ruled out): its probabilities reach all keys, as NaN for a fill of -inf."""
        least = self.call.skips_above
        if least is None:
            return False
        if least == -math.inf:
            return self.call.plan.masked_rows == "eager" and bool((hi == -math.inf).any())
        # the maximum is at least lse - log(number of keys)
        return not bool((hi - math.log(max(1, self.call.shape.lk)) >= least).all())  # a row of NaN too reaches all keys

    def block(
        self, chunk: Chunk, rows: Range, keys: Range, apart: bool, p: Tensor, d_o: Tensor, delta: Tensor | None, shift: Tensor | None, dv: Tensor
    ) -> Tensor | None:
        """Add a block's part of dV and of the post factor's gradient; returns dS (4-D), or None where nobody needs it.

        ``delta``: rowsum(dP P), to be computed here where None. ``shift``: what the lse's gradient adds to dP.
        """
        call = self.call
        shape4 = call.box_shape(chunk, rows, p.shape[2])
        post, kept = call.factors(chunk, rows, keys)
        if self.needs[2]:
            effective = p
            if post is not None or kept is not None:
                effective = call.apply(call.work.get("effective", *shape4).copy_(p.view(shape4)), post, kept).view(p.shape)
            dv[:, keys[0] : keys[1]].add_(torch.bmm(effective.transpose(1, 2), d_o, out=call.work.get("dv", chunk.count, p.shape[2], d_o.shape[2])))
        if not self.needs_scores:
            return None
        dp = torch.bmm(d_o, chunk.v[:, keys[0] : keys[1]].transpose(1, 2), out=call.work.get("dp", *p.shape))
        if call.keep_scale != 1.0:
            dp.mul_(call.keep_scale)
        if self.post is not None:
            self.post_gradient(chunk, rows, keys, dp.view(shape4), p.view(shape4), kept)
        call.apply(dp.view(shape4), post, kept)
        if delta is None:
            delta = torch.mul(dp, p, out=call.work.get("products", *p.shape)).sum(-1, keepdim=True)
        ds = dp.sub_(delta if shift is None else delta - shift).mul_(p).view(shape4)
        if call.compiled.masked:
            call.hide_gradient(ds, chunk, rows, keys, apart)
        return ds

    def post_gradient(self, chunk: Chunk, rows: Range, keys: Range, dp: Tensor, p: Tensor, kept: Tensor | None) -> None:
        """The factor's gradient is P keep / (1-p) (dO V^T)."""
        assert self.post is not None
        call = self.call
        box = Coordinates(chunk.b, chunk.heads, rows, keys)
        grad = call.apply(dp * p, None, kept)
        results = evaluate(self.post.program, box, grad=grad, captures=call.captures, sizes=call.sizes, device=call.device)
        scatter_loads(self.post, results, box, self.targets)
