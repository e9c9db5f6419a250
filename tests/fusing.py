"""Compile a function with everything before Inductor, run the rewritten graph eagerly, and compare with eager code.

The two-reference rule: the error against fp64 may be at most twice eager's own error at the same dtype, plus a rounding floor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fa_inductor.backend import Compilation
from fa_inductor.options import Options
from fa_inductor.report import GraphReport, SiteReport, collecting

AUTOMATIC = Options()
FLOOR = {torch.float32: 4e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Rounding floor relative to the largest reference value: a unit in the last place of the low formats; in fp32 the rounding of
the stored lse alone changes every probability of a row by up to 1e-6 at |lse| = 16, and gradients of scalars sum such rows."""


def rewritten(function: Callable[..., Any], options: Options = AUTOMATIC, dynamic: bool | None = None) -> Callable[..., Any]:
    """``function`` compiled up to Inductor; the rewritten graph runs eagerly (with autograd)."""

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compilation = Compilation(gm, options, inputs)
        graph = compilation.run()
        compilation.announce()
        return compilation.guarded(graph.forward)

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, dynamic=dynamic)  # type: ignore[no-any-return]


def sites_of(function: Callable[..., Any], *inputs: Any, options: Options = AUTOMATIC, dynamic: bool | None = None) -> tuple[Any, list[SiteReport]]:
    """(result, one report per softmax)."""
    with collecting() as reports:
        result = rewritten(function, options, dynamic)(*inputs)
    return result, [s for r in reports for s in r.sites]


def refusals_of(reports: list[GraphReport]) -> list[str]:
    return [s.refusal.code for r in reports for s in r.sites if s.refusal]


def check(
    function: Callable[..., Tensor], inputs: Sequence[Any], sites: int = 1, options: Options = AUTOMATIC, dynamic: bool | None = None
) -> list[SiteReport]:
    """All ``sites`` softmaxes fuse, and the output and every gradient obey the two-reference rule."""
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad]
    result, reports = sites_of(function, *inputs, options=options, dynamic=dynamic)
    assert [s.fused for s in reports] == [True] * sites, "\n".join(map(str, reports))
    exact_inputs = [x.detach().double().requires_grad_(x.requires_grad) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    exact_leaves = [x for x in exact_inputs if isinstance(x, Tensor) and x.requires_grad]
    outputs = [result, function(*inputs), function(*exact_inputs)]
    tensors = [[o] if isinstance(o, Tensor) else [t for t in o if isinstance(t, Tensor)] for o in outputs]
    grads = [_gradients(o, x) for o, x in zip(tensors, (leaves, leaves, exact_leaves))]
    for ours, eager, exact in zip(*([*t, *g] for t, g in zip(tensors, grads))):
        assert_close(ours, eager, exact)
    return reports


def _gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    if not leaves:
        return []
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(o.shape, generator=generator, device="cpu").to(o) for o in outputs]
    total = sum((o * w).sum() for o, w in zip(outputs, weights) if o.requires_grad)
    return list(torch.autograd.grad(total, leaves))  # type: ignore[arg-type]


def assert_close(ours: Tensor, eager: Tensor, exact: Tensor) -> None:
    """Two-reference rule, with NaN and infinities in the same places."""
    assert ours.shape == eager.shape and ours.dtype == eager.dtype
    assert torch.equal(torch.isnan(ours), torch.isnan(eager)), "NaNs differ from eager's"
    finite = torch.isfinite(exact) & torch.isfinite(eager)
    if not finite.any():
        return
    scale = exact[finite].abs().max().clamp_min(1e-30)
    error, own = ((x.double() - exact)[finite].abs().max() / scale for x in (ours, eager))
    assert error <= 2 * own + FLOOR[ours.dtype], f"error {error:.2e}, eager's own {own:.2e}"
