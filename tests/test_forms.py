"""Attention in its spellings: each must fuse and match eager, forward and backward; each near miss must be refused with its code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from fusing import check, rewritten, sites_of
from torch import Tensor

from fa_inductor.report import collecting

Case = tuple[Callable[..., Any], Callable[[], list[Any]]]
FORMS: dict[str, Case] = {}
DEVICE = "cpu"
"""Where inputs and masks are made: the GPU's tests set it."""
B, H, L, D = 2, 3, 17, 8


def rand(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, device=DEVICE).requires_grad_(grad)


def qkv(heads: int = H, lk: int = L, dv: int = D) -> list[Any]:
    return [rand(B, H, L, D), rand(B, heads, lk, D), rand(B, heads, lk, dv)]


def form(inputs: Callable[[], list[Any]] = qkv) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        FORMS[function.__name__] = function, inputs
        return function

    return register


# -- softmax spellings ---------------------------------------------------------------------------------------------------
@form()
def softmax_method(q, k, v):
    return (q @ k.transpose(-2, -1) / D**0.5).softmax(-1) @ v


@form()
def softmax_module(q, k, v):
    return torch.nn.Softmax(dim=-1)(q @ k.mT * 0.3) @ v


@form()
def softmax_fp32(q, k, v):
    return F.softmax(q @ k.mT, dim=-1, dtype=torch.float32).to(q.dtype) @ v


@form()
def exp_over_sum(q, k, v):
    e = torch.exp(q @ k.mT * 0.2)
    return e / e.sum(-1, keepdim=True) @ v


@form()
def exp_minus_max(q, k, v):
    s = q @ k.mT * 0.2
    e = torch.exp(s - s.max(dim=-1, keepdim=True).values)
    return e / e.sum(dim=-1, keepdim=True) @ v


@form()
def exp_minus_amax_detached(q, k, v):
    s = q @ k.mT * 0.2
    e = (s - s.amax(-1, keepdim=True).detach()).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@form()
def log_softmax_exp(q, k, v):
    return F.log_softmax(q @ k.mT, -1).exp() @ v


@form()
def powers_of_two(q, k, v):
    e = torch.exp2(q @ k.mT * 0.2)
    return (e / e.sum(-1, keepdim=True)) @ v


@form()
def powers_of_a_number_less_the_maximum(q, k, v):
    s = q @ k.mT * 0.2
    e = 10 ** (s - s.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


@form()
def less_the_logarithm_of_the_sum(q, k, v):
    s = q @ k.mT * 0.2
    return torch.exp(s - s.exp().sum(-1, keepdim=True).log()) @ v


@form()
def log_softmax_by_hand(q, k, v):
    s = q @ k.mT
    s = s - s.amax(-1, keepdim=True)
    return torch.exp(s - torch.log(s.exp().sum(-1))[..., None]) @ v


def padded() -> Tensor:
    """The second sequence has no key at all."""
    return torch.arange(L, device=DEVICE)[None] < torch.tensor([[L], [0]], device=DEVICE)


@form()
def masked_again(q, k, v):
    """softmax makes NaN of a row of -inf alone, and the same mask makes 0 of that: 0 from the start, with gradients of 0."""
    hidden = ~padded()[:, None, None]
    return (q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0.0) @ v


@form()
def masked_again_with_the_mask_turned_round(q, k, v):
    keep = padded()[:, None, None]
    return torch.where(keep, torch.where(keep, q @ k.mT, -math.inf).softmax(-1) * 2, 0.0) @ v


@form()
def multiplied_by_a_mask_again(q, k, v):
    """A factor of 0 leaves NaN what it is, which a choice of 0 does not."""
    hidden = ~padded()[:, None, None]
    return ((q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1) * ~hidden * 0.5) @ v


@form()
def multiplied_by_a_choice(q, k, v):
    hidden = ~padded()[:, None, None]
    return ((q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1) * torch.where(hidden, 0.0, 2.0)) @ v


@form(lambda: [*qkv(), rand(H, L, L), rand(H, 1, 1)])
def masked_again_beside_a_bias(q, k, v, b, t):
    """Bias and temperature may hold anything: but a row that is 0 throughout has the fill for all scores."""
    hidden = ~padded()[:, None, None]
    return ((q @ k.mT) * t.exp() + b).masked_fill(hidden, -1e4).softmax(-1).masked_fill(hidden, 0.0) @ v


@form(lambda: [*qkv(), rand(H, L, L)])
def masked_again_by_one_of_two(q, k, v, b):
    hidden, later = ~padded()[:, None, None], torch.ones(L, L, device=q.device, dtype=torch.bool).triu(1)
    return torch.where(later, -1e4, (q @ k.mT + b).masked_fill(hidden, -5e3)).softmax(-1).masked_fill(hidden, 0.0) @ v


@form()
def rows_without_a_key_refilled(q, k, v):
    """softmax is never NaN: rows that the mask hides altogether get scores of 0, and then probabilities of 0."""
    hidden = ~padded()[:, None, None] | torch.ones(L, L, device=q.device, dtype=torch.bool).triu(1)
    empty = hidden.all(-1, keepdim=True)
    return (q @ k.mT).masked_fill(hidden, -math.inf).masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ v


@form(lambda: [*qkv(), rand(L, L)])
def shifted_before_scaling(q, k, v, b):
    """CogView (arXiv:2105.13290): keeps half precision from overflowing."""
    s = (q @ k.mT + b) / 32
    return ((s - s.amax(-1).unsqueeze(-1)) * 32).softmax(-1) @ v


@form(lambda: [*qkv(), rand(H, L, L), rand(L, L)])
def shifted_after_a_mask_of_the_least_number(q, k, v, b, c):
    """What eager computed before the shift does not overflow, or does so here too; the second sequence's rows are the least number alone."""
    mask = torch.where(padded()[:, None, None], 0.0, torch.finfo(torch.float32).min)
    s = (q @ k.mT + (b + c) / D**0.5 + mask) / 32
    return ((s - s.amax(-1).unsqueeze(-1)) * 32).softmax(-1) @ v


@form(lambda: [*qkv(), rand(L, L)])
def shifted_before_a_bias(q, k, v, b):
    s = q @ k.mT
    return (s - s.max(-1, keepdim=True).values.detach() + b).softmax(-1) @ v


@form()
def minus_logsumexp(q, k, v):
    s = q @ k.mT * 0.2
    return torch.exp(s - torch.logsumexp(s, -1, keepdim=True)) @ v


@form()
def minus_logsumexp_unsqueezed(q, k, v):
    s = q @ k.mT * 0.2
    return torch.exp(s - torch.logsumexp(s, -1).unsqueeze(-1)) @ v


@form()
def axis_restored_by_views(q, k, v):
    s = q @ k.mT * 0.2
    e = torch.exp(s - s.amax(-1)[..., None])
    return (e / e.sum(-1).view(B, H, L, 1)) @ v


@form()
def times_one_over_sum(q, k, v):
    e = torch.exp(q @ k.mT * 0.2)
    return (e * (1.0 / e.sum(-1, keepdim=True))) @ v


@form()
def reciprocal_first(q, k, v):
    e = torch.exp(q @ k.mT * 0.2)
    return (e.sum(-1, keepdim=True).reciprocal() * e) @ v


@form()
def tiny_number_added_to_the_sum(q, k, v):
    s = q @ k.mT * 0.2
    e = torch.exp(s - s.max(-1, keepdim=True)[0])
    return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ v


@form()
def exponential_written_twice(q, k, v):
    s = q @ k.mT * 0.2
    return (s.exp() / s.exp().sum(-1, keepdim=True)) @ v


@form()
def maximum_subtracted_before_the_library_softmax(q, k, v):
    s = q @ k.mT * 0.2
    return (s - s.amax(-1, keepdim=True).detach()).softmax(-1) @ v


@form()
def maximum_taken_under_no_grad(q, k, v):
    s = q @ k.mT * 0.2
    with torch.no_grad():
        peak = s.max(-1)[0].unsqueeze(-1)
    e = (s - peak).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@form()
def sum_clamped(q, k, v):
    s = q @ k.mT * 0.2
    e = torch.exp(s - s.max(-1, keepdim=True)[0])
    return (e / e.sum(-1, keepdim=True).clamp(min=1e-6)) @ v


SPELLINGS = tuple(FORMS)
"""Of the softmax alone."""


# -- matmul spellings ----------------------------------------------------------------------------------------------------
@form()
def einsum_heads_first(q, k, v):
    return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)


@form(lambda: [rand(B, L, H, D), rand(B, L + 3, H, D), rand(B, L + 3, H, D)])
def einsum_heads_last(q, k, v):
    a = torch.einsum("bihd,bjhd->bhij", q, k) * D**-0.5
    return torch.einsum("bhij,bjhd->bihd", a.softmax(-1), v)


@form(lambda: [rand(B, L, H, D), rand(B, L, H, D), rand(B, L, H, D)])
def einsum_ellipsis(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.einsum("...qk,...kd->...qd", torch.einsum("...qd,...kd->...qk", q, k).softmax(-1), v)


@form()
def scores_transposed(q, k, v):
    s = (k @ q.transpose(-1, -2)).softmax(dim=-2)  # (b, h, key, query), normalised over keys
    return s.transpose(-1, -2) @ v


@form()
def output_transposed(q, k, v):
    return v.mT @ (q @ k.mT).softmax(-1).mT


@form(lambda: [rand(B * H, L, D), rand(B * H, L, D), rand(B * H, L, D)])
def three_dimensional_bmm(q, k, v):
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.3, -1), v)


@form(lambda: [rand(B * H, L, D), rand(B * H, L, D), rand(B * H, L, D), rand(B * H, L, L)])
def baddbmm(q, k, v, bias):
    return torch.bmm(torch.baddbmm(bias, q, k.transpose(1, 2), beta=0.5, alpha=0.25).softmax(-1), v)


@form(lambda: [rand(L, D), rand(L, D), rand(L, D)])
def two_dimensional(q, k, v):
    return (q @ k.T).softmax(-1) @ v


@form(lambda: [rand(2, 3, H, L, D), rand(2, 3, H, L, D), rand(2, 3, H, L, D), rand(2, 1, H, L, L), rand(2, 3, 1, 1, L)])
def five_dimensional_two_biases(q, k, v, pair, row):
    return ((q @ k.mT) * 0.3 + pair + row).softmax(-1) @ v


# -- sums over several dimensions ------------------------------------------------------------------------------------------
@form(lambda: [rand(3, 5, L, D), rand(3, 5, L + 2, D), rand(3, 5, L + 2, D)])
def tied_rows(q, k, v):
    """The rows of an alignment attend alike (MSA Transformer, Rao et al. 2021)."""
    return torch.einsum("hij,rhjc->rhic", torch.einsum("rhic,rhjc->hij", q, k).softmax(-1), v)


@form(lambda: [rand(3, L, B, H, D), rand(3, L, B, H, D), rand(3, L, B, H, D), torch.rand(B, L, device=DEVICE) > 0.7])
def tied_rows_as_in_esm(q, k, v, padding):
    s = torch.einsum("rinhd,rjnhd->hnij", q * (D**-0.5 / math.sqrt(q.shape[0])), k)
    return torch.einsum("hnij,rjnhd->rinhd", s.masked_fill(padding[None, :, None], -10000).softmax(-1), v)


def image() -> list[Any]:
    """Queries (b, q, c); keys and values (b, c, h, w)."""
    return [rand(B, L, D), rand(B, D, 4, 6), rand(B, D, 4, 6)]


@form(image)
def keys_of_two_dimensions(q, k, v):
    s = torch.einsum("bqc,bchw->bqhw", q, k)
    return torch.einsum("bqhw,bchw->bqc", s.flatten(2).softmax(-1).view_as(s), v)


@form(image)
def values_first_and_turned(q, k, v):
    """The keys are counted as the softmax counts them, whatever the order of the letters."""
    s = torch.einsum("bqc,bchw->bqhw", q, k)
    return torch.einsum("bcwh,bqhw->bqc", v.mT, s.flatten(2).softmax(-1).view_as(s))


@form(lambda: [rand(5, 2, 3, 4, 2), rand(7, 4, 3, 2, 2), rand(7, 6)])
def channels_of_four_dimensions(q, k, v):
    return torch.einsum("iabcd,jcbad->ij", q, k).softmax(-1) @ v


@form(lambda: [rand(B, L, 1, D), rand(B, L, 1, D), rand(B, L, D)])
def channels_of_a_dimension_of_one(q, k, v):
    return torch.einsum("bqec,bkec->bqk", q, k).softmax(-1) @ v


@form(lambda: [rand(B, L, 1, 1), rand(B, L, 1, 1), rand(B, L, D)])
def channels_of_one(q, k, v):
    return torch.einsum("bqec,bkec->bqk", q, k).softmax(-1) @ v


@form(lambda: [rand(B, L, H * D), rand(B, L, H * D), rand(B, L, H * D), torch.rand(B, 1, L, L, device=DEVICE) > 0.3])
def merged_batch_and_heads_masked(q, k, v, m):
    def shape(x):
        return x.view(B, L, H, D).transpose(1, 2).reshape(B * H, L, D)

    q, k, v = shape(q) * D**-0.5, shape(k), shape(v)
    s = torch.bmm(q, k.transpose(1, 2)).view(B, H, L, L) + torch.where(m, 0.0, torch.finfo(torch.bfloat16).min).to(q.dtype)
    p = s.view(B * H, L, L).softmax(-1)
    return torch.bmm(p, v).view(B, H, L, D).transpose(1, 2).reshape(B, L, H * D)


# -- scale -----------------------------------------------------------------------------------------------------------------
@form()
def scale_on_queries(q, k, v):
    return ((q * D**-0.5) @ k.mT).softmax(-1) @ v


@form()
def scale_on_both(q, k, v):
    return ((q * D**-0.25) @ (k * D**-0.25).mT).softmax(-1) @ v


@form(lambda: [*qkv(), torch.tensor(0.3, device=DEVICE, requires_grad=True)])
def scale_learned(q, k, v, t):
    return (q @ k.mT / t).softmax(-1) @ v


@form(lambda: [*qkv(), rand(H, 1, 1)])
def scale_per_head(q, k, v, t):
    return (q @ k.mT * t.clamp(max=0.0).exp()).softmax(-1) @ v


@form()
def scale_from_shape(q, k, v):
    return (q @ k.mT / math.sqrt(k.shape[-1])).softmax(-1) @ v


# -- masks and biases --------------------------------------------------------------------------------------------------------
@form()
def causal_triu(q, k, v):
    m = torch.triu(torch.ones(L, L, dtype=torch.bool, device=DEVICE), diagonal=1)
    return (q @ k.mT).masked_fill(m, -math.inf).softmax(-1) @ v


@form()
def causal_additive_triu(q, k, v):
    m = torch.full((L, L), -math.inf, device=DEVICE).triu(1)
    return (q @ k.mT + m).softmax(-1) @ v


@form()
def causal_arange(q, k, v):
    i = torch.arange(q.size(-2), device=DEVICE)
    return torch.where(i[:, None] >= i[None, :], q @ k.mT, torch.finfo(q.dtype).min).softmax(-1) @ v


@form(lambda: qkv(lk=L + 5))
def causal_bottom_right(q, k, v):
    i, j = torch.arange(q.size(-2), device=DEVICE) + k.size(-2) - q.size(-2), torch.arange(k.size(-2), device=DEVICE)
    return (q @ k.mT).masked_fill(j[None] > i[:, None], -math.inf).softmax(-1) @ v


@form()
def causal_inplace(q, k, v):
    s = q @ k.mT
    s /= D**0.5
    s.masked_fill_(torch.ones(L, L, dtype=torch.bool, device=DEVICE).triu(1), -1e9)
    return s.softmax(-1) @ v


@form(lambda: [*qkv(), torch.ones(1, 1, 64, 64, device=DEVICE).tril()])
def causal_buffer(q, k, v, tri):
    return (q @ k.mT).masked_fill(tri[:, :, :L, :L] == 0, -math.inf).softmax(-1) @ v


@form()
def window(q, k, v):
    i = torch.arange(L, device=DEVICE)
    d = i[:, None] - i[None, :]
    return (q @ k.mT).masked_fill(~((d >= 0) & (d < 5)), -math.inf).softmax(-1) @ v


@form(lambda: [*qkv(), torch.arange(L, device=DEVICE)[None] < torch.tensor([[L], [5]], device=DEVICE)])
def key_padding(q, k, v, m):
    return (q @ k.mT).masked_fill(~m[:, None, None, :], -1e9).softmax(-1) @ v


@form(lambda: [*qkv(), torch.arange(L, device=DEVICE)[None] < torch.tensor([[L], [0]], device=DEVICE)])
def key_padding_of_everything(q, k, v, m):
    return (q @ k.mT).masked_fill(~m[:, None, None, :], -1e9).softmax(-1) @ v


@form(lambda: [*qkv(), (torch.arange(L, device=DEVICE)[None] < torch.tensor([[L], [0]], device=DEVICE))])
def no_visible_key_is_nan(q, k, v, m):
    return (q @ k.mT).masked_fill(~m[:, None, None, :], -math.inf).softmax(-1) @ v


@form(lambda: [*qkv(), (torch.arange(L, device=DEVICE)[None] < torch.tensor([[L], [5]], device=DEVICE)).long()])
def padding_one_minus(q, k, v, m):
    return (q @ k.mT + (1.0 - m[:, None, None, :].float()) * -10000.0).softmax(-1) @ v


@form(lambda: [*qkv(), rand(L, grad=False)])
def one_dimensional_mask(q, k, v, m):
    return (q @ k.mT + m).softmax(-1) @ v


@form(lambda: [*qkv(), rand(1, H, L, L)])
def learned_bias(q, k, v, bias):
    return (bias + q @ k.mT * 0.3).softmax(-1) @ v


@form(lambda: [*qkv(), rand(B, 1, 1, L), rand(H, L, L)])
def two_learned_biases_scaled(q, k, v, row, pair):
    return ((q @ k.mT + row + pair) * 0.3).softmax(-1) @ v


@form(lambda: [*qkv(), rand(2 * L - 1, H)])
def relative_table(q, k, v, table):
    i = torch.arange(L, device=DEVICE)
    bias = table[i[:, None] - i[None, :] + L - 1].permute(2, 0, 1)
    return (q @ k.mT + bias).softmax(-1) @ v


@form(lambda: [*qkv(), rand(H)])
def alibi(q, k, v, slopes):
    i = torch.arange(L, device=DEVICE)
    return (q @ k.mT - slopes[:, None, None] * (i[:, None] - i[None, :]).abs()).softmax(-1) @ v


@form()
def softcap(q, k, v):
    return (20 * torch.tanh(q @ k.mT / 20)).softmax(-1) @ v


@form()
def clamped(q, k, v):
    return (q @ k.mT).clamp(min=-2, max=2).softmax(-1) @ v


# -- heads ---------------------------------------------------------------------------------------------------------------
@form(lambda: [rand(B, 6, L, D), rand(B, 2, L, D), rand(B, 2, L, D)])
def grouped_repeat_interleave(q, k, v):
    return (q @ k.repeat_interleave(3, dim=1).mT).softmax(-1) @ v.repeat_interleave(3, dim=1)


@form(lambda: [rand(B, 6, L, D), rand(B, 2, L, D), rand(B, 2, L, D)])
def grouped_expand_reshape(q, k, v):
    k, v = (x[:, :, None].expand(B, 2, 3, L, D).reshape(B, 6, L, D) for x in (k, v))
    return (q @ k.transpose(2, 3)).softmax(-1) @ v


@form(lambda: [rand(1, 6, L, D), rand(1, 2, L, D), rand(1, 2, L, D)])
def grouped_with_one_sequence(q, k, v):
    k, v = (x[:, :, None].expand(1, 2, 3, L, D).reshape(1, 6, L, D) for x in (k, v))
    return (q @ k.transpose(2, 3)).softmax(-1) @ v


@form(lambda: [rand(B, H, L, D), rand(B, 1, L, D), rand(B, 1, L, D)])
def multi_query_broadcast(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


@form(lambda: [rand(B, H, L, D), rand(B, L, D), rand(B, L, D)])
def multi_query_einsum(q, k, v):
    return torch.einsum("bhij,bjd->bhid", torch.einsum("bhid,bjd->bhij", q, k).softmax(-1), v)


@form(lambda: [rand(B, L, 3 * H * D)])
def packed_qkv(x):
    q, k, v = x.view(B, L, 3, H, D).permute(2, 0, 3, 1, 4)
    return (q @ k.mT).softmax(-1).matmul(v).transpose(1, 2).reshape(B, L, H * D)


@form(lambda: [rand(B, L, 3 * H * D)])
def packed_chunk(x):
    q, k, v = (y.view(B, L, H, D).transpose(1, 2) for y in x.chunk(3, -1))
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).contiguous().view(B, L, H * D)


@form(lambda: [rand(2, 8, 64), rand(2, 8, 64), rand(2, 8, 64)])
def keys_permuted_over_channels(q, k, v):
    """pytorch#195320: with 8 positions and 8 channels this runs, and attends over channels. The lifted K is that permute."""
    q, v = (x.view(2, 8, 8, 8).transpose(1, 2) for x in (q, v))
    return (q @ k.view(2, 8, 8, 8).permute(0, 2, 3, 1).mT).softmax(-1) @ v


@form(lambda: [rand(3, 3, L, D), rand(3, 3, L, D), rand(3, 3, L, D)])
def keys_of_another_batch(q, k, v):
    return (q @ k.transpose(0, 1).mT).softmax(-1) @ v


@form(lambda: qkv(dv=5))
def value_width_differs(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


@form(lambda: [rand(H, L, D), rand(B, H, L, D), rand(B, H, L, D)])
def queries_shared_over_batch(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


@form(lambda: [rand(B, H, 1, D), rand(B, H, L, D), rand(B, H, L, D)])
def one_query(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


@form(lambda: [rand(B, H, D), rand(B, H, L, D), rand(B, H, L, D)])
def query_dimension_missing(q, k, v):
    return torch.einsum("bhk,bhkd->bhd", torch.einsum("bhd,bhkd->bhk", q, k).softmax(-1), v)


@form(lambda: [rand(4, L, H, D), rand(4, L, H, D), rand(4, L, H, D), torch.rand(2, L, L, device=DEVICE) > 0.3])
def window_mask_per_image(q, k, v, m):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = (q @ k.mT).view(2, 2, H, L, L) + torch.where(m, 0.0, -100.0)[None, :, None]
    return (s.view(4, H, L, L).softmax(-1) @ v).transpose(1, 2).reshape(4, L, H * D)


# -- sizes that the code computes: with symbols, a matter of what is known of them ---------------------------------------------
@form(lambda: [rand(B, L, 6 * D), rand(B, L, 2, D), rand(B, L, 2, D)])
def groups_of_a_size_left_open(q, k, v):
    (b, t, _), (g, d) = q.shape, k.shape[2:]
    p = torch.einsum("bqgrd,bkgd->bgrqk", q.view(b, t, g, -1, d), k).softmax(-1)
    return torch.einsum("bgrqk,bkgd->bqgrd", p, v).flatten(2)


@form(lambda: [rand(B, L, 6 * D), rand(B, L, 2 * D), rand(B, L, 2 * D)])
def heads_of_a_number_left_open(q, k, v):
    q, k, v = (x.view(*x.shape[:2], -1, D).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


@form(lambda: [rand(8, H, 16, D), rand(8, H, 16, D), rand(8, H, 16, D), rand(H, 16, 16), rand(4, 16, 16, grad=False)])
def shifted_windows(q, k, v, bias, mask):
    """Swin Transformer."""
    b, h, n, _ = q.shape
    w = mask.shape[0]
    s = q @ k.transpose(-2, -1) + bias.unsqueeze(0)
    s = (s.view(b // w, w, h, n, n) + mask.unsqueeze(1).unsqueeze(0)).view(-1, h, n, n)
    return (s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, -1)


@form(lambda: [rand(4, 15, D), rand(4, 15, D), rand(4, 15, D), rand(3, 3, D), rand(5, 5, D)])
def decomposed_positions(q, k, v, rows, columns):
    """Segment Anything: what a position adds is computed for rows and columns of the image apart."""
    b = q.shape[0]
    r = q.reshape(b, 3, 5, -1)
    s = (q @ k.mT).view(b, 3, 5, 3, 5)
    s = s + torch.einsum("bhwc,hkc->bhwk", r, rows)[..., None] + torch.einsum("bhwc,wkc->bhwk", r, columns)[..., None, :]
    return s.view(b, 15, 15).softmax(-1) @ v


@form(lambda: [*qkv(), rand(B * H, L, L)])
def added_to_a_batch_that_is_viewed_as_numbers(q, k, v, m):
    s = torch.baddbmm(m, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=0.3)
    return torch.bmm(s.view(2, 3, *s.shape[1:]).softmax(-1).flatten(0, 1), v.flatten(0, 1)).view(2, 3, *v.shape[2:])


@form(lambda: [rand(B, 4, L, D), rand(B, 4, L, D), rand(B, 4, L, D), rand(L, L)])
def halves_of_heads(q, k, v, b):
    x, y = (q @ k.mT).chunk(2, 1)
    return torch.cat([x + b, y * 0.5], 1).softmax(-1) @ v


@form(lambda: [rand(B, 2 * D, H * D) for _ in range(3)])
def windows_of_a_number(q, k, v):
    b, t, c = q.shape
    q, k, v = (x.view(b, -1, 8, 3, c // 3).transpose(2, 3) for x in (q, k, v))
    return ((q @ k.mT).softmax(-1) @ v).transpose(2, 3).reshape(b, t, c)


# -- after the softmax -------------------------------------------------------------------------------------------------------
@form(lambda: [*qkv(), torch.rand(1, H, 1, 1, device=DEVICE)])
def head_mask(q, k, v, m):
    return ((q @ k.mT).softmax(-1) * m) @ v


@form(lambda: [*qkv(), torch.rand(B, 1, L, L, device=DEVICE) > 0.2])
def masked_after_softmax(q, k, v, m):
    return (q @ k.mT).softmax(-1).masked_fill(~m, 0.0) @ v


def in_windows() -> list[Any]:
    return [rand(B, 4 * D, D) for _ in range(3)]


def _windows(*tensors):
    return (x.reshape(x.shape[0], x.shape[1] // D, x.shape[1] // (x.shape[1] // D), x.shape[2]) for x in tensors)


@form(in_windows)
def windows_by_their_number(q, k, v):
    """The length of a window is a quotient of quotients, which the mask's length holds at a number."""
    q, k, v = _windows(q, k, v)
    hidden = torch.ones(D, D, dtype=torch.bool, device=q.device).triu(1)
    p = torch.einsum("bwid,bwjd->bwij", q, k).masked_fill(hidden, -1e9).softmax(-1)
    return torch.einsum("bwij,bwjd->bwid", p, v)


@form(in_windows)
def windows_that_look_back(q, k, v):
    """As above; the mask is as long as two windows."""
    q, k, v = _windows(q, k, v)
    k, v = (torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1], x], 2) for x in (k, v))
    hidden = torch.ones(D, 2 * D, dtype=torch.bool, device=q.device).triu(D + 1)
    p = torch.einsum("bwid,bwjd->bwij", q, k).masked_fill(hidden, -1e9).softmax(-1)
    return torch.einsum("bwij,bwjd->bwid", p, v)


@form()
def probabilities_returned(q, k, v):
    p = (q @ k.mT).softmax(-1)
    return p @ v, p.mean(1)


@form(lambda: [rand(B, 8, 1, D), rand(B, 1, L, D), rand(B, 1, L, D)])
def one_query_of_many_heads_and_one_key_head(q, k, v):
    """A step of decoding: the heads are then as good as queries."""
    return (q @ k.repeat_interleave(8, 1).mT * 0.3).softmax(-1) @ v.repeat_interleave(8, 1)


@form(lambda: [rand(B, 8, 1, D), rand(B, 1, L, D), rand(B, 1, L, D)])
def one_query_and_a_key_head_that_is_expanded(q, k, v):
    k, v = (x[:, :, None].expand(B, 1, 8, L, D).reshape(B, 8, L, D) for x in (k, v))
    return (q @ k.mT).masked_fill(~padded()[:, None, None], -1e9).softmax(-1) @ v


# -- groups of heads that are treated apart and joined again ------------------------------------------------------------------
@form(lambda: [*qkv(), rand(2), rand(1)])
def slopes_of_two_groups(q, k, v, s, t):
    """Tranception (arXiv:2205.13760)."""
    groups = (q @ k.mT).split([2, 1], dim=1)
    bias = torch.arange(L, device=q.device) / L
    return torch.cat([(x[:, None, None] * bias + g) for x, g in zip((s, t), groups)], dim=1).softmax(-1) @ v


@form(lambda: [*qkv(), rand(2, L, L), rand(L, L), rand(2, 1, 1)])
def groups_biased_masked_and_scaled(q, k, v, b, c, t):
    s = q @ k.mT * 0.3
    first = s[:, :2].masked_fill(torch.ones(L, L, device=q.device, dtype=torch.bool).triu(1), -math.inf)
    return torch.cat([(first + b) * t, c + s[:, 2:]], 1).softmax(-1) @ v


@form(lambda: [*qkv(), rand(H, L, L)])
def each_head_by_itself(q, k, v, b):
    s = (q @ k.mT).chunk(H, 1)
    return torch.cat([x * (i + 1) + (b[i] if i != 1 else b[0].mT) for i, x in enumerate(s)], 1).softmax(-1) @ v


@form()
def capped_in_one_group(q, k, v):
    s = torch.einsum("bhqd,bhkd->bqkh", q, k)
    s = torch.cat([torch.tanh(s[..., :2] / 5) * 5, s[..., 2:]], -1)
    return torch.einsum("bqkh,bhkd->bhqd", s.softmax(2), v)


@form(lambda: [*qkv(), rand(L, L)])
def groups_of_merged_heads(q, k, v, b):
    """Of the batch here, which the heads are merged with."""
    s = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT)
    return torch.bmm(torch.cat([s[:H] + b, s[H:] - b], 0).softmax(-1), v.flatten(0, 1)).view(B, H, L, D)


@form(lambda: [*qkv(), rand(L, L)])
def groups_after_the_softmax(q, k, v, b):
    p = (q @ k.mT).softmax(-1).split([1, 2], 1)
    return torch.cat([p[0] * b, p[1] * 0.5], 1) @ v


@form(lambda: [*qkv(), rand(H)])
def heads_stacked_before_the_softmax(q, k, v, t):
    s = (q @ k.mT).unbind(1)
    return torch.stack([x * t[i] + i for i, x in enumerate(s)], 1).softmax(-1) @ v


@form(lambda: [*qkv(), rand(L, L, grad=False)])
def heads_stacked_after_the_softmax(q, k, v, b):
    p = (q @ k.mT).softmax(-1)
    return torch.stack([p[:, 0] * b.sigmoid(), p[:, 1], p[:, 2] * 0.5], 1) @ v


@form(lambda: [rand(H, H, L, D), rand(H, H, L, D), rand(H, L, D)])
def groups_of_one_image(q, k, v):
    """The scores are cut out of a batch that is as long as there are heads."""
    s = (q @ k.mT)[0]
    return torch.cat([s[:1] * 2, s[1:]], 0).softmax(-1) @ v


# -- a part of the scores ------------------------------------------------------------------------------------------------------
@form()
def scores_of_the_first_keys(q, k, v):
    """A cache that is not full."""
    return (q @ k.mT * 0.3)[..., : L - 5].softmax(-1) @ v[:, :, : L - 5]


@form(lambda: [*qkv(), rand(L, L - 5)])
def cache_as_long_as_its_mask(q, k, v, m):
    n = m.shape[-1]
    return ((q @ k.mT * 0.3)[..., :n] + m).softmax(-1) @ v[:, :, :n]


@form(lambda: [*qkv()[:2], rand(B, H, L - 5, D), rand(L, L - 5)])
def scores_of_the_last_keys(q, k, v, m):
    """As many as there are values."""
    return ((q @ k.mT)[..., -v.shape[2] :] + m).softmax(-1) @ v


@form()
def scores_of_more_keys_than_there_are(q, k, v):
    return (q @ k.mT)[..., -L - 3 :].softmax(-1) @ v


@form()
def scores_of_the_last_query(q, k, v):
    return (q @ k.mT)[:, :, -1:].softmax(-1) @ v


@form(lambda: [*qkv(), rand(L, L)])
def scores_of_some_heads(q, k, v, b):
    s = torch.einsum("bhqd,bhkd->bqhk", q, k) + b[:, None]
    return torch.einsum("bqhk,bhkd->bhqd", s[:, 2:, 1:].softmax(-1), v[:, 1:])


@form()
def one_head_of_one_image(q, k, v):
    return (q @ k.mT)[1:, 1].softmax(-1) @ v[1:, 1]


@form()
def keys_treated_apart(q, k, v):
    s = q @ k.mT
    return torch.cat([s[..., :5] * 2, s[..., 5:]], -1).softmax(-1) @ v


@form()
def probabilities_of_some_heads(q, k, v):
    return (q @ k.mT).softmax(-1)[:, 1:] @ v[:, 1:]


@form()
def dropout_in_evaluation(q, k, v):
    return F.dropout((q @ k.mT).softmax(-1), 0.5, training=False) @ v


@pytest.mark.parametrize("name", FORMS)
def test_form_fuses(name: str) -> None:
    torch.manual_seed(0)
    function, inputs = FORMS[name]
    check(function, inputs())


LOW_PRECISION = ["corner_gelu", "corner_softplus", "corner_elu", "corner_hardswish_above", "corner_power_of_three_halves", "corner_sin"]
LOW_PRECISION += ["causal_arange", "key_padding", "grouped_repeat_interleave", "alibi", "merged_batch_and_heads_masked", "softcap", "packed_qkv"]


@pytest.mark.parametrize("name", LOW_PRECISION)
def test_form_fuses_in_bfloat16(name: str) -> None:
    torch.manual_seed(0)
    function, inputs = FORMS[name]
    low = [x.detach().bfloat16().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs()]
    check(function, low)


# -- where the query stands among heads that share their keys ---------------------------------------------------------------
def grouped(length: int = L) -> list[Any]:
    """q (b, q, g, r, d); k, v (b, k, g, d)."""
    return [rand(B, length, 3, 2, D), rand(B, L, 3, D), rand(B, L, 3, D)]


for _order in ("bgrqd", "bqgrd", "qbrgd", "rqgbd", "dqrgb", "gbdrq"):
    FORMS[f"grouped_einsum_{_order}"] = (
        (lambda q, k, v, o=_order: torch.einsum(f"bgrqk,bkgd->{o}", torch.einsum("bqgrd,bkgd->bgrqk", q, k).softmax(-1), v)),
        grouped,
    )
    FORMS[f"grouped_cross_{_order}"] = FORMS[f"grouped_einsum_{_order}"][0], lambda: grouped(5)


@form(lambda: [rand(L, 2, 4, D), rand(L, 2, D), rand(L, 2, D)])
def tokens_first_and_shared_keys(q, k, v):
    s = torch.einsum("qhmd,khd->hmqk", q, k) * 0.125
    s = s + torch.triu(q.new_full((L, L), -float("inf")), diagonal=1)
    return torch.einsum("hmqk,khd->qhmd", s.softmax(-1), v).reshape(L, -1)


@form(lambda: [rand(L, 2, 4, D), rand(L, 2, D), rand(L, 2, D)])
def tokens_first_and_expanded_keys(q, k, v):
    k, v = (x[:, :, None].expand(-1, -1, 4, -1) for x in (k, v))
    s = torch.einsum("qhmd,khmd->hmqk", q, k) * 0.125
    s = s + torch.triu(q.new_full((L, L), -float("inf")), diagonal=1)
    return torch.einsum("hmqk,khmd->qhmd", s.softmax(-1), v).reshape(L, -1)


@form(lambda: [rand(B, L, H, D), rand(B, L, D), rand(B, L, D)])
def multi_query_with_heads_last(q, k, v):
    s = torch.einsum("bqhd,bkd->bhqk", q, k) * 0.125
    s = s.masked_fill(torch.ones(L, L, device=DEVICE).triu(1).bool(), -math.inf)
    return torch.einsum("bhqk,bkd->bqhd", s.softmax(-1), v).flatten(2)


@form(lambda: [*qkv(), rand(H, 1, 1)])
def learned_scale_and_softmax_by_hand(q, k, v, scale):
    s = (q @ k.mT) * scale.exp() * 0.1
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


# -- functions with a corner: eager's gradient at the corner itself -------------------------------------------------------
def on_the_corner() -> list[Any]:
    """Some scores are exactly 0, some biases exactly 0 or 1."""
    q, k, v = (x.detach() for x in qkv())
    q[:, :, 3] = 0.0
    return [*(x.requires_grad_() for x in (q, k, v)), torch.tensor([0.0, 1.0, 0.5] * (B * H * L), device=DEVICE)[: L * L].view(L, L).requires_grad_()]


CORNERS = {
    "relu": F.relu,
    "clamp_min": lambda s: s.clamp(min=0.0),
    "clamp_max": lambda s: s.clamp(max=0.0),
    "clamp": lambda s: s.clamp(0.0, 1.0),
    "hardtanh": lambda s: F.hardtanh(s, 0.0, 1.0),
    "relu6": F.relu6,
    "maximum": lambda s: torch.maximum(s, torch.zeros_like(s)),
    "max_of_two": lambda s: torch.max(s, torch.zeros_like(s)),
    "abs": torch.abs,
    "leaky_relu": lambda s: F.leaky_relu(s, 0.1),
    "silu": F.silu,
    "threshold": lambda s: F.threshold(s, 0.0, -3.0),
    "addcmul": lambda s: torch.addcmul(s, s, s, value=0.1),
    "cube": lambda s: s**3 * 0.1,
    "gelu": F.gelu,
    "gelu_tanh": lambda s: F.gelu(s, approximate="tanh"),
    "erf": torch.erf,
    "softplus": F.softplus,
    "softplus_above_its_threshold": lambda s: F.softplus(s, beta=2.0, threshold=1.0),
    "softplus_far_out": lambda s: F.softplus(s * 50) * 0.02,
    "log_sigmoid": F.logsigmoid,
    "mish": F.mish,
    "mish_far_out": lambda s: F.mish(s * 50) * 0.02,
    "elu": lambda s: F.elu(s, 0.7),
    "elu_far_out": lambda s: F.elu(s * 50) * 0.02,
    "selu": F.selu,
    "celu": lambda s: F.celu(s, 1.5),
    "hardsigmoid_above": lambda s: F.hardsigmoid(s * 3),
    "hardsigmoid_below": lambda s: F.hardsigmoid(s * -3),
    "hardswish_above": lambda s: F.hardswish(s * 3),
    "hardswish_below": lambda s: F.hardswish(s * -3),
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "prelu": lambda s: F.prelu(s, s.new_full((1,), 0.3)),
    "sign": lambda s: torch.sign(s) * torch.sqrt(s.abs() + 1),
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "sin": lambda s: torch.sin(s * 3),
    "cos": lambda s: torch.cos(s * 3),
    "exp2": lambda s: torch.exp2(s * 0.2),
    "two_to_the_power": lambda s: 2 ** (s * 0.2),
    "expm1": lambda s: torch.expm1(s * 0.2),
    "log1p": lambda s: torch.log1p(s.abs()),
    "log2": lambda s: torch.log2(s.abs() + 1),
    "log10": lambda s: torch.log10(s.abs() + 1),
    "fifth_power": lambda s: s**5 * 0.01,
    "power_of_three_halves": lambda s: F.relu(s) ** 1.5,
    "power_of_minus_two": lambda s: (s.abs() + 1) ** -2,
    "power_of_minus_three_halves": lambda s: (s.abs() + 1) ** -1.5,
    "lerp": lambda s: torch.lerp(s, torch.zeros_like(s), 0.3),
    "lerp_from_the_other_end": lambda s: torch.lerp(torch.ones_like(s), s, 0.8),
    "fmax": lambda s: torch.fmax(s, torch.zeros_like(s)),
    "fmax_second": lambda s: torch.fmax(torch.zeros_like(s), s),
    "fmin": lambda s: torch.fmin(s, torch.zeros_like(s)),
    "logaddexp": lambda s: torch.logaddexp(s, torch.zeros_like(s)),
    "logaddexp_of_equals": lambda s: torch.logaddexp(s, s * 1.0),
    "clamp_between_tensors": lambda s: s.clamp(torch.zeros(L, 1, device=DEVICE), torch.ones(L, device=DEVICE)),
    "clamp_to_a_tensor": lambda s: s.clamp(min=torch.zeros_like(s)),
    "finite": lambda s: s.masked_fill(~torch.isfinite(s), -1e4),
}
for _name, _function in CORNERS.items():
    FORMS[f"corner_{_name}"] = (lambda q, k, v, b, f=_function: (f(q @ k.mT) + f(b)).softmax(-1) @ v), on_the_corner


@pytest.mark.parametrize("fill", [-math.inf, math.inf])
@pytest.mark.parametrize("name", CORNERS)
def test_infinities_become_nan_where_eager_makes_it_of_them(name: str, fill: float) -> None:
    torch.manual_seed(0)
    inputs, added = qkv(), torch.zeros(L, L).masked_fill(torch.ones(L, L).triu(3).bool(), fill)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return CORNERS[name](q @ k.mT + added).softmax(-1) @ v

    ours, sites = sites_of(attention, *inputs)
    assert [s.fused for s in sites] == [True], sites[0]
    theirs = attention(*inputs)
    for a, b in zip(*((x, *torch.autograd.grad(x.sum(), inputs)) for x in (ours, theirs)), strict=True):
        assert torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("bias", [-math.inf, 0.0])
def test_logaddexp_of_equal_infinities(bias: float) -> None:
    """Eager's gradient of two equal infinities is NaN."""
    torch.manual_seed(0)
    mask, other = torch.zeros(L, L), torch.zeros(L, L)
    mask[3, 4], other[3, 4] = -math.inf, bias
    sites = check(lambda q, k, v: torch.logaddexp(q @ k.mT + mask, other).softmax(-1) @ v, qkv())
    assert sites[0].fused


@form(lambda: [*qkv(), rand(L, L)])
def linear_scores_with_a_bias(q, k, v, w):
    """A score product spelled as a Linear layer."""
    return F.linear(q[0, 0], k[0, 0], w[0]).softmax(-1) @ v[0, 0]


@form()
def matmul_of_linalg(q, k, v):
    return torch.linalg.matmul(torch.linalg.matmul(q, k.mT).softmax(-1), v)


# -- near misses -----------------------------------------------------------------------------------------------------------
MISSES: dict[str, tuple[Callable[..., Any], Callable[[], list[Any]], str]] = {}


def miss(code: str, inputs: Callable[[], list[Any]] = qkv) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        MISSES[function.__name__] = function, inputs, code
        return function

    return register


@miss("softmax_axis")
def softmax_over_queries(q, k, v):
    return (q @ k.mT).softmax(-2) @ v


@miss("not_query_times_key", lambda: [rand(3, 5, L, D), rand(1, 5, L, D), rand(3, 5, L, D)])
def rows_tied_to_one(q, k, v):
    return torch.einsum("hij,rhjc->rhic", torch.einsum("rhic,rhjc->hij", q, k).softmax(-1), v)


@miss("not_query_times_key", lambda: [rand(3, 5, L, D), rand(5, L, D), rand(3, 5, L, D)])
def rows_summed_beside_the_product(q, k, v):
    return torch.einsum("hij,rhjc->rhic", torch.einsum("rhic,hjc->hij", q, k).softmax(-1), v)


def square() -> list[Any]:
    return [rand(B, L, D), rand(B, D, 4, 4), rand(B, D, 4, 4)]


@miss("softmax_axis", square)
def keys_change_places(q, k, v):
    s = torch.einsum("bqc,bchw->bqhw", q, k)
    return torch.einsum("bqhw,bcwh->bqc", s.flatten(2).softmax(-1).view_as(s).mT, v)


@miss("softmax_axis", square)
def softmax_over_one_of_two_dimensions(q, k, v):
    return torch.einsum("bqhw,bchw->bqc", torch.einsum("bqc,bchw->bqhw", q, k).softmax(-1), v)


@miss("softmax_axis")
def softmax_over_heads(q, k, v):
    return (q @ k.mT).softmax(1) @ v


@miss("altered_softmax")
def sum_over_other_axis(q, k, v):
    e = torch.exp(q @ k.mT * 0.2)
    return (e / e.sum(-2).unsqueeze(-1)) @ v


@miss("altered_softmax")
def sum_detached(q, k, v):
    e = torch.exp(q @ k.mT * 0.2)
    return (e / e.sum(-1, keepdim=True).detach()) @ v


@miss("grad_mode")
def sum_without_gradient(q, k, v):
    e = torch.exp(q @ k.mT * 0.2)
    with torch.no_grad():
        total = e.sum(-1, keepdim=True)
    return (e / total) @ v


@miss("grad_mode")
def logsumexp_without_gradient(q, k, v):
    s = q @ k.mT * 0.2
    with torch.no_grad():
        total = s.logsumexp(-1, keepdim=True)
    return (s - total).exp() @ v


def _without_gradient(step):
    """A part of a softmax by hand under no_grad: eager's gradient does not go through it."""

    def function(q, k, v):
        s = q @ k.mT * 0.2
        e = (s - s.amax(-1, keepdim=True)).exp()
        total = e.sum(-1) if step is _restored else e.sum(-1, keepdim=True)
        with torch.no_grad():
            total = step(total)
        return (e * total if step in (torch.reciprocal, _over) else e / total) @ v

    return function


def _restored(total):
    return total.unsqueeze(-1)


def _over(total):
    return 1 / total


for _step in (_restored, _over, torch.reciprocal, lambda t: t + 1e-9, lambda t: t.clamp(min=1e-9)):
    miss("grad_mode")(_without_gradient(_step))
    MISSES[f"no_grad_{len(MISSES)}"] = MISSES.pop("function")


@miss("altered_softmax")
def summed_as_whole_numbers(q, k, v):
    e = torch.exp(q.detach() @ k.detach().mT * 0.2)
    return (e / e.sum(-1, keepdim=True, dtype=torch.int64)) @ v


@miss("altered_softmax")
def logsumexp_detached(q, k, v):
    s = q @ k.mT * 0.2
    return (s - s.logsumexp(-1, keepdim=True).detach()).exp() @ v


@miss("unsupported_op", lambda: [rand(7, D), rand(9, D), rand(2, 9, D), rand(2, 9)])
def factor_of_a_batch_that_only_values_have(q, k, v, b):
    return ((q @ k.mT).softmax(-1) * b[:, None]) @ v


@miss("no_rule", lambda: [*qkv(), rand(L, L), rand(L, L)])
def clamped_between_tensors(q, k, v, low, high):
    """Where the bounds meet neither has a gradient in eager."""
    return (q @ k.mT).clamp(low, high).softmax(-1) @ v


@miss("unsupported_product")
def product_of_a_chain(q, k, v):
    return torch.chain_matmul((q[0, 0] @ k[0, 0].mT).softmax(-1), v[0, 0])


@miss("unsupported_op")
def shifted_and_squared(q, k, v):
    """Only on one of the two ways to the softmax is the maximum a constant that does not matter."""
    s = q @ k.mT
    y = s - s.amax(-1, keepdim=True)
    return (y + 0.1 * y * y).softmax(-1) @ v


@miss("unsupported_op")
def shifted_and_clamped_on_one_way(q, k, v):
    s = q @ k.mT
    y = s - s.amax(-1, keepdim=True)
    return (y + y.clamp(min=-1)).softmax(-1) @ v


@miss("unsupported_op")
def shifted_scaled_and_one_added(q, k, v):
    """With a term more in the sum the maximum matters."""
    s = q @ k.mT
    e = torch.exp((s - s.amax(-1, keepdim=True)) * 0.5)
    return e / (1 + e.sum(-1, keepdim=True)) @ v


@miss("unsupported_op")
def shifted_scaled_and_a_tiny_number_added(q, k, v):
    s = q @ k.mT
    e = torch.exp((s - s.amax(-1, keepdim=True)) * 0.5)
    return e / (e.sum(-1, keepdim=True) + 1e-6) @ v


def row_of_the_least_number(q):
    return torch.zeros(L, L, device=q.device).index_fill(0, torch.tensor([2], device=q.device), torch.finfo(q.dtype).min)


@miss("scaled_shift")
def shifted_before_a_temperature(q, k, v):
    """A row of the least number alone is a row of zeros once shifted; without the shift it would be a row of -inf."""
    s = q @ k.mT + row_of_the_least_number(q)
    return ((s - s.amax(-1, keepdim=True)) / 0.07).softmax(-1) @ v


@miss("scaled_shift", lambda: [*qkv(), rand(H, L, L), rand(L, L)])
def shifted_and_scaled_by_more_after_a_mask_of_the_least_number(q, k, v, b, c):
    mask = torch.where(padded()[:, None, None], 0.0, torch.finfo(q.dtype).min)
    s = (q @ k.mT + b + c + mask) / 32
    return ((s - s.amax(-1).unsqueeze(-1)) * 33).softmax(-1) @ v


@miss("scaled_shift", lambda: [*qkv(), rand(L, L)])
def shifted_and_scaled_back_with_rounding(q, k, v, b):
    """The largest number divided and multiplied by 11.3 may come out as infinity."""
    s = (q @ k.mT + b) / 11.3
    return ((s - s.amax(-1).unsqueeze(-1)) * 11.3).softmax(-1) @ v


@miss("scaled_shift", lambda: [*qkv(), rand(L, L), rand(L, L)])
def shifted_before_another_mask(q, k, v, b, c):
    """The sum of two masks of the least number overflows; less its maximum the first is 0 in a row that it hides."""
    s = q @ k.mT + b
    return (s - s.amax(-1, keepdim=True) + c).softmax(-1) @ v


@miss("scaled_shift", lambda: [*qkv(), rand(L, L)])
def shifted_before_a_bias_that_a_mask_would_swallow(q, k, v, b):
    """A row of the least number is a row of zeros once shifted, so that the bias alone decides."""
    s = (q @ k.mT).masked_fill(row_of_the_least_number(q) < 0, torch.finfo(torch.float32).min)
    return ((s - s.amax(-1, keepdim=True) + b) * 0.5).softmax(-1) @ v


@miss("scaled_shift")
def shifted_and_scaled_up_and_down(q, k, v):
    """What overflows on the way stays infinite."""
    s = q @ k.mT + row_of_the_least_number(q)
    return ((s - s.amax(-1, keepdim=True)) * 32 / 64).softmax(-1) @ v


@miss("unsupported_op", lambda: [*qkv(), rand(L, L)])
def shifted_and_turned_round(q, k, v, b):
    """An infinite bias makes eager's row NaN, and would hide its key without the shift."""
    s = q @ k.mT + b
    return ((s - s.amax(-1, keepdim=True)) * -0.5).softmax(-1) @ v


@miss("scaled_shift")
def powers_of_ten_over_a_row_of_the_least_number(q, k, v):
    s = (q @ k.mT).masked_fill(row_of_the_least_number(q) < 0, torch.finfo(q.dtype).min)
    e = 10 ** (s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True) @ v


@miss("unsupported_op")
def shifted_before_a_soft_cap(q, k, v):
    s = q @ k.mT
    return torch.tanh(s - s.amax(-1, keepdim=True)).softmax(-1) @ v


@miss("unsupported_op")
def shifted_by_the_maximum_of_another_axis(q, k, v):
    s = q @ k.mT
    return ((s - s.amax(-2, keepdim=True)) * 2).softmax(-1) @ v


@miss("altered_softmax", lambda: [x.detach() for x in qkv()])
def softmax_with_a_mask_of_its_own(q, k, v):
    return torch._masked_softmax(q @ k.mT, torch.zeros(B, H, L, L, dtype=torch.bool, device=DEVICE), -1, 2) @ v


@miss("altered_softmax")
def divided_by_a_product_with_ones(q, k, v):
    e = torch.exp(q @ k.mT * 0.2)
    return e / (e @ torch.ones(L, 1, device=DEVICE)) @ v


@miss("altered_softmax")
def less_the_logarithm_of_another_sum(q, k, v):
    s = q @ k.mT
    return (s - torch.log((2 * s).exp().sum(-1, keepdim=True))).exp() @ v


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(v)
        return (q @ k.mT).softmax(-1) @ v

    @staticmethod
    def backward(ctx, grad):
        return grad, grad, grad


@miss("operator_body")
def own_gradient(q, k, v):
    return _Attention.apply(q, k, v)


@miss("unsupported_product")
def product_into_a_tensor(q, k, v):
    out = torch.empty_like(q)
    with torch.no_grad():
        torch.matmul((q @ k.mT).softmax(-1), v, out=out)
    return out * 2


@miss("unsupported_product")
def product_of_all_dimensions(q, k, v):
    return torch.tensordot((q[0, 0] @ k[0, 0].mT).softmax(-1), v[0, 0], dims=1)


@miss("softmax_axis")
def sum_over_some_keys(q, k, v):
    return (q @ k.mT).softmax(-1)[..., : L - 1] @ v[:, :, : L - 1]


@miss("not_attention", lambda: [*qkv(), rand(L, L), rand(L)])
def gate_before_a_linear_layer(q, k, v, w, b):
    return F.linear((q @ k.mT).softmax(-1), w, b)


@miss("post_softmax_op")
def probabilities_shifted(q, k, v):
    return ((q @ k.mT).softmax(-1) + 0.1) @ v


@miss("output_addend", lambda: [*qkv(), rand(B * H, L, L)])
def addend_times_zero(q, k, v, m):
    """Its gradient is zeros in eager, not absent."""
    return torch.baddbmm(m, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0).softmax(-1) @ v.flatten(0, 1)


@miss("renormalised")
def normalised_again(q, k, v):
    p = (q @ k.mT).softmax(-1)
    p = p / (p.sum(-1, keepdim=True) + 1e-6)
    return p @ v


@miss("softmax_axis", lambda: [*qkv(), rand(H, H)])
def talking_heads_after(q, k, v, w):
    return torch.einsum("bhqk,hg->bgqk", (q @ k.mT).softmax(-1), w) @ v


@miss("not_query_times_key", lambda: [*qkv(), rand(H, H)])
def talking_heads_before(q, k, v, w):
    return torch.einsum("bhqk,hg->bgqk", q @ k.mT, w).softmax(-1) @ v


@miss("detached")
def scores_detached(q, k, v):
    return (q @ k.mT).detach().softmax(-1) @ v


@miss("detached")
def probabilities_detached(q, k, v):
    return (q @ k.mT).softmax(-1).detach() @ v


@miss("grad_mode")
def probabilities_without_gradient(q, k, v):
    with torch.no_grad():
        p = (q @ k.mT).softmax(-1)
    return p @ v


@form()
def queries_and_keys_detached(q, k, v):
    """What to write instead of both."""
    return (q.detach() @ k.detach().mT).softmax(-1) @ v + 0 * (q + k)


@miss("gradient_hook")
def hook_on_the_scores(q, k, v):
    s = q @ k.mT
    s.register_hook(lambda g: g * 2)
    return s.softmax(-1) @ v


@miss("gradient_hook")
def hook_on_the_probabilities(q, k, v):
    p = (q @ k.mT).softmax(-1)
    p.register_hook(lambda g: g * 2)
    return p @ v


@miss("unsupported_op")
def two_that_are_not_elementwise(q, k, v):
    return (q @ k.mT).cumsum(-1).flip(-1).softmax(-1) @ v


@miss("not_attention")
def classifier(q, k, v):
    return (q @ k.mT).softmax(-1)


@miss("no_rule")
def function_without_a_rule(q, k, v):
    return torch.arctan(q @ k.mT).softmax(-1) @ v


@miss("no_rule")
def function_without_a_rule_in_a_mask(q, k, v):
    s = q @ k.mT
    return (s + torch.where(torch.special.i0(s) > 2, 0.0, -1.0)).softmax(-1) @ v


@miss("no_rule")
def power_that_costs_digits(q, k, v):
    return ((q @ k.mT).abs() ** 1.7).softmax(-1) @ v


@miss("whole_numbers")
def rounded_scores(q, k, v):
    """A last bit decides, which a kernel rounds in its own way."""
    return (torch.round((q @ k.mT) * 8) / 8).softmax(-1) @ v


@miss("whole_numbers")
def scores_rounded_down_by_a_division(q, k, v):
    return torch.div(q @ k.mT, 0.5, rounding_mode="floor").softmax(-1) @ v


@miss("unsupported_op")
def summed_up_scores(q, k, v):
    return (q @ k.mT).cumsum(-1).softmax(-1) @ v


@miss("no_score_matmul")
def gate(q, k, v):
    return k.mean(-1, keepdim=True).expand(B, H, L, L).cumsum(-1).softmax(-1) @ v


@miss("unsupported_op")
def sorted_scores(q, k, v):
    return (q @ k.mT).sort(-1).values.softmax(-1) @ v


@miss("scores_reindexed")
def groups_change_places(q, k, v):
    s = q @ k.mT
    return torch.cat([s[:, 2:] * 2, s[:, :2]], 1).softmax(-1) @ v


@miss("scores_reindexed")
def one_head_added_to_another(q, k, v):
    s = q @ k.mT
    return torch.cat([s[:, :1], s[:, 1:] + s[:, :1]], 1).softmax(-1) @ v


@miss("unsupported_op")
def one_group_by_a_function_with_a_pole(q, k, v):
    """For the other heads its derivative would be infinite, and 0 times that is NaN."""
    s = q @ k.mT
    return torch.cat([(s[:, :2] * s[:, :2]).log(), s[:, 2:].masked_fill(s[:, 2:] < -9, 0.0)], 1).softmax(-1) @ v


@miss("scores_reindexed")
def symmetric_scores(q, k, v):
    s = q @ k.mT
    return (s + s.mT).softmax(-1) @ v


@miss("dtype", lambda: [x.detach().double().requires_grad_() for x in qkv()])
def double_precision(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


@miss("dropout_of_everything")
def everything_dropped(q, k, v):
    return F.dropout((q @ k.mT).softmax(-1), 1.0) @ v


@miss("escape_after_dropout")
def dropped_probabilities_returned(q, k, v):
    p = F.dropout((q @ k.mT).softmax(-1), 0.3)
    return p @ v, p


DRAWS = ("dropped_probabilities_returned",)


@pytest.mark.parametrize("name", MISSES)
def test_near_miss_is_refused(name: str) -> None:
    torch.manual_seed(0)
    function, inputs, code = MISSES[name]
    tensors = inputs()
    result, sites = sites_of(function, *tensors)
    if name not in DRAWS:
        torch.testing.assert_close(result, function(*tensors))
    assert sites and not any(s.fused for s in sites)
    refusal = sites[0].refusal
    assert refusal is not None and refusal.code == code, str(refusal)
    assert "test_forms.py:" in sites[0].location


def added_to_the_sum(number: float, masked: bool = False, shifted: bool = True, deferred: bool = False) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT
        e = (s - s.amax(-1, keepdim=True) if shifted else s).exp()
        e = e * (torch.arange(L) < 5) if masked else e
        total = e.sum(-1, keepdim=True) + number
        return (e @ v) / total if deferred else e / total @ v

    return attention


def test_refusals_say_what_is_in_the_way() -> None:
    found = {}
    for name, function in {
        **{name: MISSES[name][0] for name in ("probabilities_detached", "scores_detached", "hook_on_the_scores", "hook_on_the_probabilities")},
        "probabilities without gradient": MISSES["probabilities_without_gradient"][0],
        "product without gradient": product_without_gradient,
        "two ops": MISSES["two_that_are_not_elementwise"][0],
        "no rule": MISSES["function_without_a_rule"][0],
        "no rule in this form": MISSES["power_that_costs_digits"][0],
        "rounding": MISSES["rounded_scores"][0],
        "1e-6": added_to_the_sum(1e-6),
        "1e-9 and a mask": added_to_the_sum(1e-9, masked=True),
        "1e-6 without the maximum, behind": added_to_the_sum(1e-6, shifted=False, deferred=True),
        "1e-6 behind": added_to_the_sum(1e-6, deferred=True),
    }.items():
        _, sites = sites_of(function, *qkv())
        found[name] = "; ".join(str(s.refusal and f"{s.refusal.code}: {s.refusal.text}") for s in sites)
    assert_expected_inline(
        "\n".join(f"{name}: {text}" for name, text in found.items()),
        """\
probabilities_detached: detached: the probabilities are detached before the product with the values, so eager gets no gradient through them
scores_detached: detached: the scores are detached before the softmax, so eager gets no gradient through them
hook_on_the_scores: gradient_hook: a gradient hook stands between the score matmul and the softmax
hook_on_the_probabilities: gradient_hook: a gradient hook stands between the softmax and the matmul
probabilities without gradient: grad_mode: the probabilities are computed under no_grad, the product with the values is not
product without gradient: grad_mode: the probabilities are computed with gradients, the product with the values under no_grad
two ops: unsupported_op: aten.flip.default, which is not elementwise, stands between the score matmul and the softmax
no rule: no_rule: aten.arctan.default, which is elementwise, but has no rule, stands between the score matmul and the softmax
no rule in this form: no_rule: aten.pow.Tensor_Scalar, which is elementwise, but has no rule in this form, stands between the score matmul and the softmax
rounding: whole_numbers: aten.round.default, which makes whole numbers, stands between the score matmul and the softmax
1e-6: altered_softmax: 1e-06 is added to the sum and counts: the sum may be 1, in which only up to 3e-08 is lost
1e-9 and a mask: altered_softmax: 1e-09 is added to the sum, which a mask may have made as small
1e-6 without the maximum, behind: altered_softmax: 1e-06 is added to the sum, which may be as small: no maximum is subtracted
1e-6 behind: altered_softmax: 1e-06 is added to the sum and counts: the sum may be 1, in which only up to 3e-08 is lost""",
    )


def product_without_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT).softmax(-1)
    with torch.no_grad():
        return p @ v


def test_write_between_the_matmuls_is_refused() -> None:
    """The values are written to after the scores but before their use: the fused call must not read them earlier or later."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = (q @ k.mT).softmax(-1)
        k.add_(1.0)
        return p @ v

    q, k, v = (torch.randn(B, H, L, D) for _ in range(3))
    expected = function(q, k.clone(), v)
    written = k.clone()
    result, sites = sites_of(function, q, written, v)
    assert sites[0].refusal is not None and sites[0].refusal.code == "mutation", str(sites[0])
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(written, k + 1)


def test_graph_break_between_the_matmuls_is_two_graphs_without_a_site() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT
        torch._dynamo.graph_break()
        return s.softmax(-1) @ v

    q, k, v = (torch.randn(B, H, L, D) for _ in range(3))
    _, sites = sites_of(function, q, k, v)
    assert [s.refusal.code for s in sites if s.refusal] == ["break_asked"]


def test_dropout_with_fallback_random_is_refused() -> None:
    with torch._inductor.config.patch(fallback_random=True):
        _, sites = sites_of(lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.3) @ v, *qkv())
    assert sites[0].refusal is not None and sites[0].refusal.code == "fallback_random"


def test_masking_again_with_another_mask_is_refused() -> None:
    """softmax of an all -inf row is NaN; masking it afterwards makes it 0, which a factor on NaN would not."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = (q @ k.mT).masked_fill(~padded()[:, None, None], -math.inf)
        return s.softmax(-1).masked_fill(~padded()[:, None, None] & (torch.arange(L) < 9), 0.0) @ v

    result, sites = sites_of(function, *qkv())
    assert sites[0].refusal is not None and sites[0].refusal.code == "post_mask_nan"
    assert torch.isnan(result[1]).all() and torch.isfinite(result[0]).all()


@pytest.mark.parametrize("bias", [torch.zeros(L, L), torch.full((L, L), math.nan)], ids=["zeros", "nan"])
def test_masking_again_beside_what_may_be_nan(bias: Tensor) -> None:
    """Another mask than before the softmax: a row of NaN may be 0 throughout. The same mask: whatever the bias holds, it comes out as in eager."""
    hidden, later = ~padded()[:, None, None], torch.ones(L, L, dtype=torch.bool).triu(1)

    def another(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT + bias).masked_fill(later, -1e4).softmax(-1).masked_fill(hidden, 0.0) @ v

    def same(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT + bias).masked_fill(hidden, -1e4).softmax(-1).masked_fill(hidden, 0.0) @ v

    inputs = [x.detach() for x in qkv()]
    for function, fuses in ((another, False), (same, True)):
        result, (site,) = sites_of(function, *inputs)
        assert site.fused == fuses and (fuses or (site.refusal and site.refusal.code == "post_mask_nan")), str(site)
        torch.testing.assert_close(result, function(*inputs), equal_nan=True)


@pytest.mark.parametrize("name", ["tokens_first_and_shared_keys", "tokens_first_and_expanded_keys", "multi_query_with_heads_last"])
def test_the_query_is_found_among_heads(name: str) -> None:
    """Not one of the heads: then the mask would not be causal, and keys would be expanded for each token."""
    torch.manual_seed(0)
    function, inputs = FORMS[name]
    _, (site,) = sites_of(function, *inputs())
    assert site.labels == ("causal",) and f", {L}, {D})" in site.shapes.split(", k ")[0], site.shapes


@pytest.mark.parametrize("name", ["grouped_repeat_interleave", "grouped_expand_reshape", "grouped_with_one_sequence"])
def test_key_heads_are_not_expanded(name: str) -> None:
    """Six query heads share two key heads: K and V enter the fused call with two."""
    function, inputs = FORMS[name]
    _, (site,) = sites_of(function, *inputs())
    batch = inputs()[0].shape[0]
    assert f"k ({batch}, 2, {L}, {D})" in site.shapes, site.shapes


def test_groups_differ_in_as_little_as_they_can() -> None:
    """Where only biases, masks or scales differ, the score goes one way."""
    names = ("slopes_of_two_groups", "groups_biased_masked_and_scaled", "each_head_by_itself", "groups_of_merged_heads")
    programs = [sites_of(FORMS[name][0], *FORMS[name][1]())[1][0].program for name in names]
    assert_expected_inline(
        "\n".join(programs),
        """\
where(h < 2, c0[min(h, 1)]*k/17, c1[0]*k/17) + s
(where(k - q < 1 or h >= 2, 0.3*s, -inf) + where(h < 2, c0[min(h, 1), q, k], c2[q, k]))*where(h < 2, c1[min(h, 1), 0, 0], 1)
s*where(h >= 1, where(h >= 2, 3, 2), 1) + where(h < 1, c0[h, q, k], where(h < 2, c0[0, k, q], c0[h, q, k]))
s - where(3*b + h >= 3, c0[q, k], 0) + where(3*b + h < 3, c0[q, k], 0)""",
    )


HIDDEN_ROW = torch.zeros(L, L).index_fill(0, torch.tensor([2]), -math.inf)
"""An additive mask under which row 2 sees no key."""


@pytest.mark.parametrize(
    "scores",
    [
        lambda s, mask: s + mask,
        lambda s, mask: s + mask.exp().log(),
        lambda s, mask: s - (1 / mask.exp() - 1),
        lambda s, mask: (s + (1 - mask.exp()) * torch.finfo(torch.float32).min) * 2,
        lambda s, mask: s * torch.where(mask == 0, 1.0, math.inf),
        lambda s, mask: (s * mask.exp()).relu().log(),
    ],
)
def test_choosing_away_what_may_be_nan_is_refused(scores: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Rows that may be -inf alone in other ways than by a fill."""
    mask, hidden = HIDDEN_ROW, HIDDEN_ROW < 0
    _, (site,) = sites_of(lambda q, k, v: scores(q @ k.mT, mask).softmax(-1).masked_fill(hidden, 0.0) @ v, *qkv())
    assert site.refusal is not None and site.refusal.code == "post_mask_nan", str(site)


@pytest.mark.parametrize("extra", ["learned", "product", "shifted"])
def test_choosing_away_next_to_what_is_finite_fuses(extra: str) -> None:
    """A learned bias, or another product of activations moved about, is as finite as the scores."""
    hidden = HIDDEN_ROW < 0
    table = torch.nn.Parameter(torch.randn(H, L, L))

    def function(q: Tensor, k: Tensor, v: Tensor, other: Tensor) -> Tensor:
        bias = table if extra == "learned" else q @ other if extra == "product" else F.pad(q @ other, (1, 0))[..., :-1]
        s = ((q @ k.mT + bias) * 0.3).masked_fill(hidden, torch.finfo(q.dtype).min)
        return s.softmax(-1).masked_fill(hidden, 0.0) @ v

    torch.manual_seed(0)
    result, (site,) = sites_of(function, *(inputs := [*qkv(), rand(D, L)]))
    assert site.fused, str(site)
    torch.testing.assert_close(result, function(*inputs))


@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_that_is_not_trained_may_be_a_mask(trained: bool) -> None:
    """Then it may hold -inf for a whole row, which the choice after the softmax turns into 0."""
    mask, hidden = torch.nn.Parameter(HIDDEN_ROW.clone(), requires_grad=trained), HIDDEN_ROW < 0
    inputs = qkv()
    result, (site,) = sites_of(lambda q, k, v: (q @ k.mT + mask).softmax(-1).masked_fill(hidden, 0.0) @ v, *inputs)
    assert site.fused == trained, str(site)
    assert trained or torch.isfinite(result).all()


# -- symbolic sizes ---------------------------------------------------------------------------------------------------------
NEEDS_NUMBERS = ("keys_treated_apart",)
"""Of a part of the keys it is not known that it has any, if its size is a symbol."""


WITHOUT_SIZES = {*SPELLINGS, *(n for n in FORMS if n.startswith("corner_"))} - set(SPELLINGS[::5])
"""Elementwise code alone, whatever the sizes: a few will do."""


@pytest.mark.parametrize("name", [n for n in FORMS if n not in NEEDS_NUMBERS and n not in WITHOUT_SIZES])
def test_form_fuses_with_symbolic_sizes(name: str) -> None:
    torch.manual_seed(0)
    function, inputs = FORMS[name]
    check(function, inputs(), dynamic=True)


SYMBOLIC_MISSES = ("softmax_over_queries", "rows_tied_to_one", "keys_change_places", "talking_heads_before", "groups_change_places", "symmetric_scores")


@pytest.mark.parametrize("name", [*SYMBOLIC_MISSES, *NEEDS_NUMBERS])
def test_a_refusal_says_which_sizes_are_symbols(name: str) -> None:
    function, inputs, code = MISSES.get(name) or (*FORMS[name], "scores_reindexed")
    tensors = inputs()
    result, (site, *_) = sites_of(function, *tensors, dynamic=True)
    torch.testing.assert_close(result, function(*tensors))
    assert site.refusal is not None and site.refusal.code == code and "sizes are symbols, s" in site.refusal.text, str(site)


OTHER_SIZES: dict[str, Callable[[], list[Any]]] = {
    "groups_of_a_size_left_open": lambda: [rand(3, 5, 12 * D), rand(3, 5, 4, D), rand(3, 5, 4, D)],
    "heads_of_a_number_left_open": lambda: [rand(3, 5, 12 * D), rand(3, 5, 3 * D), rand(3, 5, 3 * D)],
    "shifted_windows": lambda: [rand(15, 2, 9, 15), rand(15, 2, 9, 15), rand(15, 2, 9, 15), rand(2, 9, 9), rand(5, 9, 9, grad=False)],
    "windows_of_a_number": lambda: [rand(3, 5 * 8, 12) for _ in range(3)],
    "scores_of_the_last_keys": lambda: [rand(3, 2, 9, 4), rand(3, 2, 9, 4), rand(3, 2, 6, 4), rand(9, 6)],
    "tied_rows": lambda: [rand(2, 3, 9, 4), rand(2, 3, 7, 4), rand(2, 3, 7, 4)],
    "keys_of_two_dimensions": lambda: [rand(3, 5, 4), rand(3, 4, 7, 2), rand(3, 4, 7, 2)],
}


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_what_was_made_for_some_sizes_serves_others(name: str) -> None:
    """All that is taken from guards holds for them too, or they are compiled for."""
    function, inputs = FORMS[name]
    compiled = rewritten(function, dynamic=True)
    with collecting() as reports:
        for tensors in (inputs(), OTHER_SIZES[name]()):
            torch.testing.assert_close(compiled(*tensors), function(*tensors))
    assert [s.fused for r in reports for s in r.sites] == [True] * len(reports), str(reports)
    assert len(reports) == 1 or name == "groups_of_a_size_left_open", str(reports)  # two sizes that are equal share a symbol
