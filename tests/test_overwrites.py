"""Scores and probabilities of which a part is written over in place, or that are padded."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from fusing import check, sites_of
from test_forms import FORMS, H, L, qkv, rand
from torch import Tensor


def hidden(like: Tensor) -> Tensor:
    return torch.ones(L, L, dtype=torch.bool, device=like.device).triu(1)


def absent(like: Tensor) -> Tensor:
    """Keys of each sequence that are padding; every query sees one."""
    return (torch.arange(L, device=like.device) > torch.tensor([[L], [5]], device=like.device))[:, None, None]


def masked_by_index(q, k, v):
    s = q @ k.mT
    s[absent(s).expand_as(s)] = -math.inf
    return s.softmax(-1) @ v


def masked_by_an_index_of_the_last_dimensions(q, k, v):
    s = q @ k.mT * 0.3
    s[:, :, hidden(s)] = torch.finfo(s.dtype).min
    return s.softmax(-1) @ v


def masked_by_an_index_of_the_batch(q, k, v):
    s = q @ k.mT
    s[torch.tensor([True, False], device=s.device)] = 0.5
    return s.softmax(-1) @ v


def mask_of_the_scores_themselves(q, k, v):
    s = q @ k.mT
    s[s < -1] = -3.0
    return s.softmax(-1) @ v


def last_key_hidden(q, k, v):
    s = q @ k.mT
    s[..., -1] = -1e4
    return s.softmax(-1) @ v


def first_keys_of_one_head_set(q, k, v):
    s = q @ k.mT
    s[:, 1, :, :4] = 1.5
    return s.softmax(-1) @ v


def one_head_shifted(q, k, v):
    s = q @ k.mT
    s[:, 1] += 2
    s[:, -1] *= 0.5
    return s.softmax(-1) @ v


def bias_beside_a_class_token(q, k, v, b):
    """The token at position 0 has no position."""
    s = q @ k.mT
    s[:, :, 1:, 1:] = s[:, :, 1:, 1:] + b
    return s.softmax(-1) @ v


def bias_added_to_a_part(q, k, v, b):
    s = q @ k.mT
    s[..., 1:, 1:] += b
    return s.softmax(-1) @ v


def not_itself(q, k, v):
    s = q @ k.mT
    s.diagonal(dim1=-2, dim2=-1).fill_(-math.inf)
    return s.softmax(-1) @ v


def not_the_next(q, k, v):
    s = q @ k.mT
    s.diagonal(1, -2, -1).fill_(-5.0)
    s.diagonal(-2, dim1=-2, dim2=-1).fill_(0.5)
    return s.softmax(-1) @ v


def softmax_plus_one_by_padding(q, k, v):
    return F.pad(q @ k.mT, (0, 1)).softmax(-1)[..., :-1] @ v


def padded_in_front_by_a_number(q, k, v):
    return F.pad(q @ k.mT, (2, 0), value=0.7).softmax(-1)[..., 2:] @ v


def first_key_dropped_afterwards(q, k, v):
    p = (q @ k.mT).softmax(-1).clone()
    p[..., 0] = 0
    p[:, :2] *= 0.5
    return p @ v


OVERWRITTEN = [
    *(masked_by_index, masked_by_an_index_of_the_last_dimensions, masked_by_an_index_of_the_batch, mask_of_the_scores_themselves, last_key_hidden),
    *(first_keys_of_one_head_set, one_head_shifted, not_itself, not_the_next, softmax_plus_one_by_padding, padded_in_front_by_a_number),
    first_key_dropped_afterwards,
]
FORMS |= {f.__name__: (f, qkv) for f in OVERWRITTEN}
BIASED = [bias_beside_a_class_token, bias_added_to_a_part]
FORMS |= {f.__name__: (f, lambda: [*qkv(), rand(H, L - 1, L - 1)]) for f in BIASED}


@pytest.mark.parametrize("name", [f.__name__ for f in (*OVERWRITTEN, *BIASED)])
@pytest.mark.parametrize("dynamic", [None, True])
def test_fuses(name: str, dynamic: bool | None) -> None:
    if dynamic and name in ("not_the_next", "first_key_dropped_afterwards"):
        pytest.skip("how long a diagonal is is not known of symbols; PyTorch 2.11 slices the whole batch too, which is not made functional then")
    torch.manual_seed(0)
    function, inputs = FORMS[name]
    check(function, inputs(), dynamic=dynamic)


def test_a_part_is_read_where_it_is() -> None:
    """Not at a place of its own: then the score would be read at two places."""
    _, (site,) = sites_of(bias_added_to_a_part, *qkv(), rand(H, L - 1, L - 1))
    assert_expected_inline(
        site.program,
        """\
t0 = c0[h, max(min(q + -1, 15), 0), max(min(k + -1, 15), 0)]
t1 = where(q >= 1, where(k >= 1, t0, 0), 0)
s + where(q >= 1, where(k >= 1, t0, t1), t1)""",
    )


def scattered_by_places(q, k, v):
    s = q @ k.mT
    s[..., torch.tensor([1, 3])] = -1e4
    return s.softmax(-1) @ v


def several_numbers_by_a_mask(q, k, v):
    s = q @ k.mT
    s[:, :, torch.eye(L, dtype=torch.bool)] = torch.arange(L, dtype=s.dtype)
    return s.softmax(-1) @ v


def every_second_key(q, k, v):
    s = q @ k.mT
    s[..., ::2] = -1e4
    return s.softmax(-1) @ v


def keys_swapped(q, k, v):
    s = (q @ k.mT).clone()
    s[..., :2] = s[..., 2:4]
    return s.softmax(-1) @ v


def queries_padded(q, k, v):
    """More queries than there are, whose scores are 0."""
    s = F.pad(q @ k.mT, (0, 0, 0, 3))
    return (s.softmax(-1) @ v)[:, :, :L]


def keys_padded(q, k, v):
    """Values of zeros for them."""
    return F.pad(q @ k.mT, (0, 3), value=-1e4).softmax(-1) @ F.pad(v, (0, 0, 0, 3))


@pytest.mark.parametrize("function", [scattered_by_places, several_numbers_by_a_mask, every_second_key, keys_swapped, queries_padded, keys_padded])
def test_near_misses(function: Callable[..., Tensor]) -> None:
    inputs = qkv()
    result, (site,) = sites_of(function, *inputs)
    assert site.refusal is not None and site.refusal.code in ("unsupported_op", "scores_reindexed", "not_query_times_key"), str(site)
    torch.testing.assert_close(result, function(*inputs))
