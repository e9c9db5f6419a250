"""Golden programs of every other rule: generators, views, joins, products and softmaxes. No rule may be without one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from golden import Attention, B, GoldenLines, H, L, Scores
from torch import Tensor

from fa_inductor.patterns import contraction, generators, joins, overwrites, views

aten = torch.ops.aten


def i() -> Tensor:
    return torch.arange(L)[:, None]


def j() -> Tensor:
    return torch.arange(L)


def steps() -> Tensor:
    """From one position to the next: 1 everywhere."""
    return torch.diff(j(), prepend=j()[:1] - 1)


GENERATORS: dict[str, Scores] = {
    "index": lambda s, c, m: s + torch.arange(L * L).view(L, L)[i(), j()],
    "embedding": lambda s, c, m: s + F.embedding(j() - i() + L, c.new_ones(2 * L, 1)).squeeze(-1),
    "diff": lambda s, c, m: s + steps(),
    "cumsum": lambda s, c, m: s + (steps() != 1).cumsum(-1),
    "arange": lambda s, c, m: s + torch.arange(1, 2 * L, 2),
    "full": lambda s, c, m: s * torch.full((L,), 3.0),
    "full_like": lambda s, c, m: s * torch.full_like(s, 3.0),
    "new_full": lambda s, c, m: s * s.new_full((L,), 3.0),
    "zeros": lambda s, c, m: s + torch.zeros(L),
    "zeros_like": lambda s, c, m: s + torch.zeros_like(s),
    "new_zeros": lambda s, c, m: s + s.new_zeros(L),
    "ones": lambda s, c, m: s + torch.ones(L),
    "ones_like": lambda s, c, m: s + torch.ones_like(s),
    "new_ones": lambda s, c, m: s + s.new_ones(L),
    "tril": lambda s, c, m: s + torch.ones(L, L).tril(),
    "triu": lambda s, c, m: s + torch.ones(L, L).triu(2),
    "eye": lambda s, c, m: s + torch.eye(L),
    "scalar_tensor": lambda s, c, m: s + aten.scalar_tensor(2.0),
}
VIEWS: dict[str, Scores] = {
    "contiguous": lambda s, c, m: s.contiguous(),
    "clone": lambda s, c, m: s.clone(),
    "alias": lambda s, c, m: aten.alias(s),
    "lift_fresh_copy": lambda s, c, m: aten.lift_fresh_copy(s),
    "view": lambda s, c, m: s.view(B * H, L, L).view(B, H, L, L),
    "reshape": lambda s, c, m: s.reshape(B, H, L * L).reshape(B, H, L, L) + c,
    "_unsafe_view": lambda s, c, m: aten._unsafe_view(aten._unsafe_view(s, (B * H, L, L)), (B, H, L, L)),
    "unflatten": lambda s, c, m: s.unflatten(-1, (2, L // 2)).flatten(-2),
    "flatten": lambda s, c, m: s.flatten(0, 1).unflatten(0, (B, H)),
    "view_as": lambda s, c, m: s.flatten(0, 1).view_as(s),
    "reshape_as": lambda s, c, m: s.flatten(0, 1).reshape_as(s),
    "_reshape_alias": lambda s, c, m: aten._reshape_alias(s, s.shape, s.stride()),
    "permute": lambda s, c, m: s + c.permute(1, 0),
    "transpose": lambda s, c, m: s + c.transpose(0, 1),
    "swapaxes": lambda s, c, m: s + c.swapaxes(0, 1),
    "swapdims": lambda s, c, m: s + c.swapdims(0, 1),
    "t": lambda s, c, m: s + c.t(),
    "numpy_T": lambda s, c, m: s + c.T,
    "mT": lambda s, c, m: s + c.mT,
    "adjoint": lambda s, c, m: s + c.adjoint(),
    "mH": lambda s, c, m: s + c.mH,
    "matrix_H": lambda s, c, m: s + aten.matrix_H(c),
    "movedim": lambda s, c, m: s + c.movedim(0, 1),
    "moveaxis": lambda s, c, m: s + c.moveaxis(0, 1),
    "unsqueeze": lambda s, c, m: s + c.unsqueeze(0),
    "squeeze": lambda s, c, m: s + c[None].squeeze(0),
    "expand": lambda s, c, m: s + c.expand(H, L, L),
    "expand_as": lambda s, c, m: s + c.expand_as(s),
    "broadcast_to": lambda s, c, m: s + c.broadcast_to((H, L, L)),
    "slice": lambda s, c, m: s + c[:1],
    "narrow": lambda s, c, m: s + c.narrow(0, 2, 1),
    "select": lambda s, c, m: s + c[3],
    "getitem": lambda s, c, m: s + c.split(1)[2],
    "repeat": lambda s, c, m: s + c[:1].repeat(L, 1),
    "tile": lambda s, c, m: s + c[:1].tile(L, 1),
    "as_strided": lambda s, c, m: s + c.as_strided((6, 6), (1, 6)),
    "repeat_interleave": lambda s, c, m: s + c[:3].repeat_interleave(2, 0),
}
JOINS: dict[str, Scores] = {
    "cat": lambda s, c, m: torch.cat([s, s.new_zeros(B, H, L, 1)], -1)[..., :-1],
    "concat": lambda s, c, m: torch.concat([s, s.new_zeros(B, H, L, 1)], -1)[..., :-1],
    "concatenate": lambda s, c, m: torch.concatenate([s, s.new_zeros(B, H, L, 1)], -1)[..., :-1],
    "stack": lambda s, c, m: torch.stack([s[:, i] + i * c for i in range(H)], 1),
}
OVERWRITES: dict[str, Scores] = {
    "select_scatter": lambda s, c, m: s.select_scatter(c[0].expand(B, H, L), 2, 3),
    "slice_scatter": lambda s, c, m: s.slice_scatter(s[..., 2:4] * 2, -1, 2, 4),
    "diagonal_scatter": lambda s, c, m: s.diagonal_scatter(s.new_full((B, H, L), 3.0), 0, -2, -1),
    "index_put": lambda s, c, m: aten.index_put(s, [None, None, m], s.new_full((), -5.0)),
    "fill": lambda s, c, m: s.slice_scatter(aten.fill(s[..., 0:1], 7.0), -1, 0, 1),
    "pad": lambda s, c, m: F.pad(s, (0, 1), value=0.5)[..., :-1],
    "constant_pad_nd": lambda s, c, m: aten.constant_pad_nd(s, [0, 0, 1, 0], 0.5)[..., 1:, :],
}
NEVER_LEFT = {"lift_fresh"}
"""Retracing makes it ``lift_fresh_copy``."""
PRODUCTS: dict[str, Attention] = {
    "matmul": lambda q, k, v, c: (q @ k.mT).softmax(-1) @ v,
    "linalg_matmul": lambda q, k, v, c: torch.linalg.matmul(torch.linalg.matmul(q, k.mT).softmax(-1), v),
    "bmm": lambda q, k, v, c: torch.bmm(torch.bmm(q[0], k[0].mT).softmax(-1), v[0]),
    "mm": lambda q, k, v, c: torch.mm(torch.mm(q[0, 0], k[0, 0].mT).softmax(-1), v[0, 0]),
    "addmm": lambda q, k, v, c: torch.addmm(c, q[0, 0], k[0, 0].mT, beta=2, alpha=0.5).softmax(-1) @ v[0, 0],
    "baddbmm": lambda q, k, v, c: torch.baddbmm(c, q[0], k[0].mT, beta=2, alpha=0.5).softmax(-1) @ v[0],
    "einsum": lambda q, k, v, c: torch.einsum("bhij,bhjd->bihd", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v),
    "linear": lambda q, k, v, c: F.linear(F.linear(q[0, 0], k[0, 0]).softmax(-1), v[0, 0].mT),
}


def by_hand(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
    e = torch.exp(q @ k.mT)
    return (e / e.sum(-1, keepdim=True)) @ v


def by_hand_less_the_maximum(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
    s = q @ k.mT
    e = torch.exp(s - s.max(-1, keepdim=True)[0])
    return (e * (1 / e.sum(-1, keepdim=True))) @ v


def with_a_term(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
    e = torch.exp(q @ k.mT)
    return (e / (e.sum(-1, keepdim=True) + c[:, :1].exp())) @ v


def less_the_logarithm(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
    s = q @ k.mT
    return torch.exp(s - s.exp().sum(-1, keepdim=True).log()) @ v


def less_logsumexp(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
    s = q @ k.mT
    return torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v


SOFTMAXES: dict[str, Attention] = {
    "softmax": lambda q, k, v, c: (q @ k.mT).softmax(-1) @ v,
    "_softmax": lambda q, k, v, c: aten._softmax(q @ k.mT, -1, False) @ v,
    "special_softmax": lambda q, k, v, c: torch.special.softmax(q @ k.mT, -1) @ v,
    "_safe_softmax": lambda q, k, v, c: aten._safe_softmax(q @ k.mT, -1) @ v,
    "log_softmax": lambda q, k, v, c: (q @ k.mT).log_softmax(-1).exp() @ v,
    "special_log_softmax": lambda q, k, v, c: torch.special.log_softmax(q @ k.mT, -1).exp() @ v,
    "logsumexp": less_logsumexp,
    "log": less_the_logarithm,
    "exp": by_hand,
    "max": by_hand_less_the_maximum,
    "add": with_a_term,
}


class Rules(GoldenLines):
    def test_none_is_without_a_case(self):
        self.assertEqual(set(GENERATORS), set(generators.RULES))
        self.assertEqual({*VIEWS, *NEVER_LEFT}, set(views.RULES))
        self.assertEqual(set(JOINS), set(joins.NAMES))
        self.assertEqual(set(OVERWRITES), overwrites.NAMES)
        self.assertEqual(set(PRODUCTS), contraction.NAMES)

    def test_generators(self):
        self.lines(
            GENERATORS,
            """\
index               s + 6*q + k
embedding           s + c0[q, k, 0]
diff                s + 1
cumsum              s
arange              s + 2*k + 1
full                3*s
full_like           3*s
new_full            3*s
zeros               s
zeros_like          s
new_zeros           s
ones                s + 1
ones_like           s + 1
new_ones            s + 1
tril                s + where(k - q <= 0, 1, 0)
triu                s + where(k - q >= 2, 1, 0)
eye                 s + (q == k)
scalar_tensor       s + 2""",
        )

    def test_views(self):
        self.lines(
            VIEWS,
            """\
contiguous          s
clone               s
alias               s
lift_fresh_copy     s
view                s
reshape             s + c0[q, k]
_unsafe_view        s
unflatten           s
flatten             s
view_as             s
reshape_as          s
_reshape_alias      s
permute             s + c0[k, q]
transpose           s + c0[k, q]
swapaxes            s + c0[k, q]
swapdims            s + c0[k, q]
t                   s + c0[k, q]
numpy_T             s + c0[k, q]
mT                  s + c0[k, q]
adjoint             s + c0[k, q]
mH                  s + c0[k, q]
matrix_H            s + c0[k, q]
movedim             s + c0[k, q]
moveaxis            s + c0[k, q]
unsqueeze           s + c0[q, k]
squeeze             s + c0[q, k]
expand              s + c0[q, k]
expand_as           s + c0[q, k]
broadcast_to        s + c0[q, k]
slice               s + c0[0, k]
narrow              s + c0[2, k]
select              s + c0[3, k]
getitem             s + c0[0, k]
repeat              s + c0[0, k]
tile                s + c0[0, k]
as_strided          s + c0[k, q]
repeat_interleave   s + c0[q//2, k]""",
        )

    def test_joins(self):
        self.lines(
            JOINS,
            """\
cat                 s
concat              s
concatenate         s
stack               s + where(h < 1, 0*c0[q, k], c0[q, k])""",
        )

    def test_overwrites(self):
        self.lines(
            OVERWRITES,
            """\
select_scatter      where(q >= 3 and q < 4, c0[0, k], s)
slice_scatter       s*where(k >= 2 and k < 4, 2, 1)
diagonal_scatter    where(-1*q + k != 0, s, 3)
index_put           where(not c0[q, k], s, -5)
fill                where(k >= 1, s, 7)
pad                 s
constant_pad_nd     s""",
        )

    def test_products(self):
        self.spelled(
            PRODUCTS,
            """\
matmul              s; softmax
linalg_matmul       s; softmax
bmm                 s; softmax
mm                  s; softmax
addmm               0.5*s + 2*c0[q, k]; softmax
baddbmm             0.5*s + 2*c0[q, k]; softmax
einsum              s; softmax
linear              s; softmax""",
        )

    def test_softmaxes(self):
        self.spelled(
            SOFTMAXES,
            """\
softmax             s; softmax
_softmax            s; softmax
special_softmax     s; softmax
_safe_softmax       s; safe softmax
log_softmax         s; log_softmax.exp
special_log_softmax s; log_softmax.exp
logsumexp           s; exp(x - logsumexp)
log                 s; exp(x - log(sum))
exp                 s; exp / sum
max                 s; exp(x - max) / sum
add                 s; also over c0[q, 0]; exp / (sum + term)""",
        )
