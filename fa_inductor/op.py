"""The op ``fa_inductor::attention`` and its backward: one op for every kernel, with the plan passed by value as text.

    out = dropout(softmax(program(Q K^T)) * post) V,    lse = log sum exp(program(Q K^T))

Both are ``torch.library.triton_op``: AOTAutograd traces through them, so Inductor sees the kernels' own ATen calls and Triton
launches, not an opaque call (a quarter of an opaque op's host time, and no copies around it).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op

from .kernel_support import without_autocast
from .kernel_table import kernel_named
from .request import Forward, Inputs, Needs, Plan


@lru_cache(maxsize=1024)
def plan_from_text(text: str) -> Plan:
    return Plan.from_text(text)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor[] captures, Tensor[] tiles, SymInt[] sizes, float dropout_p, Tensor? seed"


@triton_op("fa_inductor::attention", mutates_args={}, schema=f"({_INPUTS}, str plan) -> (Tensor, Tensor, Tensor, Tensor)")
def attention(
    q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], tiles: list[Tensor], sizes: list[int], dropout_p: float, seed: Tensor | None, plan: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fused attention.

    Args:
        q: (B, Hq, Lq, D); k: (B, Hkv, Lk, D); v: (B, Hkv, Lk, Dv): same dtype, any strides, Hq % Hkv == 0.
        captures, sizes: what the plan's programs read.
        tiles: what ``find_tiles`` found for the plan, or nothing: the kernel then finds it itself.
        seed: int64 (2,) where dropout_p is above 0 or the program draws (``keep``), else None.
        plan: ``Plan.to_text()``.
    Returns:
        out (B, Hq, Lq, Dv); lse (B, Hq, Lq) fp32, natural log; two tensors that the kernel's backward wants.
    """
    chosen = plan_from_text(plan)
    with without_autocast(q.device.type):
        result = kernel_named(chosen.kernel).forward(chosen, Inputs(q, k, v, captures, sizes, dropout_p, seed, tiles))
    return result.out, result.lse, *result.extra


@triton_op(
    "fa_inductor::attention_backward",
    mutates_args={},
    schema=f"(Tensor grad_out, Tensor? grad_lse, {_INPUTS}, Tensor out, Tensor lse, Tensor extra0, Tensor extra1, bool[] needs, str plan) -> Tensor[]",
)
def attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], tiles: list[Tensor], sizes: list[int], dropout_p: float,
    seed: Tensor | None, out: Tensor, lse: Tensor, extra0: Tensor, extra1: Tensor, needs: list[bool], plan: str,
) -> list[Tensor]:  # fmt: skip
    """The gradients that ``needs`` (q, k, v, captures…) asks for, in that order; ``grad_lse`` as grad_out for the lse, None for zeros."""
    chosen = plan_from_text(plan)
    read = chosen.program.reads() | (chosen.post.reads() if chosen.post is not None else frozenset())
    wanted = Needs(needs[0], needs[1], needs[2], tuple(n and i in read for i, n in enumerate(needs[3:])))
    with without_autocast(q.device.type):
        grads = kernel_named(chosen.kernel).backward(
            chosen, Inputs(q, k, v, captures, sizes, dropout_p, seed, tiles), Forward(out, lse, (extra0, extra1)), grad_out, wanted, grad_lse
        )
    unread = (torch.zeros_like(c) if n and i not in read else g for i, (c, g, n) in enumerate(zip(captures, grads.captures, needs[3:])))
    found = [grads.q, grads.k, grads.v, *unread]
    missing = [i for i, (g, n) in enumerate(zip(found, needs)) if n and g is None]
    assert not missing, f"{chosen.kernel} returned no gradient for inputs {missing}"
    return [g for g, n in zip(found, needs) if n and g is not None]


@triton_op(
    "fa_inductor::find_tiles",
    mutates_args={},
    schema="(Tensor like, Tensor[] captures, SymInt[] sizes, SymInt[] shape, str kernel, str text) -> Tensor[]",
)
def find_tiles(like: Tensor, captures: list[Tensor], sizes: list[int], shape: list[int], kernel: str, text: str) -> list[Tensor]:
    """``Kernel.find_tiles`` in a graph, on the device of ``like``."""
    return kernel_named(kernel).find_tiles(text, captures, sizes, shape, like.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, captures, tiles, sizes, dropout_p, seed, plan = inputs
    out, lse, extra0, extra1 = output
    ctx.mark_non_differentiable(extra0, extra1)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *captures, *tiles, out, lse, extra0, extra1, seed)
    ctx.n_captures, ctx.n_tiles, ctx.sizes, ctx.dropout_p, ctx.plan = len(captures), len(tiles), list(sizes), dropout_p, plan


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *unused: Tensor | None) -> tuple[Any, ...]:
    n = ctx.n_captures
    saved = ctx.saved_tensors
    q, k, v, captures, tiles = saved[0], saved[1], saved[2], list(saved[3 : 3 + n]), list(saved[3 + n : 3 + n + ctx.n_tiles])
    out, lse, extra0, extra1, seed = saved[3 + n + ctx.n_tiles :]
    wanted = ctx.needs_input_grad
    per_capture = list(wanted[3]) if isinstance(wanted[3], (list, tuple)) else [False] * n
    needs = [bool(w) for w in (*wanted[:3], *per_capture)]
    found: list[Tensor | None] = [None] * (3 + n)
    if grad_out is None and grad_lse is not None:
        grad_out = torch.zeros_like(out)
    if grad_out is not None and any(needs):
        inputs = (q, k, v, captures, tiles, ctx.sizes, ctx.dropout_p, seed)
        given = iter(attention_backward(grad_out, grad_lse, *inputs, out, lse, extra0, extra1, needs, ctx.plan))
        found = [next(given) if wanted_one else None for wanted_one in needs]
    sizes: list[None] | None = None if ctx.sizes else []  # an empty list counts as a list of tensors
    return found[0], found[1], found[2], found[3:], [None] * ctx.n_tiles, sizes, None, None, None


def _no_double_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    raise RuntimeError("fa_inductor: fused attention has no second derivative; compile the function that needs one with backend='inductor'")


attention.register_autograd(_backward, setup_context=_setup_context)
attention_backward.register_autograd(_no_double_backward)


@torch.library.custom_op("fa_inductor::own_copy", mutates_args=())
def own_copy(x: Tensor) -> Tensor:
    """``x`` in memory of its own, with its strides. Opaque: Inductor removes a plain clone of what the backward pass saves."""
    return x.clone()


own_copy.register_fake(torch.empty_like)
own_copy.register_autograd(lambda ctx, grad: grad)

# the calls of a final graph that stand for one fused attention: one per kernel and direction
_FORWARD = re.compile(r"fa_inductor\.tiled_forward|_scaled_dot_product_\w*attention(_for_cpu)?(\.|$)|^fa2_forward$")
_BACKWARD = re.compile(r"fa_inductor\.tiled_backward|_scaled_dot_product_\w*attention\w*_backward|^fa2_(delta|backward_whole)$")


def count_calls(gm: torch.fx.GraphModule, backward: bool) -> int:
    """Fused attention calls in a final (post-AOTAutograd) graph; recomputed forwards of a backward graph are not counted."""
    mark = _BACKWARD if backward else _FORWARD
    graphs = [m.graph for m in gm.modules() if isinstance(m, torch.fx.GraphModule)]
    return sum(mark.search(_called(n)) is not None for g in graphs for n in g.nodes if n.op == "call_function")


def _called(node: torch.fx.Node) -> str:
    """Name of the op, or of the Triton kernel that a launch in the graph is of."""
    if "triton_kernel_wrapper" not in str(node.target):
        return str(node.target)
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    while not hasattr(kernel, "__name__"):  # an autotuner around the function
        kernel = kernel.fn
    return str(kernel.__name__)
