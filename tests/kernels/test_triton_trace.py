"""The launches under AOTAutograd-style tracing: fake CUDA tensors, symbolic lengths, no guards."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import Case, Dims, all_needs, problem
from torch import Tensor

from fa_inductor.kernels.triton_fa2 import KERNEL
from fa_inductor.request import Forward, Inputs, Needs, Plan

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

BATCH, LENGTH, HEADS, KV_HEADS, D = 3, 96, 4, 2, 64


class _State:
    plan: Plan
    needs: Needs
    dropout: float


@torch.library.triton_op("fa_inductor_test::triton_forward", mutates_args={})
def _forward(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], sizes: list[int], seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r = KERNEL.forward(_State.plan, Inputs(q, k, v, captures, sizes, _State.dropout, seed))
    return r.out, r.lse, *r.extra


@torch.library.triton_op("fa_inductor_test::triton_backward", mutates_args={})
def _backward(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], sizes: list[int], seed: Tensor, result: list[Tensor], grad: Tensor) -> list[Tensor]:
    out, lse, first, second = result
    g = KERNEL.backward(_State.plan, Inputs(q, k, v, captures, sizes, _State.dropout, seed), Forward(out, lse, (first, second)), grad, _State.needs)
    return [t for t in (g.q, g.k, g.v, *g.captures) if t is not None]


def _symbol(environment: Any, value: int, name: str) -> Any:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    return environment.create_symintnode(
        environment.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None), hint=value, source=source
    )


FORMS = ("plain", "causal_min", "bottom_right_min", "bias_hqk_grad", "bias_bk_grad", "alibi_grad", "padding_replace_min", "buckets_grad")
LISTED = ("documents_inf", "blocks_min_hidden_rows")
"""Masks whose tiles are listed."""


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("form", [*FORMS, *LISTED])
def test_traces_without_guards(form: str, dropout: float) -> None:
    check_trace(form, dropout, KV_HEADS, LENGTH, lengths_known=False)


@pytest.mark.parametrize("form", FORMS)
def test_traces_windows_without_guards(form: str) -> None:
    """Lengths are known and small, the number of windows is not: one kernel for all gradients."""
    check_trace(form, 0.0, HEADS, 49, lengths_known=True)


def check_trace(form: str, dropout: float, kv_heads: int, tokens: int, lengths_known: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    p = problem(Case("trace", form, Dims(BATCH, HEADS, kv_heads, tokens, tokens, D, D), torch.bfloat16))
    _State.plan, _State.needs, _State.dropout = KERNEL.plan(p.request(dropout)), all_needs(p), dropout
    if form in LISTED:
        several = {f"{kernel}_single": False for kernel in ("fwd", "rows", "columns")}
        _State.plan = replace(_State.plan, config=tuple(sorted((dict(_State.plan.config) | several | {"lists": True}).items())))
    environment = ShapeEnv()
    batch = _symbol(environment, BATCH, "B")
    length = tokens if lengths_known else _symbol(environment, tokens, "L")
    real = {BATCH: batch, tokens: length}

    def step(q: Tensor, k: Tensor, v: Tensor, seed: Tensor, grad: Tensor, *captures: Tensor) -> tuple[Tensor, ...]:
        sizes = [q.shape[2]] * len(p.form.sizes)
        result = _forward(q, k, v, list(captures), sizes, seed)
        return (result[0], *_backward(q, k, v, list(captures), sizes, seed, list(result), grad))

    with FakeTensorMode(shape_env=environment):

        def heads_last(heads: int) -> Tensor:
            return torch.empty((batch, length, heads, D), dtype=torch.bfloat16, device="cuda").transpose(1, 2)

        captures = [torch.empty([real.get(n, n) for n in c.shape], dtype=c.dtype, device="cuda") for c in p.captures]
        seed = torch.empty(2, dtype=torch.int64, device="cuda")
        inputs = (heads_last(HEADS), heads_last(kv_heads), heads_last(kv_heads), seed, heads_last(HEADS), *captures)
        before = len(environment.guards)
        graph = make_fx(step, tracing_mode="real")(*inputs)
    assert [str(g.expr) for g in environment.guards[before:]] == []
    out, dq, dk, dv, *rest = (n.meta["val"] for n in graph.graph.output_node().all_input_nodes)
    for got, like in ((out, inputs[0]), (dq, inputs[0]), (dk, inputs[1]), (dv, inputs[2])):
        assert [str(s) for s in (*got.shape, *got.stride())] == [str(s) for s in (*like.shape, *like.stride())]
    assert [str(t.shape) for t in rest] == [str(c.shape) for c, n in zip(captures, _State.needs.captures, strict=True) if n]
