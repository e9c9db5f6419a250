"""``python -m fa_inductor.refusal_table``: every refusal code with its advice, as the Markdown of docs/refusals.md."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

_STAGES = {
    "normalize": "The graph as a whole",
    "": "One softmax",
    "torch_sdpa": "Kernel torch_sdpa",
    "triton_fa2": "Kernel triton_fa2",
    "tiled": "Kernel tiled",
    "reference": "Kernel reference",
}
_HEAD = """# Refusals

Every reason for which something is not fused, made from the code by `make refusals`. A kernel's reasons only say why the next kernel
is asked; a softmax stays unfused when a reason of the first two tables is given, or when no kernel is left (`no_kernel`). The report
adds a sentence on the case at hand, and the line in the model that it comes from.
"""


def declared(root: Path) -> Iterator[tuple[str, str, str]]:
    """(stage, code, advice) of each call of ``declare`` below ``root``, in the order of the files."""
    for path in sorted(root.rglob("*.py")):
        folder = path.relative_to(root).parts[:-1]
        stage = folder[-1] if folder and folder[-1] in _STAGES else ""
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "declare":
                code, advice = (ast.literal_eval(argument) for argument in node.args)
                yield stage, code, advice


def table() -> str:
    spec = importlib.util.find_spec("fa_inductor")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    found = [*declared(root), *(x for folder in ("patterns", "kernels") for x in declared(root / folder))]
    parts = [_HEAD]
    for stage, title in _STAGES.items():
        rows = sorted({(code, advice) for where, code, advice in found if where == stage})
        parts.append("\n".join([f"## {title}", "", "| code | advice |", "|---|---|", *(f"| `{code}` | {advice} |" for code, advice in rows), ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    print(table(), end="")
