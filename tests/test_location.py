"""Source positions and module paths read from node metadata."""

from __future__ import annotations

import inspect
import os

import pytest
import torch
from torch import fx, nn

import fa_inductor
from fa_inductor.location import location_of, module_path_of, source_line_of


def node(stack: str | None = None, modules: dict | None = None) -> fx.Node:
    graph = fx.Graph()
    made = graph.placeholder("x")
    if stack is not None:
        made.meta["stack_trace"] = stack
    if modules is not None:
        made.meta["nn_module_stack"] = modules
    return made


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        y, _ = self.attn(x, x, x)
        return (y * self.scale).softmax(-1)  # the line that is looked for


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return x


def captured(model, *inputs) -> fx.Graph:
    found = []

    def backend(gm, _):
        found.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return found[0]


def test_a_dynamo_graph_leads_to_the_users_line_and_module():
    softmaxes = [n for n in captured(Model(), torch.randn(3, 1, 8)).nodes if n.target == "softmax"]
    lines, first = inspect.getsourcelines(Block.forward)
    expected = first + next(i for i, line in enumerate(lines) if "looked for" in line)
    assert [module_path_of(n) for n in softmaxes] == ["h.0", "h.1"]
    for n in softmaxes:
        assert location_of(n).endswith(f"test_location.py:{expected}")
        assert source_line_of(n) == "return (y * self.scale).softmax(-1)  # the line that is looked for"


def test_frames_inside_torch_are_skipped():
    n = next(n for n in captured(Model(), torch.randn(3, 1, 8)).nodes if "multi_head_attention" in str(n.target))
    assert source_line_of(n) == "y, _ = self.attn(x, x, x)"
    assert module_path_of(n) == "h.0.attn"


def test_library_frames_count_as_the_users():
    stack = '  File "/home/u/main.py", line 3, in <module>\n    model(x)\n'
    stack += '  File "/v/lib/python3.11/site-packages/transformers/models/gpt2/modeling_gpt2.py", line 64, in f\n    softmax(w)\n      ^^^\n'
    assert location_of(node(stack)) == "transformers/models/gpt2/modeling_gpt2.py:64"
    assert source_line_of(node(stack)) == "softmax(w)"


def test_paths_below_the_current_directory_are_relative():
    stack = f'  File "{os.path.join(os.getcwd(), "src", "m.py")}", line 7, in f\n    y = x\n'
    assert location_of(node(stack)) == os.path.join("src", "m.py") + ":7"


def test_frames_of_python_itself_are_skipped():
    stack = f'  File "/home/u/main.py", line 3, in f\n    log()\n  File "{os.path.dirname(os.__file__)}/logging/__init__.py", line 9, in log\n    x\n'
    assert location_of(node(stack)) == "/home/u/main.py:3"


def test_only_torch_frames_still_give_one():
    stack = f'  File "{torch.__file__}", line 9, in f\n'
    assert location_of(node(stack)) == os.path.join("torch", "__init__.py") + ":9"
    assert source_line_of(node(stack)) == ""


@pytest.mark.parametrize("stack", [None, "", "nonsense\nFile"])
def test_unknown_positions_are_empty(stack):
    assert (location_of(node(stack)), source_line_of(node(stack)), module_path_of(node(stack))) == ("", "", "")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("L['self'].transformer.h.0.attn", "transformer.h.0.attn"),
        ("L['self']", ""),
        ("L['self']._modules['layers']._modules['3']", "layers.3"),
        ("L['self'].layers[3].attn", "layers.3.attn"),
        ("L['model'].h.0", "model.h.0"),
        ("G['net']", "net"),
        ("L['fn'].0", "0"),  # what torch.compile calls a module without a Python forward
        ("transformer.h.0", "transformer.h.0"),
        ("", ""),
    ],
)
def test_module_paths(path, expected):
    assert module_path_of(node(modules={"1": ("L['self']", Block), "2": (path, Block)})) == expected


def test_frames_of_this_package_are_skipped():
    """``explain`` calls the model; code without a file leaves nothing else."""
    stack = f'  File "{fa_inductor.__file__}", line 9, in call\n    return self(*args)\n'
    assert location_of(node(stack)) == ""
    assert location_of(node('  File "/home/u/main.py", line 3, in main\n    f()\n' + stack)) == "/home/u/main.py:3"
