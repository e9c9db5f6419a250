"""What the Triton kernels cannot do."""

from __future__ import annotations

import importlib.util

import torch

from fa_inductor.refusal import Refusal, declare
from fa_inductor.request import AttentionRequest

from .fold import reads

DEVICE = declare("triton-device", "Move the model to an NVIDIA GPU, or let another kernel serve this device.")
MISSING = declare("triton-missing", "Install Triton (it comes with PyTorch's CUDA wheels on Linux).")
CAPABILITY = declare("triton-capability", "The Triton kernels need an NVIDIA GPU of compute capability 8.0 or later.")
DTYPE = declare("triton-dtype", "Use float16, bfloat16 or float32 for queries, keys and values.")
HEAD_DIM = declare("triton-head-dim", "The Triton kernels serve head sizes up to 256.")
EMPTY = declare("triton-empty", "An attention over no keys, queries or heads has nothing to fuse.")
POST_GRADIENT = declare("triton-post-gradient", "A tensor that multiplies the probabilities needs a gradient.")

LARGEST_HEAD = 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def why_not(request: AttentionRequest) -> list[Refusal]:
    """Every reason against these kernels."""
    if importlib.util.find_spec("triton") is None:
        return [Refusal(MISSING, "Triton is not installed")]
    from .codegen import interpreting

    found: list[Refusal] = []
    if request.device != "cuda" and not interpreting():
        found.append(Refusal(DEVICE, f"tensors are on {request.device}, not on an NVIDIA GPU"))
    if request.device == "cuda" and (request.capability is None or request.capability < (8, 0)):
        found.append(Refusal(CAPABILITY, f"compute capability {request.capability} is below 8.0"))
    if request.q.dtype not in _DTYPES or any(t.dtype != request.q.dtype for t in (request.k, request.v)):
        found.append(Refusal(DTYPE, f"queries, keys and values are {request.q.dtype}, {request.k.dtype}, {request.v.dtype}"))
    if max(request.q.shape[3], request.v.shape[3]) > LARGEST_HEAD:
        found.append(Refusal(HEAD_DIM, f"head sizes {request.q.shape[3]} and {request.v.shape[3]}: at most {LARGEST_HEAD}"))
    if any(isinstance(n, int) and n == 0 for t in (request.q, request.k, request.v) for n in t.shape):
        found.append(Refusal(EMPTY, f"shapes {tuple(request.q.shape)}, {tuple(request.k.shape)}, {tuple(request.v.shape)}"))
    return found + _gradients(request)


def _gradients(request: AttentionRequest) -> list[Refusal]:
    """Captured tensors whose gradient has no kernel."""
    wanted = {i for i, c in enumerate(request.captures) if c.requires_grad}
    found = []
    for capture in sorted(reads(request.post) & wanted):
        found.append(Refusal(POST_GRADIENT, f"captured tensor {capture} multiplies the probabilities and needs a gradient"))
    return found
