"""Time and memory of ``model.onnx`` against ``reference.onnx``.

Machines are shared and clocks move, so nothing is timed on its own. Every round times a matrix
product, one candidate, a matrix product, the other candidate, in changing order. The speed-up is
the median of the ratios within rounds. A round whose matrix products were more than 15 % off
their median is left out: something else was using the machine.

Peak memory is that of a fresh process per candidate and length.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.runtime import onnx_wire
from subquad.runtime.artifact import check_files, check_overloads, load, open_manifest
from subquad.runtime.errors import (
    BudgetError,
    IntegrityError,
    SubquadError,
    UnsupportedModelError,
    UsageError,
)
from subquad.runtime.jsonable import json_ready
from subquad.runtime.kernel_library import KernelMode, choose_kernels
from subquad.runtime.machine import describe_machine, versions
from subquad.runtime.manifest import MODEL_NAME, REFERENCE_NAME, Manifest
from subquad.runtime.past import with_past
from subquad.runtime.samples import Case, LatticeSamples, Layout
from subquad.runtime.session import TURNS, onnxruntime, open_session, run_session
from subquad.runtime.validate import validate

Progress = Callable[[str, float | None], None]
Feeds = Mapping[str, NDArray[Any]]

DEFAULT_LENGTHS = (128, 512, 2048)
GEMM_DEVIATION = 0.15
GEMM_SIZE = 768
_FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Round:
    """Seconds of one round; ``kept`` = the matrix products were steady."""

    reference: float
    artifact: float
    gemm: tuple[float, float]
    kept: bool


@dataclass(frozen=True)
class BenchCase:
    """One length.

    Attributes:
        length, batch: of the inputs.
        rounds, rounds_kept: timed, and used for the figures below.
        reference_seconds, artifact_seconds: medians.
        speedup: median over rounds of reference / artifact.
        speedup_quartiles: of the same ratios.
        gemm_spread: largest deviation of a matrix product from their median, all rounds.
        reference_peak_bytes, artifact_peak_bytes: largest resident memory of a fresh process,
            weights and ONNX Runtime included; ``None`` = not measured.
        raw: every round.
    """

    length: int
    batch: int
    rounds: int
    rounds_kept: int
    reference_seconds: float
    artifact_seconds: float
    speedup: float
    speedup_quartiles: tuple[float, float]
    gemm_spread: float
    reference_peak_bytes: int | None
    artifact_peak_bytes: int | None
    raw: tuple[Round, ...]


@dataclass(frozen=True)
class BenchResult:
    """All lengths, and what the figures depend on.

    Attributes:
        checked: verdict of the validation before; ``unchecked`` if it was skipped.
        gemm_gflops: median rate of the matrix products, in 1e9 floating-point operations a second.
        notes: what a reader must know about the figures.
    """

    artifact: str
    checked: str
    cases: tuple[BenchCase, ...]
    skipped: tuple[dict[str, Any], ...]
    gemm_gflops: float
    machine: dict[str, Any]
    versions: dict[str, str | None]
    provider: str
    threads: int | None
    seed: int
    time_limit: float
    seconds: float
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = json_ready(self)
        return result


def bench(
    path: str | Path,
    *,
    lengths: Sequence[int] | None = None,
    batch: int = 1,
    rounds: int = 10,
    time_limit: float = 300.0,
    memory: bool = True,
    checked: bool = True,
    seed: int = 0,
    provider: str = "cpu",
    threads: int | None = None,
    kernels: KernelMode = "auto",
    progress: Progress | None = None,
) -> BenchResult:
    """Time an artifact against its reference.

    Args:
        path: artifact directory.
        lengths: sequence lengths; by default 128, 512, 2048 as far as the model accepts them.
        batch: rows.
        rounds: per length.
        time_limit: seconds for all rounds together. Each length gets an equal share of what is
            left, and at least one round.
        memory: whether to measure peak memory, one process per candidate and length.
        checked: validate first (two short lengths) and refuse an artifact that fails.
        seed: of the inputs, which are random.
        provider, threads: for both candidates.
        kernels: as ``load``.
        progress: called with a message and the share done.

    Raises:
        BudgetError: the validation failed.
        UnsupportedModelError: no length could run.
    """
    started = time.monotonic()
    report = progress or (lambda message, share: None)
    folder, manifest = open_manifest(path)
    check_files(folder, manifest)
    check_overloads(folder)
    if REFERENCE_NAME not in manifest.files:
        raise IntegrityError(f"{folder} has no {REFERENCE_NAME} to compare with. Convert again.")
    wanted = _lengths(lengths, manifest.max_length)
    options = {"provider": provider, "threads": threads, "kernels": kernels}
    verdict = _check(path, seed, options, report) if checked else "unchecked"
    timer = _Timer(folder, manifest, options)
    samples = LatticeSamples(manifest, seed=seed, rows=batch)
    if not Layout.of(manifest).lengths:
        wanted = [0]
    cases: list[BenchCase] = []
    skipped: list[dict[str, Any]] = []
    notes: list[str] = []
    rates: list[float] = []
    deadline = time.monotonic() + time_limit
    for number, length in enumerate(wanted):
        if manifest.max_length is not None and length > manifest.max_length:
            reason = f"the model accepts at most {manifest.max_length} tokens"
            skipped.append({"length": length, "reason": reason})
            continue
        feeds = next(samples.batches(Case(length, "none", ((0, batch),)))).feeds
        left = deadline - time.monotonic()
        stop = time.monotonic() + left / (len(wanted) - number)
        try:
            raw = []
            for item in timer.rounds(feeds, rounds, stop):
                raw.append(item)
                share = (number + len(raw) / rounds) / len(wanted)
                report(f"timing: length {length}, round {len(raw)}/{rounds}", share)
        except SubquadError as error:
            skipped.append({"length": length, "reason": str(error)})
            continue
        kept_raw, kept = _judge(raw)
        where = f"length {length}"
        if len(raw) < rounds:
            notes.append(f"{where}: {len(raw)} of {rounds} rounds fitted into the time limit")
        if kept < len(raw):
            notes.append(
                f"{where}: {len(raw) - kept} of {len(raw)} rounds left out, because the matrix "
                f"product was more than {GEMM_DEVIATION:.0%} off its median"
            )
        if kept < _FEWEST_ROUNDS:
            notes.append(f"{where}: UNRELIABLE, {kept} steady rounds; the machine is busy")
        peaks: list[int | None] = []
        for name in (REFERENCE_NAME, MODEL_NAME):
            peak = None
            if memory:
                try:
                    peak = _peak(folder, name, length, batch, seed, options, report)
                # The timings stand without it.
                except SubquadError as error:
                    notes.append(f"{where}: {error}")
            peaks.append(peak)
        rates += [2.0 * GEMM_SIZE**3 / seconds / 1e9 for item in raw for seconds in item.gemm]
        cases.append(_case(length, batch, kept_raw, (peaks[0], peaks[1])))
    if not cases:
        why = "; ".join(f"length {item['length']}: {item['reason']}" for item in skipped)
        raise UnsupportedModelError(f"{folder}: no length could be timed. {why}")
    return BenchResult(
        artifact=str(path),
        checked=verdict,
        cases=tuple(cases),
        skipped=tuple(skipped),
        gemm_gflops=statistics.median(rates),
        machine=describe_machine(),
        versions=versions(("subquad", "numpy")) | {"onnxruntime": onnxruntime().__version__},
        provider=provider,
        threads=threads,
        seed=seed,
        time_limit=time_limit,
        seconds=time.monotonic() - started,
        notes=tuple(notes),
    )


def _lengths(lengths: Sequence[int] | None, limit: int | None) -> list[int]:
    for length in lengths or ():
        if length < 1:
            raise UsageError(f"Lengths must be at least 1, got {length}.")
    if lengths:
        return sorted(set(lengths))
    fitting = [length for length in DEFAULT_LENGTHS if limit is None or length <= limit]
    return fitting or [limit or 1]


def _check(path: str | Path, seed: int, options: Mapping[str, Any], report: Progress) -> str:
    result = validate(
        path,
        lengths=(17, 65),
        paddings=("none", "right"),
        seed=seed,
        sites=False,
        progress=report,
        **options,
    )
    if result.verdict == "fail":
        raise BudgetError(
            f"{path} fails validation, so its speed means nothing: {result.reasons[0]}. "
            "See `subquad validate`; --unchecked times it anyway."
        )
    return result.verdict


class _Timer:
    """Both candidates and the matrix product, loaded once."""

    def __init__(self, folder: Path, manifest: Manifest, options: Mapping[str, Any]) -> None:
        provider, threads = options["provider"], options["threads"]

        def opened(model: Path | bytes, libraries: Sequence[Path] = ()) -> Any:
            return open_session(
                model,
                folder=folder,
                provider=provider,
                threads=threads,
                config=TURNS,
                libraries=libraries,
            )

        choice = choose_kernels(folder, manifest, options["kernels"], provider=provider)
        self._reference_inputs = manifest.reference_inputs or manifest.inputs
        self._reference = opened(folder / REFERENCE_NAME)
        self._artifact = opened(folder / MODEL_NAME, choice.paths)
        self._gemm = opened(onnx_wire.matmul_model())
        rng = np.random.default_rng(0)
        shape = (GEMM_SIZE, GEMM_SIZE)
        self._matrices = {name: rng.standard_normal(shape).astype(np.float32) for name in "ab"}

    def rounds(self, feeds: Feeds, count: int, stop: float) -> Iterator[Round]:
        """Up to ``count`` rounds: one, and more until the time ``stop``."""

        own = {
            self._reference: with_past(self._reference_inputs, feeds),
            self._artifact: feeds,
        }

        def candidate(session: Any) -> float:
            names = [value.name for value in session.get_outputs()]
            return _seconds(session, own[session], names)

        def gemm() -> float:
            return _seconds(self._gemm, self._matrices, ["c"])

        # The first run of a shape allocates.
        candidate(self._reference)
        candidate(self._artifact)
        gemm()
        for number in range(count):
            if number > 0 and time.monotonic() > stop:
                return
            before = gemm()
            if number % 2 == 0:
                reference = candidate(self._reference)
                between = gemm()
                artifact = candidate(self._artifact)
            else:
                artifact = candidate(self._artifact)
                between = gemm()
                reference = candidate(self._reference)
            yield Round(reference, artifact, (before, between), kept=True)


def _seconds(session: Any, feeds: Feeds, names: Sequence[str]) -> float:
    start = time.perf_counter()
    run_session(session, feeds, names)
    return time.perf_counter() - start


def _judge(raw: Sequence[Round]) -> tuple[list[Round], int]:
    """Mark the rounds during which the matrix product was steady, and count them."""
    median = statistics.median(seconds for item in raw for seconds in item.gemm)
    judged = []
    for item in raw:
        off = max(abs(seconds / median - 1.0) for seconds in item.gemm)
        judged.append(Round(item.reference, item.artifact, item.gemm, kept=off <= GEMM_DEVIATION))
    return judged, sum(item.kept for item in judged)


def _case(
    length: int, batch: int, raw: Sequence[Round], peaks: tuple[int | None, int | None]
) -> BenchCase:
    kept = [item for item in raw if item.kept]
    # Unsteady figures are better than none; the notes call them unreliable.
    used = kept or list(raw)
    ratios = [item.reference / item.artifact for item in used]
    gemm = [seconds for item in raw for seconds in item.gemm]
    middle = statistics.median(gemm)
    low, high = np.quantile(ratios, (0.25, 0.75))
    return BenchCase(
        length=length,
        batch=batch,
        rounds=len(raw),
        rounds_kept=len(kept),
        reference_seconds=statistics.median(item.reference for item in used),
        artifact_seconds=statistics.median(item.artifact for item in used),
        speedup=statistics.median(ratios),
        speedup_quartiles=(float(low), float(high)),
        gemm_spread=max(abs(seconds / middle - 1.0) for seconds in gemm),
        reference_peak_bytes=peaks[0],
        artifact_peak_bytes=peaks[1],
        raw=tuple(raw),
    )


def _peak(
    folder: Path,
    file: str,
    length: int,
    batch: int,
    seed: int,
    options: Mapping[str, Any],
    report: Progress,
) -> int | None:
    """Largest resident memory of a fresh process that runs ``file`` once."""
    report(f"memory: length {length}, {file}", None)
    task = {
        "folder": str(folder.resolve()),
        "file": file,
        "length": length,
        "batch": batch,
        "seed": seed,
        **options,
    }
    command = [sys.executable, "-m", "subquad.runtime.memory_probe", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise SubquadError(f"The process that measures the memory of {file} failed: {lines[-1]}")
    peak: int | None = json.loads(done.stdout)
    return peak


def run_alone(task: Mapping[str, Any]) -> None:
    """Run one file once in this process; the work of ``memory_probe``."""
    folder, manifest = open_manifest(task["folder"])
    samples = LatticeSamples(manifest, seed=task["seed"], rows=task["batch"])
    case = Case(task["length"], "none", ((0, task["batch"]),))
    feeds = next(samples.batches(case)).feeds
    options: dict[str, Any] = {"provider": task["provider"], "threads": task["threads"]}
    if task["file"] == MODEL_NAME:
        load(folder, verify=False, kernels=task["kernels"], **options).run(feeds)
        return
    session = open_session(folder / task["file"], folder=folder, **options)
    own = with_past(manifest.reference_inputs or manifest.inputs, feeds)
    run_session(session, own, [value.name for value in session.get_outputs()])
