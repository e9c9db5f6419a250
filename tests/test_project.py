"""The project itself: what the wheel holds, how the checkout behaves as a current directory, who may import whom."""

from __future__ import annotations

import ast
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ("fa_inductor", "kernels", "patterns", "pyproject.toml", "README.md", "LICENSE")


def run(*command: str, cwd: pathlib.Path, **environ: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A wheel built from the source archive that was built from a copy of the checkout."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("out")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), cwd=copy)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    target = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel), cwd=target)
    return target


def test_the_wheel_holds_only_fa_inductor(wheel):
    files = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in files} == {"fa_inductor", "fa_inductor-0.1.0.dist-info"}
    present = {name for name in files if name.endswith(".py")}
    expected = {str(p.relative_to(ROOT)) for p in (ROOT / "fa_inductor").rglob("*.py")}
    for folder in ("kernels", "patterns"):
        expected |= {f"fa_inductor/{p.relative_to(ROOT)}" for p in (ROOT / folder).rglob("*.py")}
    assert present == expected
    assert "fa_inductor/py.typed" in files


def test_the_source_archive_has_no_generic_folder(wheel):
    (path,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        second = {pathlib.PurePath(n).parts[1] for n in archive.getnames() if len(pathlib.PurePath(n).parts) > 1}
    assert not {"kernels", "patterns"} & second
    assert {"fa_inductor", "LICENSE", "pyproject.toml"} <= second


def test_an_installed_wheel_registers_the_backend(installed, tmp_path):
    code = "import torch._dynamo as d, importlib.util as u; print('flashattn' in d.list_backends(), u.find_spec('fa_inductor').origin)"
    found, origin = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(installed)).split(" ", 1)
    assert found == "True"
    assert pathlib.Path(origin).is_relative_to(installed)
    assert {p.name for p in installed.iterdir()} <= {"fa_inductor", "fa_inductor-0.1.0.dist-info", "__pycache__"}


def test_an_installed_wheel_compiles_with_only_torch_imported(installed, tmp_path):
    code = """
import torch
def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) * 0.125, -1) @ v
q, k, v = (torch.randn(1, 2, 256, 64) for _ in range(3))
torch.testing.assert_close(torch.compile(attention, backend="flashattn")(q, k, v), attention(q, k, v))
import fa_inductor
print(fa_inductor.__file__, fa_inductor.counters()["sites"])
"""
    origin, sites = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(installed)).rsplit(" ", 1)
    assert pathlib.Path(origin).is_relative_to(installed)
    assert sites == "1"


@pytest.mark.parametrize("module", ["kernels", "patterns"])
def test_the_checkout_shadows_no_package(module):
    """With the checkout as current directory the folders are at most namespace packages, never importable code."""
    code = f"import importlib.util as u; s = u.find_spec({module!r}); print(s is None or s.origin is None)"
    assert run(sys.executable, "-c", code, cwd=ROOT) == "True"
    assert not (ROOT / module / "__init__.py").exists()
    link = ROOT / "fa_inductor" / module
    assert link.is_symlink() and os.readlink(link) == f"../{module}"


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers_still_sees_that_the_package_kernels_is_absent(tmp_path):
    code = "import transformers; from transformers.utils import is_kernels_available as a; print(a())"
    elsewhere = run(sys.executable, "-c", code, cwd=tmp_path)
    if elsewhere == "True":
        pytest.skip("the package kernels is installed")
    assert run(sys.executable, "-c", code, cwd=ROOT) == "False"


def imported(path: pathlib.Path, package: str) -> set[str]:
    """Absolute names of the fa_inductor modules that a file of ``package`` (dotted) imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names |= {stem, *(f"{stem}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.startswith("fa_inductor.")}


def test_kernels_and_patterns_stay_apart():
    """Patterns and kernels never import each other, and no kernel imports another."""
    wrong = []
    for folder in ("kernels", "patterns"):
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.relative_to(ROOT)
            package = ".".join(("fa_inductor", *relative.parts[:-1]))
            own = ".".join(("fa_inductor", *relative.parts[:2])) if folder == "kernels" else "fa_inductor.patterns"
            for name in imported(path, package):
                foreign = name.split(".")[1:2] in (["kernels"], ["patterns"]) and not (name + ".").startswith(own + ".")
                if foreign and name not in ("fa_inductor.kernels", "fa_inductor.patterns"):
                    wrong.append(f"{relative} imports {name}")
    assert wrong == []


def test_the_readme_names_every_option():
    from fa_inductor import kernel_table, options

    readme = (ROOT / "README.md").read_text()
    missing = [name for name in (*options._CHECKS, "mode", *kernel_table.CHOICES) if f"`{name}`" not in readme and f'"{name}"' not in readme]
    assert missing == []
    assert all(name in readme for name in ("FA_INDUCTOR_DUMP", "FA_INDUCTOR_KERNEL", "FA_INDUCTOR_DISABLE", "make demo", "make test"))
