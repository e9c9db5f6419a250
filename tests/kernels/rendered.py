"""Random conditions as Triton source: what a tile of scores becomes, against evaluation in PyTorch. On a GPU in assembly (see ``choices``)."""

from __future__ import annotations

import math
from typing import Any

import torch
from test_tile_map import Grammar, tensors
from torch import Tensor

from fa_inductor.kernels.triton_fa2.choices import function, names_in
from fa_inductor.kernels.triton_fa2.codegen import load_module
from fa_inductor.kernels.triton_fa2.helpers import TANH_EXACT
from fa_inductor.kernels.triton_fa2.render import Renderer
from fa_inductor.kernels.triton_fa2.text import kernel
from fa_inductor.program import Coordinates, ScoreProgram, dependencies, evaluate

_HEADER = "import triton\nimport triton.language as tl\n"


def source(program: ScoreProgram, edge: bool) -> str:
    """A kernel that writes the program's value on one tile: -inf past the last key."""
    ragged = {"k": ("k_rows[None, :]", "k_in[None, :]")} if edge else {}
    renderer = Renderer(program, {"score": "s", "b": "b", "h": "h", "q": "q_idx", "k": "k_idx"}, ("k",), "e", ragged)
    value = renderer.within(program.result, ("k_rows[None, :]", "Lk"), -math.inf) if edge else renderer.value(program.result)
    body = [
        "b = tl.program_id(0)",
        "h = tl.program_id(1)",
        "q_rows = tl.arange(0, M)",
        "k_rows = tl.arange(0, N)",
        "q_idx = tl.minimum(q_rows, Lq - 1)[:, None]",
        "k_in = k_rows < Lk",
        f"k_idx = {'tl.minimum(k_rows, Lk - 1)' if edge else 'k_rows'}[None, :]",
        *renderer.hoisted,
        "place = ((b * tl.num_programs(1) + h) * M + q_rows[:, None]) * N + k_rows[None, :]",
        "s = tl.load(S + place)",
        *renderer.lines,
        f"tl.store(OUT + place, {value} + tl.zeros([M, N], tl.float32))",
    ]
    captures = [p for c in sorted(program.reads()) for p in (f"C{c}", *(f"C{c}_s{d}" for d in range(program.captures[c].rank)))]
    return kernel("fill", ["S", "OUT", *captures, "Z0", "Z1", "Lq", "Lk"], ("M", "N"), [], body)


def value_on_tile(program: ScoreProgram, captures: list[Tensor], score: Tensor, lq: int, lk: int, edge: bool) -> Tensor:
    """``score``: (batch, heads, rows, columns) of whole tiles, as the result."""
    text = source(program, edge)
    module: Any = load_module(module_text(text, score.device.type == "cuda"))
    out = torch.full_like(score, math.nan)
    arguments: dict[str, Any] = {"S": score, "OUT": out, "Z0": lq, "Z1": lk, "Lq": lq, "Lk": lk, "M": score.shape[2], "N": score.shape[3]}
    for c in program.reads():
        arguments |= {f"C{c}": captures[c]} | {f"C{c}_s{d}": s for d, s in enumerate(captures[c].stride())}
    module.fill[(score.shape[0], score.shape[1])](**arguments)
    return out


def _compares_scalar_floats(program: ScoreProgram) -> bool:
    found, nodes = dependencies(program.nodes), program.nodes
    return any(n.type == "bool" and n.args and nodes[n.args[0]].type == "float" and not found[i] & {"q", "k", "score"} for i, n in enumerate(nodes))


def of_seed(seed: int) -> ScoreProgram:
    """A choice by a random condition between a score and a constant."""
    grammar = Grammar(seed)
    b = grammar.b
    shown, otherwise = b.emit("mul", b.score(), b.const(0.25)), b.const([-math.inf, -1e9, 0.0][seed % 3])
    condition = grammar.boolean(3)
    return b.finish(b.emit("where", condition, *((shown, otherwise) if seed % 2 else (otherwise, shown))))


def module_text(source: str, on_gpu: bool) -> str:
    return "\n".join([_HEADER, TANH_EXACT, *(function(name, on_gpu) for name in names_in(source)), source])


def compare(first: int, programs: int, device: str) -> int:
    """Conditions of ``programs`` seeds from ``first`` on; how many of them became choices."""
    found = 0
    for seed in range(first, first + programs):
        program = of_seed(seed)
        if _compares_scalar_floats(program):  # which are no conditions in Triton's interpreter
            continue
        g = torch.Generator().manual_seed(seed)
        batch, heads, lq, lk = (int(torch.randint(low, high, (), generator=g)) for low, high in ((1, 3), (1, 3), (1, 17), (1, 33)))
        edge = bool(seed % 5)
        lq, lk = (lq, lk) if edge else (16, 32)
        captures = tensors(batch, lq, lk, g)
        if seed % 7 == 0:
            captures[0] = captures[0] * ((1 << 32) + 1)  # numbers that 32 bits do not tell apart
        score = torch.randn(batch, heads, 16, 32, generator=g) * 3
        box = Coordinates((0, batch), (0, heads), (0, lq), (0, lk))
        expected = evaluate(program, box, score=score[:, :, :lq, :lk], captures=captures, sizes=(lq, lk), device=torch.device("cpu"))[0]
        expected = expected.expand(batch, heads, lq, lk)
        got = value_on_tile(program, [c.to(device) for c in captures], score.to(device), lq, lk, edge).cpu()
        torch.testing.assert_close(got[:, :, :lq, :lk], expected, rtol=1e-6, atol=1e-6, equal_nan=True, msg=lambda m: f"seed {seed}\n{program}\n{m}")  # noqa: B023
        assert not edge or bool((got[:, :, :lq, lk:] == -math.inf).all()), f"seed {seed}: a score past the end"
        found += any(name != "fa2_where_lt" for name in names_in(source(program, edge)))
    return found
