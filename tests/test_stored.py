"""Masks that a module keeps in a buffer: what they hold is recognised, relied on as long as it holds, and never after it changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import fusing
import pytest
import torch
from fusing import assert_close, rewritten
from torch import Tensor, nn

from fa_inductor import stored
from fa_inductor.options import Options
from fa_inductor.report import collecting
from fa_inductor.stored import Check, Reliance, StoredMask

S = 40


# -- bands -----------------------------------------------------------------------------------------------------------------
def dense(band: StoredMask, rows: int, columns: int) -> list[list[Any]]:
    low, high = (-math.inf if band.low is None else band.low), (math.inf if band.high is None else band.high)
    return [[band.inside if low <= j - i <= high else band.outside for j in range(columns)] for i in range(rows)]


@pytest.mark.parametrize("seed", range(60))
def test_bands_are_what_they_are_called(seed: int) -> None:
    """Any matrix that is called a band is that band, element by element; every band of two values is found."""
    g = torch.Generator().manual_seed(seed)
    rows, columns = (int(torch.randint(1, 9, (), generator=g)) for _ in range(2))
    low, high = sorted(int(torch.randint(-9, 10, (), generator=g)) for _ in range(2))
    i, j = torch.arange(rows)[:, None], torch.arange(columns)[None]
    inside = (j - i >= low) & (j - i <= high) if seed % 3 else j - i <= high
    dtype, values = [(torch.bool, (True, False)), (torch.float32, (0.0, -math.inf)), (torch.uint8, (1, 0)), (torch.float16, (-3.0, -0.0))][seed % 4]
    x, y = (torch.tensor(v, dtype=dtype) for v in (values if seed % 2 else values[::-1]))
    matrix = torch.where(inside, x, y)
    band = StoredMask.of(matrix.view(1, 1, rows, columns))
    assert band is not None
    assert dense(band, rows, columns) == matrix.tolist(), (band, matrix)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.index_put((torch.tensor(7), torch.tensor(3)), torch.tensor(False)),
        lambda m: m.index_put((torch.tensor(S - 1), torch.tensor(1)), torch.tensor(False)),
        lambda m: m.index_put((torch.tensor(0), torch.tensor(S - 2)), torch.tensor(True)),
        lambda m: m | m.flip(0),
        lambda m: torch.arange(S)[:, None] // 8 == torch.arange(S) // 8,
        lambda m: (torch.arange(S)[:, None] - torch.arange(S)) % 3 == 0,
        lambda m: m.float().masked_fill(~m, math.nan),
        lambda m: m.float() + 2 * torch.ones(S, S).triu(5),
        lambda m: (torch.arange(S)[:, None] - torch.arange(S)).float(),
        lambda m: m.expand(2, S, S),
        lambda m: m[0],
        lambda m: m.float().requires_grad_(),
        lambda m: nn.Parameter(m.float(), requires_grad=False),
        lambda m: m.to(torch.complex64),
        lambda m: m.float().to_sparse(),
        lambda m: m[:0],
        lambda m: torch.where(m, 0.0, -1e12),
        lambda m: m.float() * 0.1,
        lambda m: m.float() / 3,
        lambda m: m.float() * 2**24,
        lambda m: m.long() * (2**24 + 1),
        lambda m: m.long() * 2**62,
        lambda m: m.bfloat16() * -1e4,
        lambda m: torch.where(m, 0.0, -0.0).index_put((torch.tensor(3), torch.tensor(2)), torch.tensor(-0.0)),
    ],
)
def test_near_bands_are_none(change: Callable[[Tensor], Tensor]) -> None:
    assert StoredMask.of(change(torch.ones(S, S, dtype=torch.bool).tril())) is None


def test_minus_zero_is_another_value() -> None:
    """Code may divide by it."""
    zeros, half = torch.zeros(S, S), torch.where(torch.ones(S, S).tril().bool(), 0.0, -0.0)
    assert str(StoredMask.of(zeros)) == "0.0 everywhere" and str(StoredMask.of(-zeros)) == "-0.0 everywhere"
    assert str(StoredMask.of(half)) == "0.0 where column - row <= 0, else -0.0"
    check = Check(Reliance(StoredMask(None, None, 0.0, 0.0), zeros, stored.state_of(zeros)))
    assert check.holds(zeros) and not check.holds(-zeros) and not check.holds(zeros.neg_()) and check.holds(zeros.neg_())


@pytest.mark.parametrize("value", [-1e12, -3.4e38, 0.1, 1 / 3, 2.0**24])
@pytest.mark.parametrize("use", ["<=", "==", "* 3 =="])
def test_literals_are_compared_in_the_dtype_of_the_buffer(value: float, use: str) -> None:
    uses = {"<=": lambda m: m <= value, "==": lambda m: m == value, "* 3 ==": lambda m: m * 3 == 3 * value}
    model = Attention("gpt2")
    model.mask = torch.zeros(S, S).masked_fill(torch.ones(S, S).triu(1).bool(), value)
    model.hide = lambda s, m: s.masked_fill(uses[use](m), -1e9)
    compare(model, rewritten(model))


def test_a_write_while_compiling_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attention("gpt2")
    run = fusing.Compilation.run

    def written_then(self: fusing.Compilation) -> torch.fx.GraphModule:
        graph = run(self)
        model.mask.fill_(1.0)
        return graph

    monkeypatch.setattr(fusing.Compilation, "run", written_then)
    compare(model, rewritten(model))


def test_compiled_code_is_not_kept() -> None:
    import gc
    import weakref

    def compile_and_forget() -> weakref.ref[stored.Guarded]:
        model, made = Attention("gpt2"), []
        torch.compile(model, backend=lambda gm, inputs: made.append(_backend(gm, inputs)) or made[0])(torch.randn(2, 30, 16))
        torch._dynamo.reset()
        return weakref.ref(made.pop())

    found = [compile_and_forget() for _ in range(2)]
    gc.collect()
    assert [r() for r in found] == [None, None]


def test_what_is_saved_relies_on_nothing() -> None:
    model, x = Attention("gpt2"), torch.randn(2, 30, 16)
    compiled = torch.compile(model, backend="flashattn", fullgraph=True).forward
    if not hasattr(compiled, "aot_compile"):  # nothing to save there, so nothing to test: torch 2.11
        pytest.skip("this PyTorch does not save compiled functions")
    with collecting() as reports, torch.no_grad():
        saved = compiled.aot_compile(((x,), {}))
        torch.testing.assert_close(saved(model, x), model(x))
    assert [r.relies_on for r in reports] == [()]


def test_all_masks_of_a_model_that_change_are_remembered() -> None:
    model = nn.Sequential(*(Attention("gpt2") for _ in range(4)))
    with collecting() as reports:
        compiled = rewritten(model)
        for step in range(5):
            for layer in model:
                layer.mask.copy_(torch.ones(S, S).tril(step % 2))
            compare(model, compiled)
    assert len(reports) == 2


def test_long_matrices_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_CHUNK", 3 * S)
    triangle = torch.ones(S, S).tril()
    assert StoredMask.of(triangle) == StoredMask(None, 0, 1.0, 0.0)
    for row in range(S):
        flipped = triangle.clone()
        flipped[row, S // 2] = 7.0
        assert StoredMask.of(flipped) is None, row


def test_tensors_without_a_version_are_none() -> None:
    with torch.inference_mode():
        assert StoredMask.of(torch.ones(S, S).tril()) is None


# -- models ----------------------------------------------------------------------------------------------------------------
def ones() -> Tensor:
    return torch.ones(S, S)


KEPT: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor, Tensor], Tensor], tuple[str, ...]]] = {
    "gpt2": (lambda: ones().tril().view(1, 1, S, S), lambda s, m: s.masked_fill(m == 0, -math.inf), ("causal",)),
    "gpt2 bool": (lambda: ones().bool().tril().view(1, 1, S, S), lambda s, m: torch.where(m, s, torch.finfo(s.dtype).min), ("causal",)),
    "uint8": (lambda: ones().to(torch.uint8).tril(), lambda s, m: s.masked_fill(m.bool().logical_not(), -1e4), ("causal",)),
    "inverted": (lambda: ones().bool().triu(1), lambda s, m: s.masked_fill(m, -math.inf), ("causal",)),
    "added": (lambda: torch.full((S, S), -math.inf).triu(1), lambda s, m: s + m, ("causal",)),
    "multiplied": (lambda: ones().tril(), lambda s, m: s * m - 1e9 * (1 - m), ("score function",)),
    "window": (lambda: (ones().tril() - ones().tril(-8)).bool().view(1, 1, S, S), lambda s, m: torch.where(m, s, -1e9), ("causal", "window")),
    "everything": (lambda: ones().bool(), lambda s, m: s.masked_fill(~m, -math.inf), ("plain",)),
}


class Attention(nn.Module):
    def __init__(self, kept: str, heads: int = 2, persistent: bool = True) -> None:
        super().__init__()
        make, self.hide, _ = KEPT[kept]
        self.qkv, self.heads = nn.Linear(16, 48), heads
        self.register_buffer("mask", make(), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(c, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return (self.hide(scores, self.mask[..., :t, :t]).softmax(-1) @ v).transpose(1, 2).reshape(b, t, c)


def compare(model: nn.Module, compiled: Callable[..., Tensor], length: int = 30) -> None:
    """Output and gradients by two references."""
    x = torch.randn(2, length, 16)
    found = []
    for function, dtype in ((compiled, torch.float32), (model, torch.float32), (copy.deepcopy(model).double(), torch.float64)):
        leaf = x.to(dtype, copy=True).requires_grad_()
        out = function(leaf)
        parameters = list(function.parameters()) if isinstance(function, nn.Module) else list(model.parameters())
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        found.append([out.detach(), *torch.autograd.grad((out * weights).sum(), [leaf, *parameters])])
    for ours, eager, exact in zip(*found, strict=True):
        assert_close(ours, eager, exact)


@pytest.fixture(autouse=True)
def _forget() -> None:
    stored._changed.clear()
    torch.manual_seed(0)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kept", KEPT)
def test_what_a_buffer_holds_is_recognised(kept: str, dynamic: bool | None) -> None:
    model = nn.Sequential(Attention(kept), Attention(kept, persistent=False))
    with collecting() as reports:
        compiled = rewritten(model, dynamic=dynamic)
        for length in (30, S, 17):
            compare(model, compiled, length)
    sites = [s for r in reports for s in r.sites]
    assert sites and all(s.fused for s in sites) and {s.labels for s in sites} == {KEPT[kept][2]}, sites
    assert all("c0" not in s.program for s in sites), "a mask is still read"
    assert reports[0].relies_on == (f"0.mask and 1 more: {StoredMask.of(KEPT[kept][0]())}",)


def test_a_tensor_that_is_read_where_nothing_may_be_relied_on() -> None:
    model = Attention("gpt2")
    with collecting() as reports:
        compare(model, rewritten(model, Options(read_buffers=False)))
    assert reports[0].sites[0].labels == ("mask",) and reports[0].relies_on == ()


class Elsewhere(Attention):
    """The mask as a plain attribute, a parameter, or written to in the forward pass."""

    def __init__(self, where: str) -> None:
        super().__init__("gpt2")
        self.where, mask = where, self.mask
        if where != "written":
            del self.mask
            self.mask = nn.Parameter(mask, requires_grad=False) if where == "parameter" else mask

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "written":
            self.mask[..., 3, 4] = 1.0
        return super().forward(x)


@pytest.mark.parametrize(("where", "relied_on"), [("attribute", True), ("parameter", False), ("written", False)])
def test_only_what_is_fixed_and_left_alone(where: str, relied_on: bool) -> None:
    model = Elsewhere(where)
    with collecting() as reports, torch.no_grad():
        x, compiled = torch.randn(2, 30, 16), rewritten(model)
        torch.testing.assert_close(compiled(x), model(x))
        assert bool(reports[0].relies_on) == relied_on
        model.mask[..., 2, 9] = 1.0
        torch.testing.assert_close(compiled(x), model(x))


# -- changes ---------------------------------------------------------------------------------------------------------------
CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "fill": lambda m: m.mask.fill_(1.0),
    "one element": lambda m: m.mask[..., 2, 9].fill_(1.0),
    "copy": lambda m: m.mask.copy_(torch.rand_like(m.mask).round()),
    "view": lambda m: m.mask.view(-1)[: S * 3].fill_(1.0),
    "another tensor": lambda m: setattr(m, "mask", torch.rand(1, 1, S, S).round()),
    "data": lambda m: setattr(m.mask, "data", torch.rand(1, 1, S, S).round()),
    "loaded": lambda m: m.load_state_dict({**m.state_dict(), "mask": torch.ones(1, 1, S, S).tril(-1) + torch.eye(S) * (torch.arange(S) == 0)}),
    "another triangle": lambda m: m.mask.copy_(torch.ones(S, S).tril(3)),
}


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_heeded(change: str, watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not watched:  # as if Dynamo's guards could not be reached
        monkeypatch.setattr(stored.Guarded, "_watch", lambda self, inputs: False)
    model = Attention("gpt2")
    compiled = rewritten(model)
    compare(model, compiled)
    CHANGES[change](model)
    for _ in range(2):
        compare(model, compiled)


def test_what_changed_once_is_read_from_then_on() -> None:
    """One more compilation, however often it changes, and still fused."""
    model = Attention("gpt2")
    with collecting() as reports:
        compiled = rewritten(model)
        compare(model, compiled)
        for diagonal in range(5):
            model.mask.copy_(torch.ones(S, S).tril(diagonal - 2) + torch.eye(S))
            compare(model, compiled)
    assert [r.sites[0].labels for r in reports] == [("causal",), ("mask",)] and all(r.sites[0].fused for r in reports)


def test_ever_new_masks_settle() -> None:
    model = Attention("gpt2")
    with collecting() as reports:
        compiled = rewritten(model)
        for diagonal in range(9):
            model.mask = torch.ones(1, 1, S, S).tril(diagonal)
            compare(model, compiled)
    assert len(reports) == stored._MOST_COMPILATIONS + 1
    assert [bool(r.relies_on) for r in reports] == [True] * stored._MOST_COMPILATIONS + [False] and all(r.sites[0].fused for r in reports)


def test_the_same_content_is_not_compiled_anew() -> None:
    model = Attention("gpt2")
    with collecting() as reports:
        compiled = rewritten(model)
        compare(model, compiled)
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        compare(model, compiled)
        model.mask = model.mask.clone()
        compare(model, compiled)
        model.mask.fill_(0.5)
        model.mask.copy_(torch.ones(S, S).tril())
        compare(model, compiled)
    assert len(reports) == 1


def test_layers_that_share_a_graph_may_hold_different_masks() -> None:
    """GPT-Neo's: global and local layers in turn, each compiled by itself."""
    layers = [Attention("gpt2 bool"), Attention("window"), Attention("gpt2 bool")]
    layers[1].hide = layers[0].hide
    with collecting() as reports:
        compiled = rewritten(layers[0])
        torch._dynamo.reset()
        for layer in layers:
            layer.compile(backend=_backend)
        for layer in layers:
            x = torch.randn(2, 30, 16)
            torch.testing.assert_close(layer(x), Attention.forward(layer, x))
    assert compiled is not None
    assert [r.sites[0].labels for r in reports] == [("causal",), ("causal", "window")]


def _backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    compilation = fusing.Compilation(gm, fusing.AUTOMATIC, inputs)
    graph = compilation.run()
    compilation.announce()
    return compilation.guarded(graph.forward)


def test_a_check_looks_once_at_each_state(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    of = StoredMask.of
    monkeypatch.setattr(StoredMask, "of", staticmethod(lambda t: looked.append(1) or of(t)))
    triangle = torch.ones(S, S).tril()
    check = Check(Reliance(StoredMask(None, 0, 1.0, 0.0), triangle, stored.state_of(triangle)))
    assert check.holds(triangle) and not looked
    triangle[0, 5] = 1.0
    assert not check.holds(triangle) and not check.holds(triangle) and len(looked) == 1
    triangle[0, 5] = 0.0
    assert check.holds(triangle) and check.holds(triangle) and len(looked) == 2
    assert not check.holds("no tensor") and not check.holds(None) and not check.knows(None) and not check.holds(torch.ones(S, S).triu())


def test_a_change_between_forward_and_backward_changes_nothing() -> None:
    """Eager saved what it needed; the fused backward pass does not read the buffer."""
    model = Attention("gpt2")
    compiled = rewritten(model)
    x = torch.randn(2, 30, 16)
    results = []
    for function in (compiled, model):
        leaf = x.clone().requires_grad_()
        out = function(leaf)
        with torch.no_grad():
            model.mask.mul_(1.0)
        results.append([out.detach(), *torch.autograd.grad(out.sum(), leaf)])
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("train", [False, True])
def test_checkpointed_layers(train: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Attention("gpt2"), Attention("gpt2")])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = Checkpointed()
    with collecting() as reports, torch.set_grad_enabled(train):
        compiled = rewritten(model)
        x = torch.randn(2, 30, 16, requires_grad=train)
        ours, eager = compiled(x), model(x)
        torch.testing.assert_close(ours, eager)
        if train:
            for a, b in zip(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(eager.sum(), x), strict=True):
                torch.testing.assert_close(a, b)
    assert {s.labels for r in reports for s in r.sites} == {("causal",)}
    model.layers[1].mask.fill_(1.0)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


def test_through_inductor() -> None:
    model = Attention("gpt2")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="flashattn")
    compare(model, compiled)
    model.mask.fill_(1.0)
    compare(model, compiled)


def test_inference_mode() -> None:
    model = Attention("gpt2")
    compiled, x = rewritten(model), torch.randn(2, 30, 16)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))
        model.mask.fill_(1.0)
        torch.testing.assert_close(compiled(x), model(x))
    with torch.inference_mode():
        made_here = Attention("gpt2")
        torch.testing.assert_close(rewritten(made_here)(x), made_here(x))
