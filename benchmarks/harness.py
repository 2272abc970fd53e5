"""Times contestants in turns, and judges whether the machine was quiet.

Machines are shared and clocks move, so nothing is timed on its own: in every round each contestant
runs between matrix products, in changing order. Its reference is the median of several products
before and after it, its sample the median of several runs: an interruption of a few milliseconds
moves neither. A round in which a reference was more than 15 % off the median of all is left out,
and counted. What is reported are medians over rounds of ratios within rounds.

Contestants live in child processes (``child.py``): one with ONNX Runtime, one with torch, one for
each whole model. A contestant that fails takes only itself out. Nothing of ours is timed unless it
agrees with its float64 reference first.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.machine import available_bytes

HERE = Path(__file__).resolve().parent

GEMM_SIZE = 1024
GEMM_DEVIATION = 0.15
"""A round with a reference further off the median does not count, nor one whose products before and
after runs differ by twice that: as far as references may."""
GEMM_LEAST, GEMM_SHARE, GEMM_MOST = 5, 0.02, 101
"""Matrix products before a run, and again after it: beside a run of a minute, 50 ms of products say
little about that minute, so they take at least this share of a run's time, up to so many."""
LONG_ROUND = 30.0
"""Seconds from which on every round is reported."""

SAMPLE_SECONDS = 0.005
"""Shorter runs are repeated within one timing."""

TIMINGS, TIMINGS_BELOW = 3, 0.1
"""A sample is the median of so many timings, where a run takes fewer seconds than this: longer ones
even out interruptions by themselves."""

CASE_SECONDS = 2.0
"""A case gets more rounds than asked for while it took less."""


class _ContestantError(Exception):
    def __init__(self, label: str, reason: str) -> None:
        super().__init__(f"{label}: {reason}")
        self.label, self.reason = label, reason


class ContestantFailed(_ContestantError):
    """A contestant ended its process, or computes something else than asked for."""


class WrongResult(_ContestantError):
    """Something of ours computes something else than its reference."""


@dataclass(frozen=True)
class Contestant:
    """One who takes part in a case.

    Attributes:
        label: unique in the case.
        family: the process it lives in.
        spec: what the child opens.
        ours: whether it must be right for anything to be timed.
        wanted: its output by the formula, ``[..., rows, width]``; ``None``: not comparable.
        scratch: bytes it needs at least.
        limit: largest relative L2 error; ``None``: reported, not judged.
        unavailable: why it cannot take part.
    """

    label: str
    family: str
    spec: Mapping[str, Any]
    ours: bool = False
    wanted: Callable[[], NDArray[np.float64]] | None = None
    scratch: int = 0
    limit: float | None = 1e-5
    unavailable: str = ""


@dataclass(frozen=True)
class Case:
    """One workload at one length with one number of threads.

    Attributes:
        contestants: ours first.
        rows: of the outputs that are compared; ``None``: all.
        check: spec -> spec on which outputs are compared, where that is not the timed one.
        flops: of ours.
        predicted: seconds of one round, roughly.
        facts: further entries of the result.
    """

    workload: str
    length: int
    threads: int
    contestants: tuple[Contestant, ...]
    flops: float | None
    rows: tuple[int, ...] | None = None
    check: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    predicted: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.workload}, length {self.length}, {self.threads} threads"


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        rounds: that shall count, per case.
        seconds: for all cases together.
        clock: ``wall``, or ``cpu`` for one thread on a busy machine.
    """

    rounds: int = 10
    seconds: float = 540.0
    clock: str = "wall"


@dataclass(frozen=True)
class Row:
    """One round.

    Attributes:
        seconds: of each contestant.
        gemm: the reference of each: seconds of a matrix product.
        all_gemm: medians of the products before, between and after contestants.
    """

    seconds: Mapping[str, float]
    gemm: Mapping[str, float]
    all_gemm: tuple[float, ...]


class Process:
    """A child process with contestants."""

    def __init__(self, threads: int) -> None:
        self._errors = tempfile.TemporaryFile()
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            # Threads that wait for work must not spin on the next contestant's cores.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        self._child = subprocess.Popen(
            [sys.executable, str(HERE / "child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            text=True,
        )

    def ask(self, label: str, do: str, **request: Any) -> dict[str, Any]:
        """One request about one contestant.

        Raises:
            ContestantFailed: the process ended.
        """
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps({"do": do, "name": label} | request) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ContestantFailed(label, self._ending())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._child.stdin is not None
        if self._child.poll() is None:
            self._child.stdin.close()
        self._child.wait()
        self._errors.close()

    def _ending(self) -> str:
        code = self._child.wait()
        self._errors.seek(0)
        text = self._errors.read().decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if code < 0:
            return f"its process was killed by signal {-code}"
        return lines[-1][:200] if lines else f"its process ended with status {code}"


class Pool:
    """Child processes by family and number of threads, started when needed."""

    def __init__(self) -> None:
        self._processes: dict[tuple[str, int], Process] = {}

    def get(self, family: str, threads: int) -> Process:
        key = family, threads
        if key not in self._processes:
            self._processes[key] = Process(threads)
        return self._processes[key]

    def stop(self, keep: Callable[[str, int], bool] = lambda family, threads: False) -> None:
        """End all processes but those to keep."""
        for key in [key for key in self._processes if not keep(*key)]:
            self._processes.pop(key).close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def run_cases(
    cases: Sequence[Case], settings: Settings, progress: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Results of the cases that fit into the time, and the others with the reason.

    Cheap cases come first, those with fewer threads than the machine has cores later.

    Raises:
        WrongResult: something of ours is wrong; nothing more is timed.
    """
    stop = time.monotonic() + settings.seconds
    most = max((case.threads for case in cases), default=1)
    order = sorted(cases, key=lambda case: case.predicted * (1.0 if case.threads == most else 1.5))
    results, skipped = [], []
    with Pool() as pool:
        for number, case in enumerate(order):
            left = stop - time.monotonic()
            result = measure_case(case, pool, settings, left, progress)
            progress(f"[{number + 1}/{len(order)}, {max(left, 0):.0f} s left] {_summary(result)}")
            (skipped if "skipped" in result else results).append(result)
            # Models hold gigabytes.
            pool.stop(lambda family, threads: not family.startswith("model"))
    place = {(case.workload, case.length, case.threads): i for i, case in enumerate(cases)}
    results.sort(key=lambda item: place[item["workload"], item["length"], item["threads"]])
    return results, skipped


def _summary(result: Mapping[str, Any]) -> str:
    head = f"{result['workload']} {result['length']} x{result['threads']}: "
    if "skipped" in result:
        return head + f"left out, {result['skipped']}"
    rows = result["contestants"]
    parts = [
        f"{item['label']} {item['median_seconds'] * 1e3:.1f} ms ({item['ours_over_this']:.2f})"
        for item in rows
    ]
    kept = f"; {result['rounds_kept']}/{result['rounds']} rounds"
    return head + ", ".join(parts) + kept


def measure_case(
    case: Case,
    pool: Pool,
    settings: Settings,
    left: float,
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Measure; a contestant that fails is left out with its reason."""
    base = {"workload": case.workload, "length": case.length, "threads": case.threads}
    base |= dict(case.facts)
    excluded: dict[str, str] = {}
    if case.predicted * settings.rounds > left:
        needed = case.predicted * settings.rounds
        return base | {"skipped": f"about {needed:.0f} s are needed, {max(left, 0):.0f} s are left"}
    room = 0.8 * (available_bytes() or math.inf)
    for item in case.contestants:
        if item.unavailable:
            excluded[item.label] = item.unavailable
        elif item.scratch > room:
            excluded[item.label] = f"needs more than {item.scratch >> 20} MiB"
    while True:
        taking_part = [item for item in case.contestants if item.label not in excluded]
        if not any(item.ours for item in taking_part):
            return base | {"skipped": "; ".join(f"{k}: {v}" for k, v in excluded.items())}
        try:
            result = _attempt(case, taking_part, pool, settings, left, progress)
        except ContestantFailed as failed:
            excluded[failed.label] = failed.reason
            pool.stop()
            continue
        return base | result | {"excluded": excluded}


def _attempt(
    case: Case,
    contestants: Sequence[Contestant],
    pool: Pool,
    settings: Settings,
    left: float,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    started = time.monotonic()

    def process(item: Contestant) -> Process:
        return pool.get(item.family, case.threads)

    errors = {item.label: _checked(case, item, process(item)) for item in contestants}
    facts: dict[str, dict[str, Any]] = {}
    for item in contestants:
        process(item).ask(item.label, "open", spec=item.spec)
        facts[item.label] = process(item).ask(item.label, "first")
        if item.family == "torch":
            # Its first run may compile; unlike ONNX Runtime it frees what a run has used.
            facts[item.label] |= process(item).ask(item.label, "first")
        if case.check is None:
            errors[item.label] = _error(case, item, process(item))
        _judge_error(item, errors[item.label])
    # The first run of a shape also allocates: the second tells how long one takes.
    seconds = {
        item.label: process(item).ask(item.label, "time", repeat=1, clock=settings.clock)["seconds"]
        if facts[item.label]["seconds"] < 1.0
        else facts[item.label]["seconds"]
        for item in contestants
    }
    timings = {label: TIMINGS if s < TIMINGS_BELOW else 1 for label, s in seconds.items()}
    round_seconds = sum(timings[label] * max(s, SAMPLE_SECONDS) for label, s in seconds.items())
    needed = round_seconds * settings.rounds
    left -= time.monotonic() - started
    if needed > left:
        _close(contestants, process)
        return {"skipped": f"about {needed:.0f} s are needed, {max(left, 0):.0f} s are left"}
    gemm = pool.get("ort", case.threads)
    spec = {"kind": "gemm", "size": GEMM_SIZE, "threads": case.threads}
    gemm.ask("GEMM", "open", spec=spec)

    def multiply(products: int) -> list[float]:
        return _times(gemm, "GEMM", products, 1, settings)

    multiply(1)
    mean = sum(seconds.values()) / len(seconds)
    products = products_beside(mean, statistics.median(multiply(GEMM_LEAST)))
    repeat = {label: max(1, round(SAMPLE_SECONDS / max(s, 1e-7))) for label, s in seconds.items()}
    rows: list[Row] = []
    stop = time.monotonic() + left
    begun = time.monotonic()
    while _more(rows, settings, time.monotonic() - begun, stop - time.monotonic()):
        turn = len(rows) % len(contestants)
        before = multiply(products)
        got, around, all_gemm = {}, {}, [statistics.median(before)]
        for item in [*contestants[turn:], *contestants[:turn]]:
            label = item.label
            times = _times(process(item), label, timings[label], repeat[label], settings)
            after = multiply(products)
            got[label] = statistics.median(times)
            around[label] = statistics.median(before + after)
            all_gemm.append(statistics.median(after))
            before = after
        rows.append(Row(got, around, tuple(all_gemm)))
        if round_seconds > LONG_ROUND:
            shown = ", ".join(f"{label} {value:.2f} s" for label, value in got.items())
            progress(f"round {len(rows)}, {sum(steady(rows))} count: {shown}")
    gemm.ask("GEMM", "close")
    _close(contestants, process)
    return _statistics(case, contestants, rows, errors, facts)


def _more(rows: Sequence[Row], settings: Settings, spent: float, left: float) -> bool:
    """Whether another round is due: until enough counted, or it took twice as many."""
    if left <= 0 and rows:
        return False
    kept = sum(steady(rows))
    if kept < settings.rounds:
        return len(rows) < 2 * settings.rounds
    return spent < CASE_SECONDS and kept < 3 * settings.rounds


def _times(
    process: Process, label: str, timings: int, repeat: int, settings: Settings
) -> list[float]:
    """Seconds of one run, so many times, each the mean of ``repeat`` runs."""
    return [
        float(process.ask(label, "time", repeat=repeat, clock=settings.clock)["seconds"])
        for _ in range(timings)
    ]


def products_beside(seconds: float, product: float) -> int:
    """How many matrix products stand before and after a run of so many seconds."""
    return min(GEMM_MOST, max(GEMM_LEAST, int(GEMM_SHARE * seconds / product)))


def _close(contestants: Sequence[Contestant], process: Callable[[Contestant], Process]) -> None:
    for item in contestants:
        process(item).ask(item.label, "close")


def _checked(case: Case, item: Contestant, process: Process) -> float | None:
    """Error on the inputs made for it, where the timed ones are none for the reference."""
    if case.check is None or item.wanted is None:
        return None
    process.ask(item.label, "open", spec=case.check(item.spec))
    process.ask(item.label, "first")
    error = _error(case, item, process)
    process.ask(item.label, "close")
    return error


def _error(case: Case, item: Contestant, process: Process) -> float | None:
    """Relative L2 error against the formula in float64."""
    if item.wanted is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "output.npy")
        rows = None if case.rows is None else list(case.rows)
        process.ask(item.label, "sample", rows=rows, path=str(path))
        got = np.load(path)
    want = item.wanted()
    if got.shape != want.shape:
        raise ContestantFailed(item.label, f"its output is {got.shape}, expected {want.shape}")
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def _judge_error(item: Contestant, error: float | None) -> None:
    if error is None or item.limit is None:
        return
    # Written so that NaN is wrong.
    if not error <= item.limit:
        reason = f"its error relative to float64 is {error:.2g}, the limit {item.limit:g}"
        raise (WrongResult if item.ours else ContestantFailed)(item.label, reason)


def steady(rows: Sequence[Row]) -> list[bool]:
    """Whether the references of each round were near the median of all, and steady in the round."""
    if not rows:
        return []
    middle = statistics.median(value for row in rows for value in row.gemm.values())
    return [
        all(abs(value / middle - 1) <= GEMM_DEVIATION for value in row.gemm.values())
        and max(row.all_gemm) - min(row.all_gemm) <= 2 * GEMM_DEVIATION * middle
        for row in rows
    ]


def _statistics(
    case: Case,
    contestants: Sequence[Contestant],
    rows: Sequence[Row],
    errors: Mapping[str, float | None],
    facts: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    kept = [row for row, good in zip(rows, steady(rows), strict=True) if good]
    # Unsteady figures are better than none; `rounds_kept` says what they are worth.
    used = kept or list(rows)
    first = contestants[0].label
    gemm_flops = 2.0 * GEMM_SIZE**3
    gemm = [value for row in rows for value in row.gemm.values()]
    middle = statistics.median(gemm)
    table = []
    for item in contestants:
        seconds = np.array([row.seconds[item.label] for row in used])
        ratios = np.array([row.seconds[first] for row in used]) / seconds
        rate = None if case.flops is None else case.flops / seconds
        products = gemm_flops / np.array([row.gemm[item.label] for row in used])
        fact = facts[item.label]
        table.append(
            {
                "label": item.label,
                "ours": item.ours,
                "median_seconds": float(np.median(seconds)),
                "best_seconds": float(seconds.min()),
                "ours_over_this": float(np.median(ratios)),
                "ratio_quartiles": [float(x) for x in np.quantile(ratios, (0.25, 0.75))],
                "gflops": None if rate is None else float(np.median(rate)) / 1e9,
                "share_of_gemm": None if rate is None else float(np.median(rate / products)),
                "error": errors[item.label],
                "peak_growth_bytes": fact["growth"],
                "process_peak_bytes": fact["peak"],
            }
        )
    return {
        "rounds": len(rows),
        "rounds_kept": len(kept),
        "gemm_gflops": gemm_flops / middle / 1e9,
        "gemm_spread": max(abs(value / middle - 1) for value in gemm),
        "flops": case.flops,
        "contestants": table,
    }
