"""Real models: every attention site is rewritten, and outputs and gradients obey the two-reference rule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusing import AUTOMATIC, assert_close, rewritten
from model_zoo import MODELS, build, outputs_of
from torch import Tensor, nn

import fa_inductor
from fa_inductor.options import Options
from fa_inductor.report import collecting


def step(call: Callable[..., Any], model: nn.Module, inputs: dict[str, Tensor], autocast: torch.dtype | None = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and the gradients of a random projection of them."""
    model.zero_grad(set_to_none=True)
    device = next(iter(inputs.values())).device.type
    with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
        outputs = outputs_of(call(**inputs))
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
    sum((o * w).mean() for o, w in zip(outputs, weights)).backward()  # type: ignore[union-attr]
    return outputs, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check_model(name: str, options: Options = AUTOMATIC, dynamic: bool | None = None, device: str = "cpu", autocast: torch.dtype | None = None) -> None:
    model, inputs = build(name)
    model, inputs = model.to(device), {n: x.to(device) for n, x in inputs.items()}
    exact_model = copy.deepcopy(model).double()
    exact_inputs = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    compiled = rewritten(model, options, dynamic)
    ours, eager = step(compiled, model, inputs, autocast), step(model, model, inputs, autocast)
    exact = step(exact_model, exact_model, exact_inputs)
    counted = fa_inductor.counters()
    assert (counted["rewritten"], counted["refused"]) == (MODELS[name].sites, 0), counted
    for a, b, c in zip(ours[0], eager[0], exact[0]):
        assert_close(a, b, c)
    assert ours[1].keys() == eager[1].keys()
    # gradients share the scale of the largest: that of a key bias is zero but for rounding
    joined = [torch.cat([g[n].flatten() for n in eager[1]]) for g in (ours[1], eager[1], exact[1])]
    assert_close(*joined)


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    check_model(name)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "nano"])
def test_model_with_symbolic_sizes(name: str) -> None:
    check_model(name, dynamic=True)


@pytest.mark.parametrize("name", ["gpt2", "bert", "swin", "annotated"])
def test_model_under_autocast(name: str) -> None:
    check_model(name, autocast=torch.bfloat16)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_model_by_the_tiled_kernel(name: str) -> None:
    check_model(name, Options(kernel="tiled"))


def test_relative_position_table_gets_its_gradient() -> None:
    model, inputs = build("t5")
    step(rewritten(model), model, inputs)
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert table.grad is not None and table.grad.abs().max() > 0


@pytest.mark.parametrize("frozen", ["q_proj", "v_proj"])
def test_only_one_projection_trains(frozen: str) -> None:
    """As in LoRA: gradients for q alone, or v alone."""
    model, inputs = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen in name)
    ours, eager = step(rewritten(model), model, inputs), step(model, model, inputs)
    assert fa_inductor.counters()["rewritten"] == 2
    for name, gradient in eager[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_autocast_region_around_the_call() -> None:
    """The products compute in bfloat16 as in eager; the output's dtype is eager's."""
    model, inputs = build("nano")
    compiled = rewritten(model)
    with torch.autocast("cpu", torch.bfloat16):
        ours, eager = compiled(**inputs), model(**inputs)
    exact = copy.deepcopy(model).double()(inputs["x"].double())
    assert fa_inductor.counters()["rewritten"] == 1
    assert_close(ours, eager, exact)


def test_checkpointed_block() -> None:
    """Activation checkpointing inside the compiled model: the body's attention is fused too."""
    from torch.utils.checkpoint import checkpoint

    model, inputs = build("nano")

    def call(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="flashattn")
    ours, eager = step(compiled, model, inputs), step(call, model, inputs)
    assert fa_inductor.counters()["rewritten"] == 1
    torch.testing.assert_close(ours[0][0], eager[0][0], rtol=1e-4, atol=1e-5)
    for name, gradient in eager[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
def test_whole_compilation(train: bool) -> None:
    """Through Inductor's code generation, with the counters of the final graphs."""
    model, inputs = build("gpt2")
    model.train(train)
    compiled = torch.compile(model, backend="flashattn")
    if train:
        ours, eager = step(compiled, model, inputs), step(model, model, inputs)
        for name, gradient in eager[1].items():
            torch.testing.assert_close(ours[1][name], gradient, rtol=1e-3, atol=1e-6)
    else:
        with torch.no_grad():
            torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-4)
    counted = fa_inductor.counters()
    assert (counted["rewritten"], counted["forward"], counted["backward"]) == (2, 2, 2 if train else 0)


def test_lengths_change_without_recompiling() -> None:
    """dynamic=True: one compilation for all batch sizes and lengths."""
    model, _ = build("nano")
    compilations = []

    def count(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        from fa_inductor.backend import Compilation

        compilation = Compilation(gm, AUTOMATIC)
        graph = compilation.run()
        assert compilation.fused == 1
        compilations.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=count, dynamic=True)
    for batch, length in [(2, 19), (3, 19), (2, 40), (5, 33)]:
        x = torch.randn(batch, length, 48)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(compilations) == 1


def test_dropout_keeps_the_mean_and_its_gradient_is_consistent() -> None:
    """Kept probabilities are scaled by 1/(1-p): the mean over many draws is the undropped output; autograd matches differences."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 33, 8) for _ in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        return torch.dropout((q @ k.mT).softmax(-1), p, True) @ v

    compiled = rewritten(lambda q, k, v: attend(q, k, v, 0.25))
    draws = torch.stack([compiled(q, k, v) for _ in range(400)])
    assert fa_inductor.counters()["rewritten"] == 1
    error = (draws.mean(0) - attend(q, k, v, 0.0)).abs()
    assert (error <= 5 * draws.std(0) / 20 + 1e-6).all(), "the mean of 400 draws is further off than five standard errors"
    eager = torch.stack([attend(q, k, v, 0.25) for _ in range(400)])
    assert abs(draws.std(0).mean() / eager.std(0).mean() - 1) < 0.1
    # with V the identity the output is the dropped matrix itself; its transpose must be the gradient's map (the same mask)
    torch.manual_seed(5)
    matrix = compiled(q, k, torch.eye(33).expand(1, 2, 33, 33))
    v, weights = torch.randn(1, 2, 33, 33, requires_grad=True), torch.randn(1, 2, 33, 33)
    torch.manual_seed(5)
    (gradient,) = torch.autograd.grad(compiled(q, k, v), v, weights)
    torch.testing.assert_close(gradient, matrix.mT @ weights, rtol=1e-4, atol=1e-5)


def _of_small_layers(name: str, **settings: Any) -> nn.Module:
    import transformers

    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, name)(**sizes, **settings, use_cache=False, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def _packed() -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(n) for n in (100, 150, 50)]).expand(2, -1).contiguous()
    return {"input_ids": torch.randint(5, 90, (2, 300)), "position_ids": positions}


MASKED_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], list[tuple[str, ...]]]] = {
    "gemma2": (
        lambda: _of_small_layers("Gemma2Config", head_dim=8, sliding_window=64),
        lambda: {"input_ids": torch.randint(5, 90, (2, 300))},
        [("causal", "window", "soft-cap 50"), ("causal", "soft-cap 50")],
    ),
    "mistral": (
        lambda: _of_small_layers("MistralConfig", sliding_window=64),
        lambda: {"input_ids": torch.randint(5, 90, (2, 300))},
        [("causal", "window")] * 2,
    ),
    "llama, packed documents": (lambda: _of_small_layers("LlamaConfig"), _packed, [("causal positions", "documents")] * 2),
}


@pytest.mark.parametrize("name", MASKED_MODELS)
def test_the_masks_of_models_are_recognised(name: str) -> None:
    """The class of each layer's mask, from the unmodified model; the outputs are eager's."""
    torch.manual_seed(0)
    build_model, inputs, labels = MASKED_MODELS[name]
    model, given = build_model(), inputs()
    with torch.no_grad(), collecting() as reports:
        result = rewritten(model)(**given)
        torch.testing.assert_close(result[0], model(**given)[0], rtol=1e-4, atol=1e-4)
    assert [s.labels for r in reports for s in r.sites] == labels
