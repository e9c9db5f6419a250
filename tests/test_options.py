"""Options: what is accepted, what is passed on, and what a mistake says."""

from __future__ import annotations

import logging
import os
import pathlib
import subprocess
import sys

import pytest

from fa_inductor import log
from fa_inductor.kernel_table import NAMES
from fa_inductor.options import OptionError, Options, parse

ROOT = pathlib.Path(__file__).parents[1]


def message(options: dict | None = None, mode: str | None = None, environ: dict | None = None) -> str:
    parsed = parse(options, mode, environ or {})
    (only,) = parsed.messages
    return only


def test_nothing_given_gives_the_defaults():
    assert parse(None, None, {}) == (Options(), {}, ())


def test_our_options_are_kept_and_inductors_are_passed_on(tmp_path):
    given = {
        "kernel": "tiled",
        "strict": True,
        "dump": tmp_path,
        "masked_rows": "zero",
        "deterministic": True,
        "max_autotune": True,
        "triton.cudagraphs": False,
    }
    parsed = parse(given, None, {})
    assert parsed.options == Options("tiled", True, str(tmp_path), "zero", True)
    assert parsed.inductor == {"max_autotune": True, "triton.cudagraphs": False}
    assert parsed.messages == ()
    assert set(given) >= {"kernel", "max_autotune"}, "the caller's dictionary is left alone"


@pytest.mark.parametrize(("given", "kernel"), [("auto", None), (None, None), ("triton", "triton_fa2"), ("sdpa", "torch_sdpa"), ("tiled", "tiled")])
def test_kernel_names_and_aliases(given, kernel):
    assert parse({"kernel": given}, None, {}).options.kernel == kernel


def test_kernel_names_are_the_folders():
    folders = {p.name for p in (ROOT / "kernels").iterdir() if (p / "__init__.py").exists()}
    assert folders == set(NAMES)


def test_inductor_names_may_be_written_with_dashes():
    assert parse({"max-autotune": True}, None, {}).inductor == {"max_autotune": True}


def test_mode_becomes_inductor_settings():
    import torch

    for mode, settings in torch._inductor.list_mode_options().items():
        assert parse(None, mode, {}).inductor == settings
        assert parse({"mode": mode, "strict": True}, None, {}) == (Options(strict=True), settings, ())


def test_an_explicit_inductor_option_wins_over_the_mode():
    assert parse({"mode": "max-autotune", "max_autotune": False}, None, {}).inductor["max_autotune"] is False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernel": "trition"}, ["'kernel'", "'trition' (str)", "did you mean 'triton'?", "torch_sdpa"]),
        ({"kernel": 3}, ["'kernel'", "3 (int)", "use one of"]),
        ({"kernel": ["tiled"]}, ["'kernel'", "(list)", "use one of"]),
        ({"strict": "yes"}, ["'strict'", "'yes' (str)", "True or False"]),
        ({"strict": 1}, ["'strict'", "1 (int)", "True or False"]),
        ({"masked_rows": "zeros"}, ["'masked_rows'", "'zeros'", "did you mean 'zero'?"]),
        ({"deterministic": "no"}, ["'deterministic'", "True, False or None"]),
        ({"dump": 7}, ["'dump'", "7 (int)", "folder"]),
        ({"dump": ""}, ["'dump'", "folder"]),
        ({"dump": "a\0b"}, ["'dump'", "folder"]),
        ({"kernal": "tiled"}, ["'kernal'", "did you mean 'kernel'?", "torch._inductor.list_options()"]),
        ({"max_autotone": True}, ["'max_autotone'", "did you mean 'max_autotune'?"]),
        ({3: True}, ["'3'", "neither"]),
        ({"max_autotune": "yes"}, ["Inductor option 'max_autotune'", "'yes' (str)", "bool"]),
        ({"mode": "max-autotne"}, ["mode", "did you mean 'max-autotune'?", "reduce-overhead"]),
        ({"mode": 3}, ["mode", "3 (int)"]),
    ],
)
def test_a_mistake_is_named_with_its_remedy_and_left_out(options, words):
    text = message(options)
    for word in words:
        assert word in text
    assert parse(options, None, {})[:2] == (Options(), {})


def test_a_mistake_costs_only_itself():
    parsed = parse({"kernel": "nope", "masked_rows": "zero", "max_autotune": True}, None, {})
    assert parsed.options == Options(masked_rows="zero")
    assert parsed.inductor == {"max_autotune": True}


def test_strict_makes_a_mistake_an_error():
    with pytest.raises(OptionError, match=r"kernel.*did you mean 'tiled'.*"):
        parse({"strict": True, "kernel": "tild"}, None, {})


def test_environment_is_the_default_and_options_win():
    environ = {"FA_INDUCTOR_KERNEL": "triton", "FA_INDUCTOR_DUMP": "out", "FA_INDUCTOR_DISABLE": "1"}
    assert parse(None, None, environ).options == Options(kernel="triton_fa2", dump="out", disabled=True)
    assert parse({"kernel": "auto", "dump": None}, None, environ).options == Options(disabled=True)
    assert parse(None, None, dict.fromkeys(environ, "")) == (Options(), {}, ())


def test_environment_mistakes_are_named():
    assert "FA_INDUCTOR_KERNEL" in message(environ={"FA_INDUCTOR_KERNEL": "fast"})
    assert "FA_INDUCTOR_DISABLE" in message(environ={"FA_INDUCTOR_DISABLE": "maybe"})
    assert "did you mean 'FA_INDUCTOR_KERNEL'" in message(environ={"FA_INDUCTOR_KERNAL": "triton"})


def test_the_process_environment_is_read_by_default(monkeypatch):
    monkeypatch.setenv("FA_INDUCTOR_KERNEL", "tiled")
    assert parse().options.kernel == "tiled"


def test_only_options_reads_environment_variables():
    readers = [p.name for p in (ROOT / "fa_inductor").rglob("*.py") if "environ" in p.read_text() or "getenv" in p.read_text()]
    assert readers == ["options.py"]


def test_warnings_are_said_once(caplog):
    with caplog.at_level(logging.WARNING, logger="fa_inductor"):
        assert log.warn_once("kernel is wrong")
        assert not log.warn_once("kernel is wrong")
        assert log.warn_once("dump is wrong")
    assert [r.getMessage() for r in caplog.records] == ["kernel is wrong", "dump is wrong"]


@pytest.mark.parametrize(("setting", "level"), [("fa_inductor", "INFO"), ("+fa_inductor", "DEBUG")])
def test_torch_logs_knows_the_name(setting, level):
    code = "import torch, logging; from fa_inductor import log; print(logging.getLevelName(log.get('report').getEffectiveLevel()))"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TORCH_LOGS": setting}, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, level), done.stderr
