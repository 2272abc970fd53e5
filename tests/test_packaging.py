"""The wheel holds exactly the package: the root of the repository is the package ``subquad``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent

NOT_PACKAGED = {"benchmarks", "docs", "examples", "tests"}
"""Top folders that may hold Python files but are no part of the package."""

SOURCE_SUFFIXES = {".md", ".pyi"}
"""Files inside packages that need not travel in the wheel."""


def tracked_files() -> list[PurePosixPath]:
    """What a commit of the present tree would hold, relative to the root."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [PurePosixPath(name) for name in listing.split("\0") if name and (ROOT / name).exists()]


def package_files() -> list[PurePosixPath]:
    """Tracked files in the package's folders, ``subquad/`` being the root."""
    files = []
    for path in tracked_files():
        top = path.parts[0]
        if top.startswith(".") or top in NOT_PACKAGED:
            continue
        if len(path.parts) > 1 or path.suffix == ".py" or path.name == "py.typed":
            files.append(path)
    return files


@pytest.fixture(scope="module")
def packaged() -> frozenset[PurePosixPath]:
    """The package's files when the wheel is built."""
    return frozenset(package_files())


@pytest.fixture(scope="module")
def wheel(packaged: frozenset[PurePosixPath], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the present tree, built on a copy: setuptools writes next to the sources."""
    copy = tmp_path_factory.mktemp("source")
    metadata = {PurePosixPath(name) for name in ("pyproject.toml", "README.md", "LICENSE")}
    # Files that must not get in lie there as well.
    bait = {path for path in tracked_files() if path.parts[0] in {"tests", "benchmarks"}}
    for path in packaged | metadata | bait:
        target = copy / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, target)
    output = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        + ["--wheel-dir", str(output), str(copy)],
        check=True,
    )
    (built,) = output.glob("*.whl")
    return built


def test_package_list_equals_tree() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    folders = {path.parent for path in package_files() if path.suffix == ".py"}
    in_tree = {".".join(("subquad", *folder.parts)) for folder in folders}
    assert sorted(config["tool"]["setuptools"]["packages"]) == sorted(in_tree)


def test_every_package_folder_has_an_init() -> None:
    python = [path for path in package_files() if path.suffix == ".py"]
    missing = {path.parent for path in python} - {
        path.parent for path in python if path.name == "__init__.py"
    }
    assert not missing


def test_no_stray_module_in_the_root() -> None:
    # Each *.py in the root becomes a module of the package.
    at_root = {path.name for path in tracked_files() if len(path.parts) == 1}
    assert {name for name in at_root if name.endswith(".py")} == {
        "__init__.py",
        "__main__.py",
        "cli.py",
    }


def test_wheel_holds_the_whole_package_and_nothing_else(
    wheel: Path, packaged: frozenset[PurePosixPath]
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {PurePosixPath(name) for name in archive.namelist()}
    inside = {name.relative_to("subquad") for name in names if name.parts[0] == "subquad"}
    others = {name.parts[0] for name in names if name.parts[0] != "subquad"}
    assert all(name.endswith(".dist-info") for name in others)
    assert inside == {path for path in packaged if path.suffix not in SOURCE_SUFFIXES}


def test_installed_wheel_runs_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        + ["--no-deps", "--no-index", str(wheel)],
        check=True,
    )
    (site_packages,) = environment.glob("lib/python*/site-packages")
    # The dependencies come from this environment; a path line does not run its editable finders.
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (site_packages / "dependencies.pth").write_text("\n".join(dependencies) + "\n", "utf-8")

    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import subquad.runtime.manifest as m, subquad; print(m.__file__, subquad.__version__)"
    imported = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=environ, check=True, capture_output=True, text=True
    ).stdout
    assert imported.startswith(str(site_packages))
    command = environment / "bin" / "subquad"
    helped = subprocess.run(
        [command, "--help"], cwd=tmp_path, env=environ, check=True, capture_output=True, text=True
    )
    assert helped.returncode == 0


def test_constraints_pin_exactly() -> None:
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            name, separator, version = line.partition("==")
            assert separator and name and version, line


def test_constraints_cover_the_environment() -> None:
    """Everything `make install` put here is pinned, so a new dependency cannot float in."""
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    }
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = list(config["dependencies"])
    for extra, requirements in config["optional-dependencies"].items():
        if extra != "gpu":  # excludes `cpu`; both packages own the module onnxruntime
            named += requirements
    names = {re.split("[<>=]", requirement)[0] for requirement in named}
    assert {name.lower().replace("_", "-") for name in names} <= pinned
