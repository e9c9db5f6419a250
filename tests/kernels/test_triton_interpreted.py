"""The Triton kernels against the fp64 reference, in Triton's interpreter (see ``triton_interpreted``)."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator

import pytest
from kernel_cases import CASES, FLOAT32_CASES
from triton_interpreted import Worker, small_tiles

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

HALF = [n for n in CASES if n.endswith(("-float16", "-bfloat16")) and n.rsplit("-", 1)[0] in ("plain", "causal_min", "softcap", "alibi_grad", "causal_inf-gqa")]
MASKED = [
    "causal_inf-rectangle",
    "causal_min-tall",
    "bottom_right_inf-tall",
    "bottom_right_min-tall",
    "window_inf",
    "band_min",
    "padding_replace_inf_hidden_rows",
    "padding_add_min_hidden_rows",
    "padding_replace_min-gqa",
    "causal_padding_inf",
    "causal_padding_min_hidden_rows",
    "left_padding_causal_min",
    "causal_bias_hqk_grad",
    "bias_bk_grad",
    "alibi_grad-gqa",
    "softcap_window_inf",
    "documents_inf",
    "bottom_right_inf-zero",
    "padding_replace_inf_hidden_rows-zero",
    "post_dense_grad",
    "swin_grad",
]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.mark.parametrize("name", [*FLOAT32_CASES, *HALF])
def test_case(worker: Worker, name: str) -> None:
    worker.run("case", name=name, config={})


@pytest.mark.parametrize("name", MASKED)
def test_small_tiles(worker: Worker, name: str) -> None:
    worker.run("case", name=name, config=small_tiles(16))


LISTED = ["documents_inf", "blocks_inf_hidden_rows", "blocks_min_hidden_rows", "float_mask_min_hidden_rows", "groups_of_heads_grad"]
BY_BIAS = ["float_mask_inf_hidden_rows", "float_mask_min_causal"]


@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize("name", [*LISTED, *BY_BIAS, *(f"{n}-rectangle" for n in LISTED[:4]), "blocks_inf_hidden_rows-zero"])
def test_lists_of_tiles_are_walked(worker: Worker, name: str, tile: int) -> None:
    worker.run("case", name=name, config=small_tiles(tile) | {"lists": True, "lists_bias": "float_mask" in name, "fwd_m": 32, "columns_n": 64})


@pytest.mark.parametrize(
    ("lq", "lk", "own", "listed", "columns"), [(70, 90, 16, 32, False), (70, 90, 32, 16, True), (64, 64, 64, 16, True), (1, 200, 16, 16, False)]
)
def test_lists_of_tiles(worker: Worker, lq: int, lk: int, own: int, listed: int, columns: bool) -> None:
    worker.run("lists_of_tiles", lq=lq, lk=lk, own=own, listed=listed, columns=columns)


@pytest.mark.parametrize("first", [0, 1000, 2000])
def test_conditions_are_what_they_were(worker: Worker, first: int) -> None:
    worker.run("rendered_conditions", first=first, programs=150)


@pytest.mark.parametrize("first", [0, 1000, 2000])
def test_no_claim_about_a_tile_is_wrong(worker: Worker, first: int) -> None:
    worker.run("map_claims", first=first, programs=100)


@pytest.mark.parametrize("layout", ["dense", "words", "odd", "transposed"])
@pytest.mark.parametrize("dtype", ["bool", "float32", "bfloat16", "float16", "int64"])
def test_map_of_numbers(worker: Worker, dtype: str, layout: str) -> None:
    worker.run("map_of_numbers", dtype=dtype, layout=layout)


SHARED = [(m, f, d) for m in ("documents", "tensor", "written") for f, d in ((-math.inf, True), (-1e9, False))]


@pytest.mark.parametrize(("mask", "fill", "dynamic"), [*SHARED, ("checkpoint", -math.inf, False)])
def test_layers_share_lists(worker: Worker, mask: str, fill: float, dynamic: bool) -> None:
    worker.run("shared_lists", mask=mask, fill=fill, dynamic=dynamic)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_statistics(worker: Worker, p: float) -> None:
    worker.run("dropout_statistics", p=p)


@pytest.mark.parametrize("config", [small_tiles(16), {"fwd_m": 64, "fwd_n": 32}, {"fwd_m": 32, "fwd_n": 128}])
def test_dropout_mask_is_the_same_for_every_tile(worker: Worker, config: dict[str, int]) -> None:
    worker.run("dropout_tiles", config=config)


def test_dropout_of_everything(worker: Worker) -> None:
    worker.run("dropout_everything")


@pytest.mark.parametrize("form", ["plain", "causal_inf", "post_head_mask_grad"])
@pytest.mark.parametrize("config", [small_tiles(16), {"rows_m": 64, "rows_n": 64, "columns_m": 16, "columns_n": 32}, {"columns_m": 64, "columns_n": 64}])
def test_dropout_gradients(worker: Worker, form: str, config: dict[str, int]) -> None:
    worker.run("dropout_gradients", form=form, config=config)


@pytest.mark.parametrize("form", ["plain", "causal_inf", "post_head_mask_grad"])
def test_dropout_gradients_of_windows(worker: Worker, form: str) -> None:
    worker.run("dropout_gradients", form=form, config={}, window=True)


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("form", ["plain", "bias_hqk_grad", "bias_bk_grad", "bias_q_grad", "alibi_grad"])
def test_partial_needs(worker: Worker, form: str, window: bool) -> None:
    worker.run("partial_needs", form=form, window=window)


SEPARATE = ["fa2_delta", "fa2_backward_rows", "fa2_backward_columns"]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("plain", ["fa2_backward_whole"]),
        ("causal_min", ["fa2_backward_whole"]),
        ("bias_hqk_grad", ["fa2_backward_whole", "fa2_sum"]),
        ("swin_grad", [*SEPARATE, "fa2_backward_table"]),
        ("alibi_grad", SEPARATE),
        ("bias_bk_grad", SEPARATE),
    ],
)
def test_one_launch_where_the_scores_are_one_tile(worker: Worker, form: str, expected: list[str]) -> None:
    worker.run("whole_launches", form=form, expected=expected)


@pytest.mark.parametrize("form", ["causal_inf", "bias_bk_grad"])
def test_split_columns(worker: Worker, form: str) -> None:
    worker.run("split_columns", form=form)


def test_functions_near_zero(worker: Worker) -> None:
    worker.run("functions_near_zero")


def test_strides_follow_inputs(worker: Worker) -> None:
    worker.run("strides_follow_inputs")
