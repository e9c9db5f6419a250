"""The dump folder: numbered stages, nothing overwritten, no cost when off, one warning where it cannot be written."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import pathlib

import pytest

from fa_inductor.dump import STAGES, Dump


def names(folder: pathlib.Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_stages_are_numbered_files_in_one_folder_per_graph(tmp_path):
    out = tmp_path / "deep" / "out"
    for _ in range(2):
        dump = Dump.open(str(out))
        for stage in STAGES:
            dump.write(stage, f"text of {stage}")
        dump.write("report", lambda: "the report\n")
        dump.write("report.json", "{}")
    tail = f"rank0_pid{os.getpid()}"
    assert names(out) == [f"graph_000_{tail}", f"graph_001_{tail}"]
    first = out / f"graph_000_{tail}"
    assert names(first) == [
        "01_dynamo.txt",
        "02_normalized.txt",
        "03_sites.txt",
        "04_programs.txt",
        "05_selection.txt",
        "06_rewritten.txt",
        "report.json",
        "report.txt",
    ]
    assert (first / "03_sites.txt").read_text() == "text of sites\n"
    assert (first / "report.txt").read_text() == "the report\n"


def test_a_stage_written_again_keeps_both(tmp_path):
    dump = Dump.open(tmp_path)
    dump.write("normalized", "one")
    dump.write("normalized", "two")
    assert dump.folder is not None
    assert [(dump.folder / n).read_text() for n in names(dump.folder)] == ["one\n", "two\n"]
    assert names(dump.folder) == ["02_normalized.txt", "02_normalized_2.txt"]


def test_nothing_is_rendered_when_off():
    Dump.open(None).write("dynamo", lambda: pytest.fail("rendered although dumping is off"))


def test_a_folder_of_that_name_is_never_entered(tmp_path):
    tail = f"rank0_pid{os.getpid()}"
    for name in ("graph_000", "graph_002"):
        (tmp_path / f"{name}_{tail}").mkdir()
        (tmp_path / f"{name}_{tail}" / "keep.txt").write_text("mine")
    folders = [Dump.open(tmp_path).folder for _ in range(2)]
    assert [f.name for f in folders if f] == [f"graph_003_{tail}", f"graph_004_{tail}"]


def _open_many(arguments: tuple[str, int]) -> list[str]:
    path, pid = arguments
    os.getpid = lambda: pid  # every process claims the same id: only the exclusive mkdir keeps them apart
    return [str(Dump.open(path).folder) for _ in range(20)]


def test_many_processes_share_a_folder(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        made = list(itertools.chain.from_iterable(pool.map(_open_many, [(str(tmp_path), 7)] * 4)))
    assert len(set(made)) == len(made) == 80
    assert all(pathlib.Path(f).is_dir() for f in made)


def test_a_file_in_the_way_costs_one_warning(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with caplog.at_level(logging.WARNING, logger="fa_inductor"):
        for _ in range(3):
            dump = Dump.open(blocked / "out")
            dump.write("dynamo", lambda: pytest.fail("rendered although nothing can be written"))
    (record,) = caplog.records
    assert str(blocked) in record.getMessage() and "choose a writable folder" in record.getMessage()


def test_a_folder_that_vanishes_costs_one_warning(tmp_path, caplog):
    dump = Dump.open(tmp_path)
    assert dump.folder is not None
    dump.folder.rmdir()
    with caplog.at_level(logging.WARNING, logger="fa_inductor"):
        dump.write("dynamo", "text")
        dump.write("sites", "text")
    assert len(caplog.records) == 1 and dump.folder is None


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_costs_one_warning(tmp_path, caplog):
    tmp_path.chmod(0o500)
    with caplog.at_level(logging.WARNING, logger="fa_inductor"):
        assert Dump.open(tmp_path / "out").folder is None
    assert len(caplog.records) == 1
    tmp_path.chmod(0o700)
