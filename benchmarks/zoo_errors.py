"""Errors of one run of a model against another, and the judgement of a record of ``zoo_runs.py``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

CLOSE = {"err": 1e-4, "grad_err": 1e-3}
"""Below these largest errors against eager no second reference is asked in float32."""
SMALL, SMALL_BFLOAT16 = 1e-3, 2e-2
"""Of the largest gradient: what is smaller is judged on this scale, since the gradient of a key bias, say, is rounding alone."""
FLOOR = 4 * torch.finfo(torch.float32).eps
WORST = 0.05
"""By how much a single gradient may exceed twice eager's error: all of them together are judged without this allowance."""


@dataclass
class Outcome:
    """Outputs and gradients by parameter."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)


def largest(got: Outcome, want: Outcome) -> dict[str, Any]:
    """Largest difference of outputs (relative to each) and of gradients (with the parameter it is at)."""
    outputs = [_largest(a, b, 0.0) for a, b in zip(got.outputs, want.outputs)]
    if len(got.outputs) != len(want.outputs):
        outputs.append(math.inf)
    gradients = {name: _largest(got.gradients[name], b, small(want, SMALL)) for name, b in want.gradients.items() if name in got.gradients}
    gradients |= dict.fromkeys(got.gradients.keys() ^ want.gradients.keys(), math.inf)
    worst = max(gradients, key=lambda n: gradients[n], default="")
    return {"err": max(outputs, default=0.0), "grad_err": gradients.get(worst, 0.0), "grad_worst": worst}


def norms(got: Outcome, exact: Outcome, least: float = SMALL) -> dict[str, Any]:
    """Norm of all differences relative to the norm of the exact values, for outputs and gradients; and of each gradient by itself."""
    if len(got.outputs) != len(exact.outputs) or got.gradients.keys() != exact.gradients.keys():
        return {"err": math.inf, "grad_err": math.inf, "each": {}}
    pairs = [(got.gradients[name], b) for name, b in exact.gradients.items()]
    each = {name: _norm([pair], small(exact, least)) for name, pair in zip(exact.gradients, pairs)}
    return {"err": _norm(list(zip(got.outputs, exact.outputs)), 0.0), "grad_err": _norm(pairs, 0.0), "each": each}


def small(outcome: Outcome, share: float) -> float:
    return share * max((float(_finite(g).abs().max()) for g in outcome.gradients.values() if g.numel()), default=0.0)


def two_reference(ours: dict[str, Any], eager: dict[str, Any]) -> bool:
    """Against the exact values at most twice eager's own error, for outputs and gradients together, and nearly so for each gradient.

    Nothing can be said where eager's own error is not finite.
    """
    together = all(ours[k] <= 2 * eager[k] + FLOOR < math.inf for k in ("err", "grad_err"))
    return together and all(e <= 2 * eager["each"].get(n, 0.0) + WORST for n, e in ours["each"].items())


def is_close(record: dict[str, Any]) -> bool:
    """Near enough to eager that nothing else need be asked."""
    return "error" not in record and all(record[k] <= bound for k, bound in CLOSE.items()) and not fails_elsewhere(record)


def fails_elsewhere(record: dict[str, Any]) -> bool:
    """Wrong or broken on a batch that it was not compiled for."""
    other = record.get("other_batch", 0.0)
    return str(other).startswith("failed") if isinstance(other, str) else not other <= CLOSE["grad_err"]


def verdict(record: dict[str, Any]) -> str:
    """ok, failed, inexact or random; with ", as plain Inductor" where that does no better."""
    plain = record.get("plain", {})
    if "error" in record:
        return "failed, as plain Inductor" if "error" in plain else "failed"
    if "eager_exact" in record and not two_reference(record["exact"], record["eager_exact"]):
        found = "random" if record["noise"] > CLOSE["err"] else "inexact"
        alike = "exact" in plain and not two_reference(plain["exact"], record["eager_exact"])
    elif fails_elsewhere(record):
        found, alike = "inexact on another batch", bool(plain) and fails_elsewhere(plain)
    else:
        return "ok"
    return found + ", as plain Inductor" * alike


def shortened(record: dict[str, Any]) -> dict[str, Any]:
    """Of the errors of single gradients only the three largest."""
    kept = {k: shortened(v) if isinstance(v, dict) and k != "each" else v for k, v in record.items()}
    if "each" in kept:
        kept["each"] = dict(sorted(kept["each"].items(), key=lambda item: -item[1])[:3])
    return kept


def ratio(record: dict[str, Any], key: str) -> float | None:
    """Error over eager's own, where that is a number."""
    if "exact" not in record or not 0 < record["eager_exact"][key] < math.inf:
        return None
    return float(record["exact"][key] / record["eager_exact"][key])


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x.detach().double(), 0.0, 1e4, -1e4).clamp(-1e4, 1e4)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(torch.isnan(a), torch.isnan(b))


def _largest(a: Tensor, b: Tensor, least: float) -> float:
    if not _alike(a, b):
        return math.inf
    if not b.numel():
        return 0.0
    a, b = _finite(a), _finite(b)
    return float((a - b).abs().max() / max(float(b.abs().max()), least, 1e-9))


def _norm(pairs: list[tuple[Tensor, Tensor]], least: float) -> float:
    """``least`` is the smallest root mean square that counts as a scale."""
    if not all(_alike(a, b) for a, b in pairs):
        return math.inf
    difference = sum(float(((_finite(a) - _finite(b)) ** 2).sum()) for a, b in pairs)
    scale = sum(float((_finite(b) ** 2).sum()) for _, b in pairs)
    count = sum(b.numel() for _, b in pairs)
    return math.sqrt(difference / max(scale, least**2 * count, 1e-18)) if count else 0.0
