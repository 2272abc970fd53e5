"""Who may import what, and when: running an artifact needs NumPy and ONNX Runtime only."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import subquad.runtime

ROOT = Path(__file__).resolve().parent.parent

CONVERTER_ONLY = ("torch", "transformers", "tvm", "onnx", "onnx_ir", "onnxscript")

BLOCKER = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {forbidden!r}:
            raise AssertionError("imported " + name)
        return None

sys.meta_path.insert(0, Blocker())
"""


def run_without(forbidden: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter where importing a forbidden package raises."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKER.format(forbidden=set(forbidden)) + code],
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
    )


def runtime_modules() -> list[str]:
    return [
        module.name
        for module in pkgutil.walk_packages(subquad.runtime.__path__, "subquad.runtime.")
    ]


def test_blocker_blocks() -> None:
    done = run_without(("json",), "import json")
    assert done.returncode != 0
    assert "imported json" in done.stderr


@pytest.mark.parametrize("module", ["subquad.runtime", *runtime_modules()])
def test_runtime_needs_no_converter(module: str) -> None:
    done = run_without(CONVERTER_ONLY, f"import {module}")
    assert done.returncode == 0, done.stderr


def test_package_itself_is_light() -> None:
    heavy = (*CONVERTER_ONLY, "numpy", "onnxruntime", "click", "rich")
    done = run_without(heavy, "import subquad; print(subquad.__version__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == subquad.__version__


def test_load_needs_no_converter() -> None:
    done = run_without(CONVERTER_ONLY, "import subquad; subquad.load")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["convert", "--help"]])
def test_help_is_light(arguments: list[str]) -> None:
    forbidden = (*CONVERTER_ONLY, "onnxruntime")
    code = f"import sys; sys.argv = ['subquad', *{arguments!r}]\n"
    code += "from subquad.cli import main; main()"
    done = run_without(forbidden, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_only_the_converter_and_training_import_torch(package: str) -> None:
    """Rewriting and kernels work without it, so an ``.onnx`` can be converted without torch."""
    modules = ("subquad.passes", "subquad.kernels")
    code = """
import importlib, pkgutil
for root in {modules!r}:
    package = importlib.import_module(root)
    for module in pkgutil.walk_packages(package.__path__, root + "."):
        # Loaded inside functions only: those of templates in a process of its own, where TVM looks
        # for torch; the others to train.
        owners = ("subquad.kernels.templates.", "subquad.passes.differentiable.")
        if not module.name.startswith(owners):
            importlib.import_module(module.name)
"""
    done = run_without((package,), code.format(modules=modules))
    assert done.returncode == 0, done.stderr
