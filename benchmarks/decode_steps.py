"""Time of one decoding step after so many tokens, for artifacts with a cache.

    subquad convert ./my-gpt exact --cache
    subquad convert ./my-gpt fast --cache --force window:256
    python benchmarks/decode_steps.py exact fast --lengths 1024 2048 4096 8192

The past is made up: the time of a step depends on its size, not on its values. Artifacts take
turns, with a matrix product between them, and rounds on a busy machine are left out, as in
``harness.py``. Prints a table and, with ``--output``, writes all rounds as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import subquad
from subquad.runtime.artifact import Artifact
from subquad.runtime.machine import describe_machine, versions
from subquad.runtime.past import PAST, TOTAL, carried
from subquad.runtime.session import onnxruntime, run_ort_values

GEMM_SIZE = 1024
GEMM_DEVIATION = 0.15


def step_of(artifact: Artifact, past: int) -> Callable[[], None]:
    """Run one token behind a made-up past of so many."""
    manifest = artifact.manifest
    sizes = {"batch": 1, "length": 1, PAST: past, TOTAL: past + 1}
    rng = np.random.default_rng(0)
    value = onnxruntime().OrtValue.ortvalue_from_numpy
    feeds = {}
    for spec in manifest.inputs:
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
        if spec.role == "past":
            array = rng.random(shape, np.float32)
        elif spec.role == "padding_mask":
            array = np.ones(shape, spec.dtype)
        else:
            array = np.full(shape, past if "position" in spec.name else 1, spec.dtype)
        feeds[spec.name] = value(array)
    names = [spec.name for spec in manifest.outputs if spec.is_logits]
    names += carried(manifest).values()
    return lambda: _ignore(run_ort_values(artifact.session, feeds, names))


def _ignore(result: object) -> None:
    """What is timed includes that the outputs are made, not that they are looked at."""


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure(
    artifacts: dict[str, Artifact], lengths: list[int], rounds: int
) -> list[dict[str, Any]]:
    """Rounds of every length: seconds of each artifact, and of the matrix products."""
    matrix = np.random.default_rng(1).random((GEMM_SIZE, GEMM_SIZE), np.float32)
    results = []
    for length in lengths:
        steps = {name: step_of(artifact, length) for name, artifact in artifacts.items()}
        for step in steps.values():
            step()  # the first run of a shape allocates
        raw: list[dict[str, Any]] = []
        for number in range(rounds):
            order = list(steps) if number % 2 == 0 else list(reversed(steps))
            item: dict[str, Any] = {"gemm": []}
            for name in order:
                item["gemm"].append(_seconds(lambda: matrix @ matrix))
                # One step may be too short to time.
                item[name] = statistics.median(_seconds(steps[name]) for _ in range(5))
            raw.append(item)
        usual = statistics.median(seconds for item in raw for seconds in item["gemm"])
        kept = [
            item for item in raw if all(abs(s / usual - 1) <= GEMM_DEVIATION for s in item["gemm"])
        ]
        results.append(
            {
                "length": length,
                "rounds": len(raw),
                "kept": len(kept),
                "step_ms": {
                    name: 1e3 * statistics.median(item[name] for item in kept or raw)
                    for name in steps
                },
                "raw": raw,
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    artifacts = {path.name: subquad.load(path, threads=given.threads) for path in given.artifacts}
    results = measure(artifacts, given.lengths, given.rounds)
    print("| tokens before | " + " | ".join(f"{name}, ms" for name in artifacts) + " | rounds |")
    print("|---" * (len(artifacts) + 2) + "|")
    for item in results:
        cells = [f"{item['step_ms'][name]:.2f}" for name in artifacts]
        print(f"| {item['length']} | {' | '.join(cells)} | {item['kept']} of {item['rounds']} |")
    if given.output is not None:
        facts = {
            "machine": describe_machine(),
            "versions": versions(("subquad", "onnxruntime", "numpy")),
            "threads": given.threads,
            "results": results,
        }
        given.output.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
