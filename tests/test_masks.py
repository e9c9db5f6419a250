"""Spellings of masks: what each is recognised as, and that it is fused exactly, rows without a visible key included."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from fusing import check, rewritten, sites_of
from test_forms import FORMS, rand
from torch import Tensor

from fa_inductor.kernels import tiled
from fa_inductor.kernels.tiled import attention, schedule
from fa_inductor.options import Options

L, W = 24, 5
INF = -math.inf


def places(x: Tensor) -> tuple[Tensor, Tensor]:
    i = torch.arange(L, device=x.device)
    return i[:, None], i[None]


def tril(x, ids):
    return torch.tril(torch.ones(L, L, dtype=torch.bool, device=x.device))


def not_triu(x, ids):
    return ~torch.triu(torch.ones(L, L, dtype=torch.bool, device=x.device), 1)


def compared(x, ids):
    q, k = places(x)
    return k <= q


def shifted(x, ids):
    q, k = places(x)
    return q + 3 >= k


def lower_band(x, ids):
    q, k = places(x)
    return (k <= q) & (q - k < W)


def lower_band_of_triangles(x, ids):
    ones = torch.ones(L, L, dtype=torch.bool, device=x.device)
    return ones.tril() & ones.triu(-W)


def both_sides(x, ids):
    q, k = places(x)
    return (q - k).abs() <= W


def both_sides_by_difference(x, ids):
    ones = torch.ones(L, L, dtype=torch.bool, device=x.device)
    return ones.tril(W) & ~ones.tril(-W - 1)


def prefix(x, ids):
    q, k = places(x)
    return (k <= q) | (k < 7)


def prefix_written(x, ids):
    m = torch.ones(L, L, dtype=torch.bool, device=x.device).tril()
    return m | (torch.arange(L, device=x.device) < 7)


def prefix_of_each(x, ids):
    q, k = places(x)
    return (k <= q) | (k < ids[:, 4, None, None, None])


def chunks(x, ids):
    q, k = places(x)
    return q // 6 == k // 6


def causal_chunks(x, ids):
    q, k = places(x)
    return (q // 6 == k // 6) & (k <= q)


def chunks_by_division(x, ids):
    i = torch.div(torch.arange(L, device=x.device), 6, rounding_mode="floor")
    return i[:, None].eq(i)


def dilated(x, ids):
    q, k = places(x)
    return ((q - k) % 3 == 0) & (k <= q)


def strided_classes(x, ids):
    q, k = places(x)
    return q % 3 == k % 3


def global_and_local(x, ids):
    q, k = places(x)
    return ((q - k).abs() <= 2) | (k < 2) | (q < 2)


def local_and_chosen_tokens(x, ids):
    q, k = places(x)
    chosen = ids == 1
    return ((q - k).abs() <= 2) | chosen[:, None, None] | chosen[:, None, :, None]


def lengths(x, ids):
    return torch.arange(L, device=x.device) < ids.sum(-1)[:, None, None, None] % L


def key_padding(x, ids):
    return (ids != 0)[:, None, None]


def pairs_of_padding(x, ids):
    kept = ids != 0
    return kept[:, None, None] & kept[:, None, :, None]


def padding_and_causal(x, ids):
    return compared(x, ids) & (ids != 0)[:, None, None]


def documents(x, ids):
    return (ids[:, :, None] == ids[:, None])[:, None]


def documents_of_starts(x, ids):
    d = (ids == 0).cumsum(-1)
    return (d[:, None, :, None] == d[:, None, None]) & compared(x, ids)


def documents_by_difference(x, ids):
    return (ids[:, None, :, None] - ids[:, None, None]) == 0


def positions(x, ids):
    return ids[:, None, None, :] <= ids[:, None, :, None]


def positions_turned_round(x, ids):
    return ids[:, None, :, None] > ids[:, None, None, :]


def later_positions(x, ids):
    return ids[:, None, None, :] >= ids[:, None, :, None]


def other_documents(x, ids):
    return (ids[:, :, None] != ids[:, None])[:, None]


def butterfly(x, ids):
    """Blocks whose numbers differ in one bit at most."""
    block = torch.arange(L, device=x.device) // 4
    apart = block[:, None] ^ block[None]
    return (apart & (apart - 1)) == 0


def not_window(x, ids):
    q, k = places(x)
    return ~((q - k).abs() < W)


def anti_causal(x, ids):
    q, k = places(x)
    return k >= q


def all_but_itself(x, ids):
    return ~torch.eye(L, dtype=torch.bool, device=x.device)


def everything(x, ids):
    return torch.ones(L, L, dtype=torch.bool, device=x.device)


def given(x, ids):
    return torch.outer(ids[0] > 0, ids[1] > 0) | tril(x, ids)


def either_of_two(x, ids):
    q, k = places(x)
    return ((k <= q) & (q - k < W)) | ((q // 6 == k // 6) & (k < q))


def even_heads_causal(x, ids):
    q, k = places(x)
    return (torch.arange(2, device=x.device)[:, None, None] % 2 == 1) | (k <= q)


MASKS: list[Callable[[Tensor, Tensor], Tensor]] = [
    tril, not_triu, compared, shifted, lower_band, lower_band_of_triangles, both_sides, both_sides_by_difference, prefix, prefix_written, prefix_of_each,
    chunks, causal_chunks, chunks_by_division, dilated, strided_classes, global_and_local, local_and_chosen_tokens, lengths, key_padding, pairs_of_padding,
    padding_and_causal, documents, documents_of_starts, documents_by_difference, other_documents, positions, positions_turned_round,
    later_positions, butterfly, not_window, anti_causal, all_but_itself, everything, given,
    either_of_two, even_heads_causal,
]  # fmt: skip


def numbers() -> Tensor:
    """Document numbers, 0 where there is none; the second row begins with none."""
    found = torch.tensor([1] * 7 + [2] * 9 + [3] * 4 + [0] * 4)
    return torch.stack([found, found.flip(0)]).to(rand(1).device)


def inputs() -> list[Tensor]:
    return [*(rand(2, 2, L, 8) for _ in range(3)), numbers()]


def filled(mask: Callable[[Tensor, Tensor], Tensor], fill: float) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return (q @ k.mT * 0.35).masked_fill(~mask(q, ids), fill).softmax(-1) @ v

    return attention


FORMS |= {f"mask_{m.__name__}": (filled(m, INF), inputs) for m in MASKS}


@pytest.mark.parametrize("fill", [INF, -1e9, -1e4])
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.__name__)
def test_every_mask_is_exact(mask: Callable[[Tensor, Tensor], Tensor], fill: float) -> None:
    check(filled(mask, fill), inputs())


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 queries and 8 keys, of which 4 are skipped together."""
    monkeypatch.setattr(tiled, "Q_TILE", 4)
    monkeypatch.setattr(tiled, "K_TILE", 8)
    for module in (attention, schedule):
        monkeypatch.setattr(module, "FINE", 4)


@pytest.mark.parametrize("fill", [INF, -1e9, -1e4])
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.__name__)
def test_every_mask_is_exact_where_tiles_are_skipped(small_tiles: None, mask: Callable[[Tensor, Tensor], Tensor], fill: float) -> None:
    (site,) = check(filled(mask, fill), inputs(), options=Options(kernel="tiled"))
    assert "q_tile=4" in site.config


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.__name__)
def test_added_masks(small_tiles: None, mask: Callable[[Tensor, Tensor], Tensor]) -> None:
    def added(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        bias = torch.zeros_like(mask(q, ids), dtype=q.dtype).masked_fill(~mask(q, ids), torch.finfo(q.dtype).min)
        return ((q @ k.mT + bias).softmax(-1)) @ v

    check(added, inputs(), options=Options(kernel="tiled"))


@pytest.mark.parametrize("mask", [documents, chunks, prefix, causal_chunks, butterfly], ids=lambda m: m.__name__)
def test_tiles_are_skipped(small_tiles: None, monkeypatch: pytest.MonkeyPatch, mask: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Fewer scores are computed than there are, and none of a tile that is hidden."""
    computed: list[int] = []
    scores = attention.Attention.scores

    def counted(self, steps, chunk, rows, keys, apart, q):
        computed.append((rows[1] - rows[0]) * (keys[1] - keys[0]) * chunk.count)
        return scores(self, steps, chunk, rows, keys, apart, q)

    monkeypatch.setattr(attention.Attention, "scores", counted)
    monkeypatch.setattr(tiled, "ELEMENTS", 1)  # one head at a time
    q, k, v, ids = (x.detach() for x in inputs())
    visible = mask(q, ids).expand(2, 2, L, L)
    some = visible.reshape(2, 2, L // 4, 4, L // 4, 4).any(5).any(3)
    rewritten(filled(mask, INF), Options(kernel="tiled"))(q, k, v, ids)
    assert int(some.sum()) * 16 == sum(computed) < visible.numel(), (int(some.sum()) * 16, sum(computed))


def test_values_that_no_query_sees_do_not_reach_the_output(small_tiles: None) -> None:
    """Keys and values of another document may hold anything; so may their gradients' zeros."""
    q, k, v, ids = inputs()
    ids = torch.tensor([[1] * 12 + [2] * 12] * 2)
    exact = filled(documents, INF)(q, k, v, ids)
    with torch.no_grad():
        spoilt = [t.clone() for t in (k, v)]
        for t in spoilt:
            t[:, :, 12:] = math.nan
    result, _ = sites_of(filled(documents, INF), q, *(t.requires_grad_() for t in spoilt), ids, options=Options(kernel="tiled"))
    torch.testing.assert_close(result[:, :, :12], exact[:, :, :12])
    grads = torch.autograd.grad(result[:, :, :12].sum(), [q, *spoilt])
    assert all(bool(g[:, :, :12].isfinite().all()) for g in grads)


def test_kinds() -> None:
    rows = []
    for mask in MASKS:
        _, (site,) = sites_of(filled(mask, INF), *inputs())
        rows.append(f"{mask.__name__:26}{', '.join(site.labels)}")
    assert_expected_inline(
        "\n".join(rows),
        """\
tril                      causal
not_triu                  causal
compared                  causal
shifted                   window
lower_band                causal, window
lower_band_of_triangles   causal, window
both_sides                window
both_sides_by_difference  window
prefix                    prefix
prefix_written            prefix
prefix_of_each            prefix
chunks                    blocks
causal_chunks             causal, blocks
chunks_by_division        blocks
dilated                   causal, dilated
strided_classes           dilated
global_and_local          global
local_and_chosen_tokens   global
lengths                   key padding
key_padding               key padding
pairs_of_padding          key padding, query padding
padding_and_causal        causal, key padding
documents                 documents
documents_of_starts       causal, documents
documents_by_difference   documents
other_documents           other documents
positions                 causal positions
positions_turned_round    causal positions
later_positions           mask
butterfly                 mask
not_window                mask
anti_causal               window
all_but_itself            mask
everything                plain
given                     mask
either_of_two             mask
even_heads_causal         mask""",
    )


LOWEST = torch.finfo(torch.float32).min


def added(visible: Tensor, fill: float, x: Tensor) -> Tensor:
    return torch.zeros(visible.shape, dtype=x.dtype).masked_fill(~visible, fill)


USED_TWICE: dict[str, Callable[..., Tensor]] = {
    "multiplied and added": lambda s, m: s * m.to(s.dtype) + (1 - m.to(s.dtype)) * LOWEST,
    "multiplied and added, strictly causal": lambda s, m: (lambda c: s * c + (1 - c) * LOWEST)(torch.ones(m.shape[-2:], dtype=s.dtype).tril(-1)),
    "zero and finfo.min": lambda s, m: (s + 1).masked_fill(~m, 0.0) + added(m, LOWEST, s),
    "zero and -1e31": lambda s, m: s.masked_fill(~m, 0.0) + added(m, -1e31, s),
    "zero and -inf": lambda s, m: s.masked_fill(~m, 0.0) + added(m, INF, s),
    "a large number that is hidden": lambda s, m: torch.where(m, s, 3e38) + added(m, -1e31, s),
}


@pytest.mark.parametrize("length", [17, 140])
@pytest.mark.parametrize("name", USED_TWICE)
def test_a_mask_that_the_scores_use_too(name: str, length: int) -> None:
    """In a row without a visible key a hidden score counts, as what it is where its mask is false."""
    torch.manual_seed(0)
    visible = torch.rand(2, 1, length, length) > 0.5
    visible[:, :, 3] = False
    visible[1] = False
    q, k, v = (torch.randn(2, 2, length, 8, requires_grad=True) for _ in range(3))
    check(lambda q, k, v: USED_TWICE[name](q @ k.mT, visible).softmax(-1) @ v, (q, k, v))


def test_a_large_number_is_not_hidden_by_a_sum() -> None:
    visible = torch.ones(140, 140).tril().bool()
    inputs = [torch.randn(2, 2, 140, 8) for _ in range(3)]
    (site,) = check(lambda q, k, v: (torch.where(visible, q @ k.mT, 3e38) + added(visible, -1e31, q)).softmax(-1) @ v, inputs)
    assert site.labels == ("score function",)


def test_the_same_lowest_fill_twice_is_minus_infinity() -> None:
    torch.manual_seed(0)
    visible = torch.rand(2, 1, 17, 17) > 0.3
    visible[:, :, 2] = False
    inputs = [torch.randn(2, 2, 17, 8) for _ in range(3)]
    check(lambda q, k, v: ((q @ k.mT).masked_fill(~visible, LOWEST) + added(visible, LOWEST, q)).softmax(-1) @ v, inputs)


@pytest.mark.parametrize("score", [lambda s: s.relu().log(), lambda s: -(100 * s).exp()], ids=["log", "exp"])
def test_visible_scores_that_are_minus_infinity_themselves(score: Callable[[Tensor], Tensor]) -> None:
    """They lie below a finite fill: eager averages over the hidden keys of such a row."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 140, 8) for _ in range(3))
    check(lambda q, k, v: score(q @ k.mT).masked_fill(torch.ones(140, 140).triu(1).bool(), LOWEST).softmax(-1) @ v, (q, k, v))


@pytest.mark.parametrize("fill", [INF, LOWEST, -1e31])
@pytest.mark.parametrize("mask", [documents, chunks, prefix, causal_chunks], ids=lambda m: m.__name__)
def test_masks_of_floats_that_are_added(small_tiles: None, mask: Callable[[Tensor, Tensor], Tensor], fill: float) -> None:
    """A tensor of 0 and a fill hides tiles as its booleans would; rows without a key are eager's."""
    q, k, v, ids = inputs()
    for hidden_rows in (False, True):
        visible = mask(q, ids).expand(2, 1, L, L).clone()
        if hidden_rows:
            visible[..., 3:9, :] = False
        (site,) = check(lambda q, k, v, m: ((q @ k.mT / 3).tanh() * 9 + m).softmax(-1) @ v, (q, k, v, added(visible, fill, q)), options=Options(kernel="tiled"))
        assert "by_bias=True" in site.config


def test_a_bias_that_hides_is_skipped(small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    scores = attention.Attention.scores
    monkeypatch.setattr(attention.Attention, "scores", lambda self, *args: (computed.append(args[3][1] - args[3][0]), scores(self, *args))[1])
    q, k, v, ids = (x.detach() for x in inputs())
    function = rewritten(lambda q, k, v, m: (q @ k.mT + m).softmax(-1) @ v, Options(kernel="tiled"))
    counts = []
    for visible in (torch.ones(L, L, dtype=torch.bool), chunks(q, ids).expand(L, L)):
        computed.clear()
        function(q, k, v, added(visible, INF, q).expand(2, 1, L, L))
        counts.append(sum(computed))
    assert counts[1] * 2 < counts[0], counts


def test_a_trained_bias_is_not_searched() -> None:
    q, k, v = (torch.randn(2, 2, L, 8, requires_grad=True) for _ in range(3))
    (site,) = check(lambda q, k, v, m: (q @ k.mT + m).softmax(-1) @ v, (q, k, v, torch.randn(L, L, requires_grad=True)), options=Options(kernel="tiled"))
    assert "by_bias=False" in site.config
