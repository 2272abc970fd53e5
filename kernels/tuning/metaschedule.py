"""MetaSchedule as an engine: what it finds to search in a kernel, and why that is not searched.

MetaSchedule derives schedules of blocks that are not scheduled yet. Our templates emit loops that
are: it sees one schedule without a choice. The engine asks it rather than assuming so, and
declines with what it found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from subquad.kernels.host.build import class_name, fields_of
from subquad.kernels.kernel import CpuTarget
from subquad.kernels.operator import OperatorVariant
from subquad.runtime.errors import UsageError

NEEDS = ("cloudpickle", "psutil", "tornado", "xgboost")
"""Packages that MetaSchedule imports and TVM does not declare: the extra ``tune``."""


def check_packages() -> None:
    """Raises UsageError: a package is missing."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"MetaSchedule needs {', '.join(missing)}, which is not installed: "
            "pip install 'subquad[tune]'."
        )


def why_not(
    variant: OperatorVariant,
    target: CpuTarget,
    templates: Mapping[str, str],
    threads: int,
    seconds: float,
) -> str:
    """Why MetaSchedule does not tune the kernel of ``variant``."""
    with tempfile.TemporaryDirectory(prefix="subquad-tuning-") as name:
        folder = Path(name)
        task = {
            "variant": class_name(variant),
            "fields": fields_of(variant),
            "template": templates[variant.op_type],
            "target": asdict(target),
            "threads": threads,
            "result": str(folder / "result.json"),
        }
        (folder / "task.json").write_text(json.dumps(task), "utf-8")
        module = "subquad.kernels.host.metaschedule_child"
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", module, str(folder / "task.json")],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=max(0.0, seconds),
                check=False,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except subprocess.TimeoutExpired:
            return "MetaSchedule did not answer in time"
        if done.returncode != 0:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            return f"MetaSchedule ended with status {done.returncode}: {lines[-1:]}"
        found = json.loads((folder / "result.json").read_text("utf-8"))
    counts = f"{found['instructions']} instructions and {found['decisions']} decisions"
    if found["decisions"] == 0:
        return f"MetaSchedule has nothing to search: the kernel is scheduled already, {counts}"
    return f"MetaSchedule finds {counts}, which this version does not search"
