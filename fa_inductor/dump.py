"""The dump folder: every stage of every compiled graph as a numbered text file.

    out/graph_000_rank0_pid123/01_dynamo.txt 02_normalized.txt … report.txt report.json

Nothing is overwritten: the folder of a graph is made with an exclusive ``mkdir``, so that many processes can share one dump
folder. A folder that cannot be written costs one warning, never the compilation. Without a dump folder nothing is rendered.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import log

STAGES = ("dynamo", "normalized", "sites", "programs", "selection", "rewritten")
"""Stages in pipeline order; their files are numbered from 01. Other names are written without a number."""

_LIMIT = 1_000_000


@dataclass
class Dump:
    """The folder of one compiled graph; ``folder`` is None where dumping is off or has failed."""

    folder: Path | None = None
    written: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def open(path: str | os.PathLike[str] | None) -> Dump:
        """Make the next free ``graph_<n>_rank<r>_pid<p>`` below ``path``."""
        if path is None:
            return Dump()
        try:
            return Dump(_new_folder(Path(path)))
        except OSError as error:
            log.warn_once(f"cannot write the dump folder {os.fspath(path)!r} ({error.strerror or error}): nothing is dumped; choose a writable folder")
            return Dump()

    def write(self, stage: str, content: str | Callable[[], str]) -> None:
        """Write ``<nn>_<stage>.txt``, or ``<stage>`` itself if it has a suffix; a callable is called only if dumping is on."""
        if self.folder is None:
            return
        text = content if isinstance(content, str) else content()
        try:
            with open(self.folder / self._file_name(stage), "x", encoding="utf-8") as file:
                file.write(text if text.endswith("\n") else text + "\n")
        except OSError as error:
            log.warn_once(f"cannot write to the dump folder {str(self.folder)!r} ({error.strerror or error}): the rest of this graph is not dumped")
            self.folder = None

    def _file_name(self, stage: str) -> str:
        """A stage that is written again (a graph normalised twice) gets its repetition's number."""
        count = self.written[stage] = self.written.get(stage, 0) + 1
        stem, dot, suffix = stage.partition(".")
        stem = f"{STAGES.index(stem) + 1:02d}_{stem}" if stem in STAGES else stem
        again = f"_{count}" if count > 1 else ""
        return f"{stem}{again}{dot or '.'}{suffix or 'txt'}"


def _new_folder(parent: Path) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    tail = f"rank{_rank()}_pid{os.getpid()}"
    number = sum(1 for entry in os.scandir(parent) if entry.name.endswith(tail))
    for candidate in range(number, _LIMIT):
        folder = parent / f"graph_{candidate:03d}_{tail}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise OSError(f"{parent} already holds {_LIMIT} graphs")


def _rank() -> int:
    """This process's rank in the default process group, 0 without one."""
    import torch.distributed as distributed

    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
