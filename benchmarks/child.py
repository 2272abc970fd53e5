"""The process in which contestants live: opens, runs, times and samples them on request.

One line of JSON in, one line out. Nothing is caught here: what fails ends the process, and the
parent takes the contestant that was at work out of the race.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

CLOCKS: Mapping[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "cpu": time.process_time,
}


def serve() -> None:
    """Answer requests until the input ends."""
    # What a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    opened: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(_answer(request, opened)) + "\n")
        answers.flush()


def _answer(request: Mapping[str, Any], opened: dict[str, Any]) -> dict[str, Any]:
    name = request["name"]
    match request["do"]:
        case "open":
            opened[name] = _open(request["spec"])
            return {}
        case "close":
            del opened[name]
            return {}
        case "first":
            return _first(opened[name])
        case "time":
            clock = CLOCKS[request["clock"]]
            call, count = opened[name].call, int(request["repeat"])
            start = clock()
            for _ in range(count):
                call()
            return {"seconds": (clock() - start) / count}
        case "sample":
            rows = request["rows"]
            output = opened[name].output()
            np.save(request["path"], output if rows is None else output[..., rows, :])
            return {}
    raise ValueError(request["do"])


def _open(spec: Mapping[str, Any]) -> Any:
    if spec["kind"] == "gemm":
        return _open_gemm(spec)
    if spec["kind"] == "model":
        import whole_models

        return whole_models.prepare(spec)
    return _open_operator(spec)


def _open_gemm(spec: Mapping[str, Any]) -> Any:
    from contestants import bind, open_model
    from subquad.runtime.onnx_wire import matmul_model

    matrix = np.random.default_rng(0).standard_normal((spec["size"],) * 2, dtype=np.float32)
    return bind(open_model(matmul_model(), spec["threads"]), {"a": matrix, "b": matrix})


def _open_operator(spec: Mapping[str, Any]) -> Any:
    from contestants import ENGINES, Task
    from subquad.kernels.example_inputs import example_inputs
    from workloads import by_name

    workload = by_name()[spec["workload"]]
    (entry,) = (item for item in workload.entries if item.label == spec["entry"])
    sizes = workload.sizes(spec["length"], entry)
    feeds = example_inputs(entry.variant, sizes)
    task = Task(entry.variant, sizes, feeds, spec["threads"], spec["library"])
    return ENGINES[entry.engine].prepare(task)


def _first(contestant: Any) -> dict[str, Any]:
    """The first run: its time, and by how much memory rose above what was there before."""
    from subquad.runtime.machine import memory_growth

    seconds = 0.0

    def call() -> None:
        nonlocal seconds
        start = time.perf_counter()
        contestant.call()
        seconds = time.perf_counter() - start

    growth, peak = memory_growth(call) or (None, None)
    return {"seconds": seconds, "growth": growth, "peak": peak}


if __name__ == "__main__":
    serve()
