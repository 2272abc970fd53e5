"""Compile kernels with TVM: the child process of ``build.py``.

``python -m subquad.kernels.host.compile_child TASK.json``; the task is

    {"started": "/…/started",
     "kernels": [{"variant": "module:class", "fields": {...}, "template": "module:attribute",
     "target": {...}, "params": {...}, "object": "/…/key.o", "error": "/…/0.error"}, ...]}

Each kernel leaves its object file (for a GPU a description, and beside it a library), or the error
file with one line. A kernel that takes the process down leaves neither, and the parent says so.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subquad.kernels.gpu import GpuTarget
from subquad.kernels.host.gpu_child import compile_library, load_driver
from subquad.kernels.kernel import CpuTarget, KernelTemplate, kernel_symbol
from subquad.kernels.operator import OperatorVariant
from subquad.runtime.kernel_tools import compiler


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    if any(_is_gpu(kernel) for kernel in task["kernels"]):
        load_driver(_compiler())
    import tvm  # noqa: F401

    Path(task["started"]).touch()
    for kernel in task["kernels"]:
        _compile(kernel)


def _compile(kernel: dict[str, Any]) -> None:
    import tvm

    variant = make_variant(kernel["variant"], kernel["fields"])
    template: KernelTemplate = load_named(kernel["template"])
    target = make_target(kernel["target"])
    final = Path(kernel["object"])
    try:
        function = template.build(variant, target, kernel["params"])
        _check_symbol(function, kernel_symbol(variant))
        if isinstance(target, GpuTarget):
            compile_library(function, target, final.with_suffix(".so"), _compiler())
            return
        executable = tvm.compile(function, target=target.tvm_target())
        # The suffix tells TVM the format.
        temporary = final.with_name(f"{final.stem}.{os.getpid()}.part.o")
        executable.mod.write_to_file(str(temporary), "o")
        os.replace(temporary, final)
    # What a template refuses, and what TVM refuses; anything else is a bug and ends the process.
    except (ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        Path(kernel["error"]).write_text(reason, "utf-8")


def _is_gpu(kernel: dict[str, Any]) -> bool:
    return "arch" in kernel["target"]


def _compiler() -> str:
    program = compiler()
    assert program is not None, "the parent looked for it"
    return program


def make_variant(place: str, fields: Mapping[str, Any]) -> OperatorVariant:
    """The variant of class ``module:class`` with fields that went through JSON."""
    variant: OperatorVariant = load_named(place)(**make_fields(fields))
    return variant


def make_target(fields: Mapping[str, Any]) -> Any:
    """The ``CpuTarget`` or ``GpuTarget`` with fields that went through JSON."""
    kind: type[Any] = GpuTarget if "arch" in fields else CpuTarget
    return kind(**make_fields(fields))


def make_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a variant that went through JSON, as they were."""
    return {name: _hashable(value) for name, value in fields.items()}


def load_named(place: str) -> Any:
    """What ``module:attribute`` names."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _hashable(value: Any) -> Any:
    """JSON has no tuples; frozen dataclasses have no lists."""
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value


def _check_symbol(function: Any, symbol: str) -> None:
    functions = getattr(function, "functions", None)
    found = [function] if functions is None else list(functions.values())
    names = [str(item.attrs["global_symbol"]) for item in found if "global_symbol" in item.attrs]
    if symbol not in names:
        raise ValueError(f"the template must name its function {symbol!r}, got {names}")


if __name__ == "__main__":
    main()
