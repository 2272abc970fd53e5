"""Candidates on this machine: compiled by ``host/build.py``, run by ONNX Runtime in a child."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subquad.kernels.one_node import one_node_model
from subquad.kernels.templates.space import Params
from subquad.kernels.tuning.candidates import CandidateBench
from subquad.kernels.tuning.search import Trial

START_SECONDS = 30.0
"""What starting a process, the check and the first round may take on top of the time to measure."""


@dataclass
class LocalBench(CandidateBench):
    """See ``search.Bench``; one candidate at a time, since they share the cores."""

    lanes: int = 1

    def measure(
        self, candidate: Params, best: Params, default: Params, rounds: int, seconds: float
    ) -> Trial:
        task = self.task(candidate, best, default, rounds, seconds)
        with tempfile.TemporaryDirectory(prefix="subquad-tuning-") as name:
            folder = Path(name)
            (folder / "node.onnx").write_bytes(one_node_model(self.variant).SerializeToString())
            task |= {
                "model": str(folder / "node.onnx"),
                "result": str(folder / "result.json"),
            }
            child = "subquad.kernels.tuning.measure_child"
            return run_measure_child(child, task, folder, task["seconds"])


def run_measure_child(module: str, task: Mapping[str, Any], folder: Path, seconds: float) -> Trial:
    """Run ``python -m module TASK.json`` and read what it found; a crash or hang is a failure.

    Args:
        module: one with the protocol of ``measure_child.py``.
        task: its task; ``result`` lies in ``folder``.
        folder: a temporary one.
        seconds: that the child has for its rounds; it is killed ``START_SECONDS`` later.
    """
    (folder / "task.json").write_text(json.dumps(task), "utf-8")
    command = [sys.executable, "-P", "-m", module, str(folder / "task.json")]
    # Variants and templates come from where this process sees them; libraries that compute
    # references must not take more threads than the kernels.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": str(task["threads"]),
    }
    environment.pop("SUBQUAD_POISON", None)
    with (folder / "output").open("w+b") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            code = child.wait(seconds + START_SECONDS)
        except subprocess.TimeoutExpired:
            return Trial("failed", f"it took more than {seconds + START_SECONDS:.0f} s to measure")
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        result = Path(task["result"])
        if result.exists():
            found = json.loads(result.read_text("utf-8"))
            if "wrong" in found:
                return Trial("wrong", found["wrong"])
            return Trial("ok", times=found["times"])
        output.seek(0)
        lines = [line for line in output.read().decode("utf-8", "replace").splitlines() if line]
    last = f": {lines[-1].strip()[:300]}" if lines else ""
    ending = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
    return Trial("failed", f"the measuring process {ending}{last}")
