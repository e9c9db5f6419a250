"""Compiling generated kernels for a GPU that is not there: registers, spills and shared memory from the machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from kernel_cases import Case, Dims, problem

from fa_inductor.kernels.triton_fa2 import KERNEL
from fa_inductor.kernels.triton_fa2.codegen import columns_kernel, dense_kernel, forward_kernel, map_kernel, rows_kernel, traits_of
from fa_inductor.kernels.triton_fa2.template_backward import Wanted
from fa_inductor.kernels.triton_fa2.tile_lists import ROWS, RUNS
from fa_inductor.request import AttentionRequest, Plan

_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "bool": "i1", "int64": "i64", "int32": "i32"}
_FIXED = {
    "LSE": "*fp32",
    "DELTA": "*fp32",
    "LSE_LOW": "*fp32",
    "ROW_LSE": "*fp32",
    "ROW_LOW": "*fp32",
    "DLSE": "*fp32",
    "O32": "*fp32",
    "FLAG": "*i32",
    "WALK": "*i32",
    "SEED": "*i64",
    "dropout_p": "fp32",
}


@dataclass(frozen=True)
class Usage:
    """Of one thread (registers, stack bytes: spills) and one block (shared memory bytes); ``loops``: instructions of each loop of some length, in order."""

    registers: int
    stack: int
    shared: int
    assembly: str
    loops: tuple[int, ...]


def request_of(form: str, d: int, dtype: torch.dtype = torch.bfloat16, capability: tuple[int, int] = (9, 0), dropout: float = 0.0) -> AttentionRequest:
    p = problem(Case("offline", form, Dims(1, 2, 2, 16, 16, d, d), dtype))
    long = replace(p.request(dropout), device="cuda", capability=capability)
    shape = (64, 16, 4096, d)  # long enough not to shrink tiles
    return replace(long, q=replace(long.q, shape=shape), k=replace(long.k, shape=shape), v=replace(long.v, shape=shape))


def plan_of(form: str, d: int, dtype: torch.dtype = torch.bfloat16, capability: tuple[int, int] = (9, 0), dropout: float = 0.0) -> Plan:
    return KERNEL.plan(request_of(form, d, dtype, capability, dropout))


def kernels(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Name in the plan's config, and JIT function, of every kernel of a training step."""
    yield "fwd", forward_kernel(plan)
    yield "rows", rows_kernel(plan, Wanted(frozenset("q")), ())
    for part in ("v", "k") if plan.get("split") else ("kv",):
        yield "columns", columns_kernel(plan, Wanted(frozenset(part)), ())
    wanted = [i for i, c in enumerate(plan.program.captures) if c.dtype.startswith(("float", "bfloat"))]
    for gradient in traits_of(plan).backward_flavour(True, wanted)[1]:
        if {"q", "k"} <= set(gradient.letters):
            yield "dense", dense_kernel(plan, gradient)
            if gradient.table_dimension is not None:
                yield "dense", dense_kernel(plan, gradient, True)


def compile_kernel(function: Any, plan: Plan, name: str, dtype: torch.dtype, capability: tuple[int, int], fixed: Mapping[str, int] | None = None) -> Usage:
    """``fixed``: arguments compiled in as constants, as Inductor does with the number 1."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants: dict[str, Any] = {
        "BLOCK_M": plan.get(f"{name}_m"),
        "BLOCK_N": plan.get(f"{name}_n"),
        **{n: v for n, v in (fixed or {}).items() if n in function.arg_names},
    }
    element = "*" + _TYPES[str(dtype).removeprefix("torch.")]
    constants |= {f"C{c}_s{plan.program.captures[c].rank - 1}": 1 for c in traits_of(plan).captures if f"C{c}" in function.arg_names}  # dense, as most are
    signature, attributes = {}, {}
    for i, argument in enumerate(function.arg_names):
        if re.search(r"_s3$", argument):
            constants[argument] = 1  # as Triton specialises a unit stride
        aligned = re.search(r"_s\d$", argument)
        if argument in constants:
            kind = "constexpr"
        elif capture := re.fullmatch(r"C(\d+)", argument):
            kind, aligned = "*" + _TYPES[plan.program.captures[int(capture[1])].dtype], capture
        elif re.fullmatch(r"[QKVO]|D[OQKV]", argument):
            kind, aligned = element, re.search("", "")
        else:
            kind = _FIXED.get(argument, "*fp32" if re.fullmatch(r"G\d+", argument) else "i32")
            aligned = aligned or kind.startswith("*")
        signature[argument] = kind
        if aligned and kind != "constexpr":
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": plan.get(f"{name}_warps"), "num_stages": plan.get(f"{name}_stages")}
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    return _usage(triton.compile(source, target=target, options=options), triton)


def compile_map(form: str, capability: tuple[int, int]) -> Usage:
    """``fa2_map`` for a form's conditions, in tiles of 64 x 64."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    program = traits_of(plan_of(form, 64, capability=capability)).conditions
    function = map_kernel(program)
    constants: dict[str, Any] = {"TILE_Q": 64, "TILE_K": 64, "ROWS": ROWS, "RUNS": RUNS} | {f"C{c}_s{program.captures[c].rank - 1}": 1 for c in program.reads()}
    kinds = {"STATE": "*i8"} | {f"C{c}": "*" + _TYPES[program.captures[c].dtype] for c in program.reads()}
    signature = {a: "constexpr" if a in constants else kinds.get(a, "i32") for a in function.arg_names}
    aligned = [i for i, a in enumerate(function.arg_names) if re.fullmatch(r"STATE|C\d+(_s\d)?", a) and a not in constants]
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs={(i,): [["tt.divisibility", 16]] for i in aligned})
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    return _usage(triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 1}), triton)


def _usage(compiled: Any, triton: Any) -> Usage:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report, code = (subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout for what in ("-res-usage", "-sass"))
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found is not None, report
    return Usage(int(found[1]), int(found[2]), compiled.metadata.shared, compiled.asm["ptx"], _loops(code))


def _loops(code: str, least: int = 100) -> tuple[int, ...]:
    """A loop ends with a branch backwards."""
    instructions = [(int(at, 16), text) for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", code, re.M)]
    found = []
    for at, text in instructions:
        branch = re.search(r"\bBRA\S* .*?0x([0-9a-f]+)", text)
        if branch and int(branch[1], 16) < at:
            found.append(sum(int(branch[1], 16) <= other <= at for other, _ in instructions))
    return tuple(n for n in found if n >= least)
