"""Small unmodified models with hand-written attention: Hugging Face's own eager code, torch's MultiheadAttention, and two classics
re-typed. Each entry builds (module, inputs); weights are spread out so that attention is far from uniform."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    sites: int


def _ids(batch: int = 2, length: int = 19, name: str = "input_ids") -> dict[str, Tensor]:
    return {name: torch.randint(5, 90, (batch, length))}


def _padded() -> dict[str, Tensor]:
    return {**_ids(), "attention_mask": (torch.arange(19)[None] < torch.tensor([[11], [19]])).long()}


def _images(size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size)}


def _causal(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, name)(vocab_size=100, use_cache=False, bos_token_id=1, eos_token_id=2, pad_token_id=0, **settings)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")

    return build


def _encoder(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return transformers.AutoModel.from_config(getattr(transformers, name)(**settings), attn_implementation="eager")

    return build


class NanoBlock(nn.Module):
    """The causal self-attention of a nanoGPT-like model: one projection, a triangle in a buffer, dropout twice."""

    def __init__(self, width: int = 48, heads: int = 3, longest: int = 64, p: float = 0.0) -> None:
        super().__init__()
        self.heads, self.p = heads, p
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("triangle", torch.ones(longest, longest).tril()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (y.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for y in self.inward(x).split(width, dim=2))
        weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = weights.masked_fill(self.triangle[:, :, :length, :length] == 0, float("-inf"))
        weights = F.dropout(F.softmax(weights, dim=-1), self.p, self.training)
        mixed = (weights @ v).transpose(1, 2).contiguous().view(batch, length, width)
        return F.dropout(self.outward(mixed), self.p, self.training)


class AnnotatedAttention(nn.Module):
    """Multi-head attention as in the Annotated Transformer: four linears, a mask of zeros filled with -1e9, the weights kept."""

    def __init__(self, width: int = 48, heads: int = 3) -> None:
        super().__init__()
        self.heads, self.weights = heads, None
        self.projections = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        batch = x.size(0)
        q, k, v = (p(y).view(batch, -1, self.heads, x.size(-1) // self.heads).transpose(1, 2) for p, y in zip(self.projections, (x, memory, memory)))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        mixed = torch.matmul(scores.softmax(dim=-1), v).transpose(1, 2).contiguous().view(batch, -1, x.size(-1))
        return self.projections[-1](mixed)


class HeadsLast(nn.Module):
    """Einsum attention with the head axis after the length axis."""

    def __init__(self, width: int = 48, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        weights = torch.einsum("bihd,bjhd->bhij", q * q.shape[-1] ** -0.5, k).softmax(dim=-1)
        return self.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(-2))


class WithWeights(nn.Module):
    """torch's own layer, asked for its weights: output and averaged probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(48, 3, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(x, x, x, need_weights=True)


_llama = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
_bert = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 100}
_deberta = {
    "relative_attention": True, "position_buckets": 16, "pos_att_type": ["c2p", "p2c"], "norm_rel_ebd": "layer_norm", "share_att_key": True,
    "position_biased_input": False, "max_position_embeddings": 64,
}  # fmt: skip
_swin = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "image_size": 64, "patch_size": 4, "window_size": 4, "drop_path_rate": 0.0}

_vit = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32, "patch_size": 8}

MODELS: dict[str, Model] = {
    "gpt2": Model(_causal("GPT2Config", n_embd=64, n_head=4, n_layer=2), _ids, 2),
    "bert": Model(_encoder("BertConfig", **_bert), _padded, 2),
    "llama": Model(_causal("LlamaConfig", **_llama), _ids, 2),
    "gemma2": Model(_causal("Gemma2Config", head_dim=16, sliding_window=8, **_llama), _ids, 2),
    "t5": Model(
        _encoder("T5Config", vocab_size=100, d_model=64, d_kv=16, num_layers=2, num_heads=4, d_ff=64, use_cache=False),
        lambda: {**_ids(), **_ids(length=9, name="decoder_input_ids")},
        6,
    ),
    "vit": Model(_encoder("ViTConfig", **_vit), lambda: _images(32), 2),
    "swin": Model(_encoder("SwinConfig", **_swin), lambda: _images(64), 4),
    "bloom": Model(_causal("BloomConfig", hidden_size=64, n_layer=2, n_head=4), _ids, 2),
    "deberta": Model(_encoder("DebertaV2Config", **_bert, **_deberta), lambda: _ids(length=16), 2),
    "nano": Model(NanoBlock, lambda: {"x": torch.randn(2, 19, 48)}, 1),
    "annotated": Model(
        AnnotatedAttention,
        lambda: {"x": torch.randn(2, 7, 48), "memory": torch.randn(2, 19, 48), "mask": torch.arange(19)[None, None] < torch.tensor([[[11]], [[19]]])},
        1,
    ),
    "heads_last": Model(HeadsLast, lambda: {"x": torch.randn(2, 19, 48)}, 1),
    "mha": Model(WithWeights, lambda: {"x": torch.randn(2, 19, 48)}, 1),
}  # fmt: skip


def build(name: str, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in training mode with every dropout at ``dropout``, and its inputs."""
    torch.manual_seed(0)
    entry = MODELS[name]
    model = entry.build()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
        for field in ("attention_dropout", "dropout", "attn_pdrop", "resid_pdrop", "hidden_dropout"):
            if isinstance(getattr(module, field, None), float):
                setattr(module, field, dropout)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.train(), entry.inputs()


def outputs_of(result: Any) -> list[Tensor]:
    """Floating-point tensors of a model's output."""
    values = [result] if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else result.values()
    return [t for t in values if isinstance(t, Tensor) and t.is_floating_point()]
