"""The document docs/coverage.md, made from the results of ``coverage.py run`` and from nothing else."""

from __future__ import annotations

import json
import pathlib
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import zoo_errors

Record = dict[str, Any]

VARIANTS = ("infer", "train", "dynamic", "autocast", "lora")
VERDICTS = ("ok", "random", "inexact", "failed", "skipped")

_HEAD = """# Coverage

Attention in {models} unmodified public models of {packages} packages, with tiny random configurations: the sites that a counter independent of this
project finds in each, how many of them are rewritten, and by which kernel; beside it Inductor's own matcher, by its counter. Then every
site that is not rewritten, with the refusal. Made by `make coverage` from results in benchmarks/results; nothing here is typed by hand.
"""

_TOTALS = """A site is counted once for each graph that is compiled for inference; what is rewritten beyond that count is left out of the totals. `final` says
for how many models the counters are what the final graphs hold: a fused call forward for each rewritten site, and one backward where all of the
model trains. `ok` is as near to eager as two evaluations of the same function are, or, against float64, at most twice as far as eager;
`random` is a model that differs from itself. In brackets, with a plus: those where plain Inductor, run the same way, does no better.
"""


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
    if "rewritten" not in record:
        what = record.get("error") or record.get("skipped") or "?"
    else:
        what = f"{record['verdict']} {record['rewritten']}/{record['sites']} err {record['err']:.1e} grad {record['grad_err']:.1e}"
    return f"{record['name']} {record['variant']} {record['mode']} {record.get('seconds', '-')}s {what}"


def document(headers: Sequence[Record], records: Sequence[Record]) -> str:
    """The whole document, as Markdown."""
    models = {r["name"]: r["package"] for r in records}
    parts = [_HEAD.format(models=len(models), packages=len(set(models.values()))), *_provenance(headers)]
    parts += ["## Totals\n", _TOTALS, _totals(records), *_autocast(records), "## Models\n", _models(records)]
    parts += ["## Sites that are not rewritten\n", *_missed(records), "## Results that are not eager's\n", _wrong(records)]
    return "\n".join(parts).rstrip() + "\n"


def variant_of(record: Record) -> str:
    """The row of the totals that a record belongs to."""
    name = record["variant"] if record["variant"] in ("infer", "train") else f"{record['variant']} {record['mode']}"
    return name + (" (generated code)" if record["codegen"] else "")


def outcome_of(record: Record) -> str:
    return "skipped" if "skipped" in record else str(record.get("verdict", "failed"))


def counters_agree(record: Record) -> bool:
    """The counters are what the final graphs hold, which may also hold calls of the model's own."""
    rewritten, final = record["rewritten"], record["final"]
    wanted = rewritten if record["mode"] == "train" and record["variant"] != "lora" else record["backward"]
    return bool(rewritten == record["forward"] <= final.get("forward", 0) and wanted == record["backward"] <= final.get("backward", 0))


def _provenance(headers: Sequence[Record]) -> list[str]:
    lines = [f"- `{h['command']}` at {h['commit']}, {h['date']}, models {h['zoo']}, Python {_versions(h['machine'])}" for h in headers]
    packages = {name: version for h in headers for name, version in h.get("packages", {}).items() if version}
    return [*dict.fromkeys(lines), "", "Packages: " + ", ".join(f"{n} {v}" for n, v in sorted(packages.items())) + ".\n"]


def _versions(machine: Record) -> str:
    return f"{machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}, {machine.get('cpu') or machine.get('gpu')}"


def _totals(records: Sequence[Record]) -> str:
    rows = []
    for variant in dict.fromkeys(variant_of(r) for r in sorted(records, key=_order)):
        group = [r for r in records if variant_of(r) == variant]
        ran = [r for r in group if "rewritten" in r]
        outcomes = Counter(outcome_of(r) for r in group)
        known = sum(min(r["rewritten"], r["sites"]) for r in ran)
        agree = f"{sum(map(counters_agree, ran))} of {len(ran)}"
        cells = [_with_plain(outcomes, name) for name in VERDICTS]
        rows.append([variant, len(ran), sum(r["sites"] for r in ran), known, sum(len(r["refused"]) for r in ran), agree, *cells])
    return _markdown(["variant", "models", "sites", "rewritten", "refusals", "final", *VERDICTS], rows)


def _order(record: Record) -> tuple[Any, ...]:
    return record["codegen"], VARIANTS.index(record["variant"]), record["mode"]


def _with_plain(outcomes: Counter[str], name: str) -> str:
    alone = sum(n for outcome, n in outcomes.items() if outcome.startswith(name) and "plain" not in outcome)
    plain = sum(n for outcome, n in outcomes.items() if outcome.startswith(name) and "plain" in outcome)
    return f"{alone} (+{plain})" if plain else str(alone)


def _autocast(records: Sequence[Record]) -> list[str]:
    rows = []
    for name, error in (("outputs", "err"), ("gradients", "grad_err")):
        judged = [r for r in records if r["variant"] == "autocast" and r.get("rewritten")]
        ratios = sorted((x, r["name"]) for r in judged if (x := zoo_errors.ratio(r, error)) is not None)
        if ratios:
            rows.append([name, len(ratios), f"{statistics.median(x for x, _ in ratios):.2f}", f"{ratios[-1][0]:.2f} ({ratios[-1][1]})"])
    text = "Under bfloat16 autocast, error against the exact model over eager's own (norm of all differences), where a site is rewritten:\n"
    return [text, _markdown(["of", "models", "median", "largest"], rows)] if rows else []


def _models(records: Sequence[Record]) -> str:
    rows = []
    for name in sorted({r["name"] for r in records}, key=lambda n: next((r["package"], n) for r in records if r["name"] == n)):
        mine = sorted((r for r in records if r["name"] == name), key=lambda r: r["codegen"], reverse=True)
        by_variant = {r["variant"]: r for r in mine}  # interpreted before generated
        any_record = mine[0]
        forms = ", ".join(f"{form} ×{n}" if n > 1 else form for form, n in any_record["forms"].items())
        kernels: Counter[str] = Counter()
        for record in mine:
            kernels |= Counter(record.get("kernels", {}))
        own = [_count(any_record["inductor"][mode]) for mode in ("infer", "train")]
        found = [_count(by_variant.get(v, {}).get("rewritten")) for v in ("infer", "train")]
        rows.append([name, any_record["package"], forms, any_record["sites"], *found, ", ".join(sorted(kernels)) or "-", *own])
    return _markdown(["model", "package", "forms", "sites", "infer", "train", "kernels", "Inductor, infer", "Inductor, train"], rows)


def _missed(records: Sequence[Record]) -> list[str]:
    """Two tables, of sites and of softmaxes beyond the count: a row for each refusal of a model, with the variants that have it."""
    counted: dict[tuple[str, ...], list[str]] = {}
    others: dict[tuple[str, ...], list[str]] = {}
    for record in records:
        if "rewritten" not in record:
            continue
        gap = record["sites"] - record["rewritten"]
        for refusal in (*record["refused"], *record["graph_refusals"]):
            row = (record["name"], refusal["at"], refusal.get("line", ""), refusal["code"], refusal["text"])
            (counted if gap > 0 else others).setdefault(row, []).append(variant_of(record))
        gap -= len(record["refused"])
        if gap > 0 and not record["graph_refusals"]:
            left = record["final"].get("softmaxes", 0)
            text = f"{gap} not met in the {record['graphs']} graphs compiled, which hold {left} softmaxes in the end: layers share a graph, or it is not run"
            counted.setdefault((record["name"], "", "", "-", text), []).append(variant_of(record))
    return [_refusals(counted), "Softmaxes that are refused in models all of whose counted sites are rewritten:\n", _refusals(others)]


def _refusals(found: dict[tuple[str, ...], list[str]]) -> str:
    rows = [[m, at, f"`{source}`" if source else "", code, text, _times(variants)] for (m, at, source, code, text), variants in sorted(found.items())]
    return _markdown(["model", "at", "line", "code", "why", "variants"], rows)


def _wrong(records: Sequence[Record]) -> str:
    rows = []
    for record in records:
        outcome = outcome_of(record)
        if outcome != "ok":
            why = record.get("skipped") or record.get("error") or _errors(record)
            rows.append([record["name"], variant_of(record), outcome, why])
    return _markdown(["model", "variant", "verdict", "why"], sorted(rows))


def _errors(record: Record) -> str:
    said = [f"against eager {record['err']:.1e}, gradients {record['grad_err']:.1e} ({record['grad_worst']}); eager against itself {record['noise']:.1e}"]
    if "exact" in record:
        pairs = [f"{record[who][e]:.1e}" for e in ("err", "grad_err") for who in ("exact", "eager_exact")]
        said.append("against {}: {}, eager {}; gradients {}, eager {}".format(record["reference"], *pairs))
    if "err" in record.get("plain", {}):
        said.append(f"plain Inductor against eager {record['plain']['err']:.1e}, gradients {record['plain']['grad_err']:.1e}")
    if zoo_errors.fails_elsewhere(record):
        said.append(f"twice the batch: {record['other_batch']}")
    return "; ".join(said)


def _times(variants: Sequence[str]) -> str:
    return ", ".join(f"{v} ×{n}" if n > 1 else v for v, n in Counter(variants).items())


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _cell(value: object) -> str:
    """One line; installed files are named as of their package."""
    return " ".join(re.sub(r"[^\s\"']*/site-packages/", "", str(value)).split()).replace("|", "\\|")


def _markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [list(head), ["---"] * len(head), *([_cell(x) for x in row] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n" if rows else "None.\n"
