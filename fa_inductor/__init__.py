"""Hand-written attention in unmodified PyTorch models, run as fused FlashAttention.

    torch.compile(model, backend="flashattn")   # nothing else to import

``explain(model)(*inputs)`` says what happened to each softmax and why; ``counters()`` counts.
"""

from .counters import counters, reset
from .explain import explain

__version__ = "0.1.0"
__all__ = ["__version__", "counters", "explain", "reset"]
