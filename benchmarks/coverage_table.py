"""The document docs/coverage.md, made from the results of ``coverage.py run`` and from nothing else."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]


def key(record: Record) -> tuple[Any, ...]:
    """What a record is of: a later one with the same key replaces it."""
    return record["name"], record["variant"], record["mode"], record["codegen"]


def load(paths: Iterable[pathlib.Path]) -> tuple[list[Record], list[Record]]:
    """Headers and records of result files."""
    headers: list[Record] = []
    records: dict[tuple[Any, ...], Record] = {}
    for path in paths:
        for row in map(json.loads, path.read_text().splitlines()):
            if "header" in row:
                headers.append(row["header"])
            else:
                records[key(row)] = row
    return headers, list(records.values())


def line(record: Record) -> str:
    """A record in short, for the terminal."""
    if "verdict" not in record or "rewritten" not in record:
        what = record.get("error") or record.get("skipped") or "?"
    else:
        what = f"{record['verdict']} {record['rewritten']}/{record['sites']} err {record['err']:.1e} grad {record['grad_err']:.1e}"
    return f"{record['name']} {record['variant']} {record['mode']} {record.get('seconds', '-')}s {what}"
