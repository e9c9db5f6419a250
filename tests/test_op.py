"""The op: schema, fake, autograd with partial gradients, autocast, double backward, and caches in a second process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from kernel_cases import Case, Dims, problem

from fa_inductor.kernel_table import kernel_named
from fa_inductor.op import attention
from fa_inductor.request import Plan

FORMS = ["plain", "causal_inf", "bias_hqk_grad", "alibi_grad"]


def arguments(form: str, kernel: str = "tiled", dropout: float = 0.0):
    p = problem(Case(form, form, Dims(lq=9, lk=9, d=8, dv=8)))
    plan = kernel_named(kernel).plan(p.request(dropout)).to_text()
    seed = torch.tensor([3, 5]) if dropout else None
    return [p.q, p.k, p.v, list(p.captures), [], list(p.form.sizes), dropout, seed, plan]


@pytest.mark.parametrize("form", FORMS)
def test_opcheck(form: str) -> None:
    torch.library.opcheck(torch.ops.fa_inductor.attention.default, tuple(arguments(form)))


def test_opcheck_with_dropout() -> None:
    torch.library.opcheck(torch.ops.fa_inductor.attention.default, tuple(arguments("plain", dropout=0.25)))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_partial_gradients(wanted: tuple[int, ...]) -> None:
    full, part = arguments("plain"), arguments("plain")
    for i in range(3):
        full[i] = full[i].detach().requires_grad_()
        part[i] = full[i].detach().requires_grad_(i in wanted)
    expected = torch.autograd.grad(attention(*full)[0].square().sum(), [full[i] for i in wanted])
    found = torch.autograd.grad(attention(*part)[0].square().sum(), [part[i] for i in wanted])
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


def test_only_the_bias_needs_a_gradient() -> None:
    args = arguments("bias_hqk_grad")
    for i in range(3):
        args[i] = args[i].detach()
    args[3] = [c.detach().requires_grad_() for c in args[3]]
    (grad,) = torch.autograd.grad(attention(*args)[0].square().sum(), args[3])
    assert grad.shape == args[3][0].shape and grad.abs().max() > 0


def test_second_derivative_is_a_clear_error() -> None:
    args = arguments("plain")
    args[:3] = [x.detach().requires_grad_() for x in args[:3]]
    (g,) = torch.autograd.grad(attention(*args)[0].square().sum(), args[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        g.sum().backward()


def test_plan_travels_by_value() -> None:
    text = arguments("causal_inf")[-1]
    assert Plan.from_text(text).to_text() == text


def test_caches_hit_in_a_second_process(tmp_path) -> None:
    """Both Inductor's graph cache and AOTAutograd's know the plan by value: a new process finds what the first one stored."""
    script = textwrap.dedent(
        """
        import torch
        from torch._dynamo.utils import counters
        def f(q, k, v):
            return (q @ k.mT * 0.25).softmax(-1) @ v
        q, k, v = (torch.ones(2, 2, 16, 8).requires_grad_() for _ in range(3))
        torch.compile(f, backend="flashattn")(q, k, v).sum().backward()
        import fa_inductor
        counts = fa_inductor.counters()
        assert (counts["rewritten"], counts["forward"], counts["backward"]) == (1, 1, 1), counts
        print("HITS", counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"])
        """
    )
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    runs = [subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True) for _ in range(2)]
    assert all(r.returncode == 0 for r in runs), runs[-1].stderr[-2000:]
    hits = [[int(x) for x in r.stdout.split("HITS")[1].split()] for r in runs]
    assert sum(hits[0]) == 0 and sum(hits[1]) > 0, hits


def test_triton_launches_are_counted_by_their_kernel() -> None:
    """In a final graph a Triton kernel is a launch that names it by number only."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional

    from fa_inductor.op import count_calls

    def named(name: str):
        def kernel() -> None: ...

        kernel.__name__ = name
        return kernel

    graph = torch.fx.Graph()
    for name in ("fa2_forward", "fa2_delta", "fa2_backward_rows", "fa2_forward"):
        index = kernel_side_table.add_kernel(named(name))
        graph.call_function(triton_kernel_wrapper_functional, (), {"kernel_idx": index, "kwargs": {}})
    graph.output(None)
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert (count_calls(gm, backward=False), count_calls(gm, backward=True)) == (2, 1)
