"""Which requests PyTorch's fused kernels express exactly, and in what form.

Facts about the kernels (measured with torch 2.13 on the CPU, torch 2.11 on an H200):

CPU flash      top-left causal at any lengths; grouped heads; Dv == D; a last stride other than 1 is read wrongly without an error; an
               additive mask in q's dtype or fp32 that broadcasts; a row whose mask is all -inf gives 0 where eager gives NaN; a row under
               a finite fill is right forward, but its gradient is not (lse swallows log of the row's sum).
CUDA           used for plain scale and causal with equal lengths only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fa_inductor.program import dependencies
from fa_inductor.program.affine import affine_form
from fa_inductor.program.evaluate import load_axes
from fa_inductor.program.ir import ScoreProgram
from fa_inductor.refusal import Refusal, declare
from fa_inductor.request import AttentionRequest, Size

PROGRAM = declare("sdpa_program", "PyTorch's fused attention takes scale * score + mask; other score functions run on the project's own kernels.")
MASK = declare("sdpa_mask", "The mask depends on query and key together: it would have to be stored, so kernels that compute it are used instead.")
ROWS = declare("sdpa_rows", "Rows without a visible key would differ from eager PyTorch; show that every row sees a key, or use another kernel.")
GRADIENT = declare("sdpa_gradient", "PyTorch's fused attention has no exact gradient for a site with a mask or bias; the project's own kernels have.")
LSE = declare("sdpa_lse", "PyTorch's fused attention has no gradient for the rows' normalisers; the project's own kernels have.")
POST = declare("sdpa_post", "PyTorch's fused attention has no factor on the probabilities.")
DROPOUT = declare("sdpa_dropout", "PyTorch's fused attention on the CPU has no dropout.")
SCORE_DROPOUT = declare("sdpa_score_dropout", "PyTorch's fused attention drops probabilities, not scores.")
DTYPE = declare("sdpa_dtype", "PyTorch's fused attention takes float16 and bfloat16, and float32 on the CPU.")
HEAD_SIZE = declare("sdpa_head_size", "PyTorch's fused attention kernels are limited in head sizes.")
STRIDES = declare("sdpa_strides", "PyTorch's fused attention reads tensors whose last dimension is contiguous.")
LENGTHS = declare("sdpa_lengths", "PyTorch's fused attention is not used on empty tensors, nor on CUDA for causal masks of unequal lengths.")
DEVICE = declare("sdpa_device", "PyTorch's fused attention is used on CPUs and on NVIDIA GPUs from compute capability 8.0.")
CHECKPOINT = declare("sdpa_checkpoint", "PyTorch's fused attention counts as random, and a checkpoint that trains nothing cannot run random operators again.")
DETERMINISTIC = declare("sdpa_deterministic", "This PyTorch kernel's backward pass is not deterministic.")

SWALLOWS = -1e30
"""A fill at or below this absorbs any score that is added to it: adding and replacing are the same in fp32."""


@dataclass(frozen=True)
class Expressed:
    """The request in the kernels' terms: ``scale * score + offset`` and the causal flag."""

    scale: float
    causal: bool
    offset: ScoreProgram | None


def express(request: AttentionRequest) -> Expressed | Refusal:
    """The exact form of a program, or why there is none."""
    facts = request.facts
    if facts.plain and facts.scale is not None:
        return Expressed(facts.scale, False, None)
    if facts.scale is not None and facts.bias is None and is_causal(request):
        return Expressed(facts.scale, True, None)
    form = affine_form(request.program)
    if form is None:
        return Refusal(PROGRAM, "the score function is not scale * score + mask")
    refusal = _replacing(request, form.replaced)
    return refusal or Expressed(form.scale, False, form.offset)


def is_causal(request: AttentionRequest) -> bool:
    """The mask is exactly ``k <= q``, and any fill does: each row sees a key."""
    mask = request.facts.mask
    if mask is None or not mask.only_these_terms or len(mask.terms) != 1 or not mask.every_row_visible:
        return False
    term = mask.terms[0]
    return term.kind == "upper" and term.bound is not None and term.bound.constant == 0 and not term.bound.terms


def _replacing(request: AttentionRequest, fills: tuple[float, ...]) -> Refusal | None:
    """A fill that replaces the score can be added instead where it swallows the score, or where each row sees another key."""
    mask = request.facts.mask
    visible = mask is not None and mask.every_row_visible and mask.only_these_terms
    for fill in fills:
        if fill <= SWALLOWS or (visible and fill <= -1e8):
            continue
        return Refusal(ROWS, f"hidden scores become {fill:g}, which is not the same as adding it in a row without a visible key")
    return None


def why_not_cpu(request: AttentionRequest) -> list[Refusal]:
    """Reasons against the CPU's flash kernel."""
    found = _common(request, (torch.float32, torch.bfloat16, torch.float16))
    if request.dropout_p > 0:
        found.append(Refusal(DROPOUT, f"dropout {request.dropout_p:g}"))
    if not _same_head_size(request):
        found.append(Refusal(HEAD_SIZE, f"values have head size {request.v.shape[3]}, keys {request.k.shape[3]}"))
    form = express(request)
    if isinstance(form, Refusal):
        return [*found, form]
    if form.offset is None:
        return found
    if request.needs_grad:
        found.append(Refusal(GRADIENT, "gradients are needed and the scores have a mask or bias"))
    refusal = _offset_refusal(request, form.offset)
    return found if refusal is None else [*found, refusal]


def _offset_refusal(request: AttentionRequest, offset: ScoreProgram) -> Refusal | None:
    """The offset must be small, or a tensor that exists already."""
    depends = dependencies(offset.nodes)[offset.result]
    if not {"q", "k"} <= depends:
        return None
    node = offset.nodes[offset.result]
    if node.op != "load" or load_axes(offset, node) is None:
        return Refusal(MASK, "the mask or bias depends on query and key positions and is not one stored tensor")
    dtype = request.captures[int(node.value)].dtype  # type: ignore[arg-type]
    if dtype not in (torch.float32, request.q.dtype):
        return Refusal(MASK, f"a stored bias of dtype {str(dtype).removeprefix('torch.')} would have to be converted")
    return None


def why_not_cuda(request: AttentionRequest, backend: str) -> list[Refusal]:
    """Reasons against cuDNN ("cudnn") or FlashAttention-2 ("flash") on CUDA."""
    found = _common(request, (torch.bfloat16, torch.float16))
    if request.capability is None or request.capability < (8, 0):
        found.append(Refusal(DEVICE, f"compute capability {request.capability}"))
    found += _cuda_head_size(request, backend)
    if backend == "cudnn" and request.deterministic and request.needs_grad:
        found.append(Refusal(DETERMINISTIC, "cuDNN's backward pass is not deterministic"))
    form = express(request)
    if isinstance(form, Refusal):
        return [*found, form]
    if form.offset is not None:
        found.append(Refusal(MASK, "masks and biases other than causal are not given to PyTorch's CUDA kernels"))
    lq, lk = request.q.shape[2], request.k.shape[2]
    if form.causal and not same_size(lq, lk):
        found.append(Refusal(LENGTHS, "causal with query and key lengths that may differ"))
    if backend == "cudnn" and any(isinstance(n, int) and n == 1 for n in (lq, lk)):
        found.append(Refusal(LENGTHS, "cuDNN is not used for a length of 1"))
    return found


def _cuda_head_size(request: AttentionRequest, backend: str) -> list[Refusal]:
    sizes = (request.q.shape[3], request.v.shape[3])
    most = 128 if backend == "cudnn" else 256
    if all(isinstance(n, int) and n % 8 == 0 and 0 < n <= most for n in sizes) and (backend == "cudnn" or sizes[0] == sizes[1]):
        return []
    return [Refusal(HEAD_SIZE, f"{backend} takes head sizes that are multiples of 8 up to {most}; here {sizes[0]} and {sizes[1]}")]


def _common(request: AttentionRequest, dtypes: tuple[torch.dtype, ...]) -> list[Refusal]:
    found = []
    if request.q.dtype not in dtypes:
        found.append(Refusal(DTYPE, f"q, k and v are {str(request.q.dtype).removeprefix('torch.')} on {request.device}"))
    if request.recomputed and not request.needs_grad:
        found.append(Refusal(CHECKPOINT, "inside a checkpoint, and no gradient is needed"))
    if request.program.drop_p is not None:
        found.append(Refusal(SCORE_DROPOUT, f"dropout {request.program.drop_p:g} of the scores"))
    if request.lse:
        found.append(Refusal(LSE, "the rows' normalisers are used, and differentiated"))
    if request.post is not None:
        found.append(Refusal(POST, "the probabilities are multiplied by a factor after the softmax"))
    if any(isinstance(n, int) and n == 0 for t in (request.q, request.k, request.v) for n in t.shape):
        found.append(Refusal(LENGTHS, "a dimension of size 0"))
    if not all(isinstance(t.stride[3], int) and t.stride[3] == 1 for t in (request.q, request.k, request.v)):
        found.append(Refusal(STRIDES, "the last dimension of q, k or v is not contiguous"))
    return found


def _same_head_size(request: AttentionRequest) -> bool:
    return same_size(request.k.shape[3], request.v.shape[3])


def same_size(a: Size, b: Size) -> bool:
    """Provably the same length, without a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    return False


BACKENDS: dict[str, Callable[[AttentionRequest], list[Refusal]]] = {
    "cudnn": lambda request: why_not_cuda(request, "cudnn"),
    "flash": lambda request: why_not_cuda(request, "flash"),
}


def choose(request: AttentionRequest) -> tuple[str, list[Refusal]]:
    """The first backend that serves the request, or "" and every reason."""
    if request.device == "cpu":
        reasons = why_not_cpu(request)
        return ("" if reasons else "cpu"), reasons
    if request.device != "cuda":
        return "", [Refusal(DEVICE, f"device {request.device}")]
    reasons = []
    for backend, why_not in BACKENDS.items():
        found = why_not(request)
        if not found:
            return backend, []
        reasons += [Refusal(r.code, f"{backend}: {r.text}") for r in found]
    return "", reasons


def minus_infinity_possible(offset: ScoreProgram) -> bool:
    """The offset may be -inf: a literal, or anything read from a floating tensor."""
    return any((n.op == "const" and n.value == -math.inf) or (n.op == "load" and n.type == "float") for n in offset.nodes)
