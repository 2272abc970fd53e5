"""Check and time one candidate inside ONNX Runtime: the child process of ``local.py``.

``python -m subquad.kernels.tuning.measure_child TASK.json``; the task is

    {"variant": "module:class", "fields": {...}, "model": "/…/node.onnx", "result": "/…/r.json",
     "libraries": {"default": "/…/a.so", "best": "/…/b.so", "candidate": "/…/c.so"},
     "workload": {...}, "rounds": 9, "give_up": 1.15, "seconds": 60.0, "threads": 1, "seed": 0}

The result is ``{"wrong": "…"}`` or ``{"times": {"default": [...], ...}}`` with one time per round.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from subquad.kernels.host.compile_child import make_variant
from subquad.kernels.tuning.checks import check_kernel, compare
from subquad.kernels.tuning.rounds import repeats_for, time_rounds
from subquad.kernels.tuning.workload import Feeds, Workload
from subquad.runtime.session import onnxruntime


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    result = measure(task)
    part = Path(task["result"] + ".part")
    part.write_text(json.dumps(result), "utf-8")
    os.replace(part, task["result"])


def measure(task: Mapping[str, Any]) -> dict[str, Any]:
    """See the module docstring."""
    end = time.monotonic() + task["seconds"]
    variant = make_variant(task["variant"], task["fields"])
    model = Path(task["model"]).read_bytes()
    libraries: Mapping[str, str] = task["libraries"]
    # Outputs full of NaN beforehand show what a kernel does not write.
    os.environ["SUBQUAD_POISON"] = "1"
    checked = _open(model, libraries["candidate"], 1)
    wrong = check_kernel(variant, lambda feeds: checked.run(None, feeds), task["seed"])
    del os.environ["SUBQUAD_POISON"]
    if wrong:
        return {"wrong": wrong}
    feeds = Workload(**task["workload"]).feeds(variant, task["seed"])
    sessions = {name: _open(model, library, task["threads"]) for name, library in libraries.items()}
    outputs = {name: session.run(None, feeds) for name, session in sessions.items()}
    # The reference would need the square of the length in memory; the default kernel is checked.
    wrong = compare(variant, outputs["candidate"], outputs["default"])
    if wrong:
        return {"wrong": wrong}
    del outputs
    clock = time.process_time if task["threads"] == 1 else time.perf_counter
    repeats = repeats_for(_timer(sessions["default"], feeds, clock, 1)())
    timers = {name: _timer(session, feeds, clock, repeats) for name, session in sessions.items()}
    return {"times": time_rounds(timers, task["rounds"], task["give_up"], end)}


def _timer(
    session: Any, feeds: Feeds, clock: Callable[[], float], repeats: int
) -> Callable[[], float]:
    def sample() -> float:
        start = clock()
        for _ in range(repeats):
            session.run(None, feeds)
        return (clock() - start) / repeats

    return sample


def _open(model: bytes, library: str, threads: int) -> Any:
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    # Threads that wait for work of one kernel must not spin on the next one's cores.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.register_custom_ops_library(library)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    main()
