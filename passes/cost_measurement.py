"""Measure the cost table: one-node models in ONNX Runtime, with kernels and as functions.

What is timed is what an artifact runs: the node with the kernel library, or its ONNX function,
inputs and outputs in place. All candidates of one shape take turns with a matrix product; each time
counts relative to the products beside it, multiplied by what a product takes when nothing disturbs
it (the quarter of them that was fastest). So a busy machine shifts a table less than plain clocks
would; ``steady`` in its settings says how busy it was. With one thread CPU time counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from subquad.kernels.example_inputs import Sizes, example_inputs
from subquad.kernels.host.build import build_kernels, missing_tools
from subquad.kernels.host.targets import host_targets
from subquad.kernels.inputs import Heads
from subquad.kernels.one_node import one_node_model
from subquad.kernels.operator import OperatorVariant
from subquad.passes.costs import (
    REACH,
    RUNS_AS,
    CostCurve,
    CostPoint,
    CostTable,
    CurveKey,
    RunsAs,
    bucket_of,
    owner_here,
    span_of,
)
from subquad.passes.methods import METHODS, parse_method
from subquad.passes.recognise.site import AttentionSite, MaskPredicate, Proof
from subquad.runtime import onnx_wire
from subquad.runtime.artifact import open_manifest
from subquad.runtime.errors import IntegrityError, UsageError
from subquad.runtime.machine import (
    available_bytes,
    describe_machine,
    memory_growth,
    usable_cores,
)
from subquad.runtime.session import TURNS, BoundRun, open_session

Progress = Callable[[str, float | None], None]

LENGTHS = (256, 1024, 4096, 8192)
DENSITIES = (0.1, 0.3, 0.6, 1.0)
"""Measured for operators that read a list of blocks."""

GEMM_SIZE = 768
GEMM_DEVIATION = 0.15
SAMPLE_SECONDS = 0.003
"""Shorter runs are repeated within one sample."""


@dataclass(frozen=True)
class CostPlan:
    """What to measure.

    Attributes:
        variants: operators; each is measured as function, and as kernel where it has one.
        lengths: equal lengths of queries and keys; for ``query_lens`` lengths of the keys.
        batches: rows of the batch.
        query_lens: fixed numbers of queries besides (1: decoding).
        threads: of the sessions; default one, and all cores.
        rounds: per shape.
        seconds: for everything; shapes that do not fit are left out, longest first.
    """

    variants: tuple[OperatorVariant, ...]
    lengths: tuple[int, ...] = LENGTHS
    batches: tuple[int, ...] = (1,)
    query_lens: tuple[int, ...] = ()
    threads: tuple[int, ...] = field(default_factory=lambda: tuple(sorted({1, usable_cores()})))
    rounds: int = 7
    seconds: float = 600.0

    def __post_init__(self) -> None:
        if not self.variants:
            raise UsageError("No operator to measure.")
        numbers = (*self.lengths, *self.batches, *self.query_lens, *self.threads, self.rounds)
        if not self.lengths or min(numbers) < 1:
            raise UsageError("Lengths, batches, queries, threads and rounds must be 1 or more.")


WINDOWS = (64, 256, 1024)
_NO_PROOF = Proof("", 0, 0, 0.0)


def candidates_of(site: AttentionSite) -> list[OperatorVariant]:
    """What may run at a site: every method with its defaults, windows of several sizes."""
    texts = [f"window:size={size}" for size in WINDOWS]
    for method in METHODS:
        if all(spec.default is not MISSING for spec in fields(method.parameters)):
            texts.append(method.name)
    variants: list[OperatorVariant] = []
    for text in texts:
        method, params = parse_method(text)
        if method.supports(site, params) is None:
            variants += [*method.prepare(site, params), method.lower(site, params)]
    return variants


def sites_of(path: str | Path) -> list[AttentionSite]:
    """The attentions of an artifact, as its manifest has them.

    Raises:
        IntegrityError: the manifest describes them otherwise than this version does.
    """
    folder, manifest = open_manifest(path)
    try:
        return [AttentionSite.from_json(record.site) for record in manifest.sites]
    except (KeyError, TypeError) as error:
        raise IntegrityError(
            f"The manifest of {folder} does not describe its attentions as this version of subquad "
            f"does: {error}. Convert again."
        ) from error


def example_sites(shape: str) -> list[AttentionSite]:
    """Causal and full attention with key padding, for ``HEADS/KV_HEADS/DIM``.

    Raises:
        UsageError: ``shape`` is not written so.
    """
    try:
        heads, kv_heads, dim = (int(part) for part in shape.split("/"))
        Heads(heads, kv_heads, dim, dim)
    except ValueError as error:
        raise UsageError(
            f"Shape {shape!r}: expected HEADS/KV_HEADS/DIM such as 12/12/64."
        ) from error
    return [
        AttentionSite(
            name=f"{mask.describe()} {shape}",
            index=index,
            source_form="Attention",
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            value_dim=dim,
            scale=dim**-0.5,
            softcap=0.0,
            mask=mask,
            is_self=True,
            source_output="",
            output="",
            proof=_NO_PROOF,
        )
        for index, mask in enumerate(
            (
                MaskPredicate(window_right=0, key_padding=True),
                MaskPredicate(key_padding=True),
            )
        )
    ]


@dataclass(frozen=True)
class _Candidate:
    variant: OperatorVariant
    runs_as: RunsAs
    model: bytes
    libraries: tuple[Path, ...]

    @property
    def label(self) -> str:
        return f"{self.variant.op_type}:{self.variant.overload} as {self.runs_as}"


def measure_costs(plan: CostPlan, progress: Progress | None = None) -> CostTable:
    """Measure on this machine, now.

    Raises:
        UsageError: nothing could be measured.
    """
    report = progress or (lambda message, share: None)
    report("building kernels", None)
    candidates, notes = _candidates(plan.variants)
    started = time.monotonic()
    stop = started + plan.seconds
    shapes = _shapes(plan)
    curves: dict[CurveKey, list[CostPoint]] = {}
    steady: list[bool] = []
    too_large: set[str] = set()
    for number, (threads, sizes) in enumerate(shapes):
        what = f"batch {sizes.batch}, {sizes.query_len} queries, {sizes.kv_len} keys"
        if time.monotonic() > stop:
            notes.append(f"{what}, {threads} threads and {len(shapes) - number - 1} more: no time")
            break
        report(f"{threads} threads, {what}", number / len(shapes))
        wanted = [c for c in candidates if _takes(c, sizes) and c.label not in too_large]
        measured = _measure(wanted, sizes, threads, plan.rounds, stop)
        steady += measured.steady
        notes += measured.notes
        too_large |= measured.too_large
        for candidate, point in measured.points:
            op_type, bucket = candidate.variant.op_type, bucket_of(candidate.variant)
            curves.setdefault((op_type, bucket, candidate.runs_as, threads), []).append(point)
    if not curves:
        raise UsageError("No cost could be measured: " + "; ".join(notes))
    return CostTable(
        owner_here(),
        tuple(
            CostCurve(*key, tuple(sorted(points, key=lambda point: point.place)))
            for key, points in sorted(curves.items())
        ),
        describe_machine(),
        {
            "date": datetime.now(UTC).date().isoformat(),
            "rounds": plan.rounds,
            "steady": float(np.mean(steady)) if steady else 0.0,
            "seconds": time.monotonic() - started,
        },
        tuple(notes),
    )


def _candidates(variants: Iterable[OperatorVariant]) -> tuple[list[_Candidate], list[str]]:
    # Variants that share a point of a curve cost the same: one of them is enough.
    unique = {
        (variant.op_type, bucket_of(variant), span_of(variant), variant.num_heads): variant  # type: ignore[attr-defined]
        for variant in variants
    }
    # Only what this machine runs; compiling takes longer than measuring.
    targets = None if missing_tools() else host_targets()[-1:]
    built = build_kernels(list(unique.values()), targets=targets)
    paths = (built.libraries[-1].path,) if built.libraries else ()
    candidates, notes = [], []
    for variant in unique.values():
        model = one_node_model(variant).SerializeToString()
        key = variant.op_type, variant.overload
        if key in built.served:
            candidates.append(_Candidate(variant, "kernel", model, paths))
        else:
            notes.append(f"{variant.op_type}:{variant.overload}: {built.declined[key].reason}")
        candidates.append(_Candidate(variant, "function", model, ()))
    return candidates, notes


def _shapes(plan: CostPlan) -> list[tuple[int, Sizes]]:
    """Threads and sizes, short lengths first."""
    shapes = []
    lists = any(_reads_lists(variant) for variant in plan.variants)
    for length in sorted(set(plan.lengths)):
        for batch in sorted(set(plan.batches)):
            for queries in sorted({length, *plan.query_lens}):
                if queries > length:
                    continue
                for density in DENSITIES if lists else (1.0,):
                    sizes = Sizes(batch, queries, length, density=density)
                    shapes += [(threads, sizes) for threads in sorted(set(plan.threads))]
    return shapes


def _reads_lists(variant: OperatorVariant) -> bool:
    return any(spec is not None and spec.name == "block_indices" for spec in variant.inputs)


def _takes(candidate: _Candidate, sizes: Sizes) -> bool:
    return sizes.density == 1.0 or _reads_lists(candidate.variant)


@dataclass
class _Measured:
    points: list[tuple[_Candidate, CostPoint]] = field(default_factory=list)
    steady: list[bool] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    too_large: set[str] = field(default_factory=set)


def _measure(
    candidates: Sequence[_Candidate], sizes: Sizes, threads: int, rounds: int, stop: float
) -> _Measured:
    """All candidates at one shape, in turns."""
    # What else runs takes turns on the same cores, and CPU time does not count it.
    clock = time.process_time if threads == 1 else time.perf_counter
    result = _Measured()
    runs: dict[str, tuple[_Candidate, BoundRun, int | None, int]] = {}
    for candidate in candidates:
        opened = _open(candidate, sizes, threads)
        needed = _predicted_bytes(candidate, sizes)
        room = available_bytes()
        if room is not None and needed > 0.8 * room:
            result.notes.append(f"{candidate.label} at {sizes.kv_len}: too little memory")
            result.too_large.add(candidate.label)
            continue
        grown = memory_growth(opened)
        once = _seconds(opened, 1, clock)
        repeat = max(1, round(SAMPLE_SECONDS / max(once, 1e-7)))
        runs[candidate.label] = candidate, opened, None if grown is None else grown[0], repeat
        if time.monotonic() > stop:
            result.notes.append(f"{sizes.kv_len} keys: no time for all candidates")
            break
    gemm = _gemm(threads)
    gemm()
    samples: dict[str, list[tuple[float, float]]] = {label: [] for label in runs}
    products: list[float] = []
    labels = list(runs)
    for number in range(rounds):
        turn = number % max(1, len(labels))
        before = _seconds(gemm, 1, clock)
        products.append(before)
        for label in labels[turn:] + labels[:turn]:
            _, run, _, repeat = runs[label]
            seconds = _seconds(run, repeat, clock)
            after = _seconds(gemm, 1, clock)
            products.append(after)
            samples[label].append((seconds, (before + after) / 2))
            before = after
        if time.monotonic() > stop and number >= 2:
            break
    quiet = float(np.quantile(products, 0.25))
    middle = statistics.median(products)
    result.steady = [abs(value / middle - 1) <= GEMM_DEVIATION for value in products]
    for label, (candidate, _, grown_bytes, _) in runs.items():
        times = np.array([seconds * quiet / product for seconds, product in samples[label]])
        low, center, high = np.quantile(times, (0.25, 0.5, 0.75))
        num_kv_heads: int = candidate.variant.num_kv_heads  # type: ignore[attr-defined]
        point = CostPoint(
            rows=sizes.batch * num_kv_heads,
            query_len=sizes.query_len,
            kv_len=sizes.kv_len,
            density=sizes.density,
            span=span_of(candidate.variant),
            seconds=float(center),
            spread=float((high - low) / center),
            bytes=grown_bytes,
        )
        result.points.append((candidate, point))
    return result


def _open(candidate: _Candidate, sizes: Sizes, threads: int) -> BoundRun:
    session = open_session(
        candidate.model,
        folder=Path.cwd(),
        threads=threads,
        config=TURNS,
        libraries=candidate.libraries,
    )
    return BoundRun.bind(session, example_inputs(candidate.variant, sizes))


def _predicted_bytes(candidate: _Candidate, sizes: Sizes) -> int:
    """At worst a function stores all scores twice; a kernel never does."""
    if candidate.runs_as == "kernel":
        return 0
    num_heads: int = candidate.variant.num_heads  # type: ignore[attr-defined]
    return 8 * sizes.batch * num_heads * sizes.query_len * sizes.kv_len


def _gemm(threads: int) -> BoundRun:
    matrix = np.random.default_rng(0).standard_normal((GEMM_SIZE, GEMM_SIZE), dtype=np.float32)
    session = open_session(
        onnx_wire.matmul_model(), folder=Path.cwd(), threads=threads, config=TURNS
    )
    return BoundRun.bind(session, {"a": matrix, "b": matrix})


def _seconds(run: Callable[[], Any], repeat: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeat):
        run()
    return (clock() - start) / repeat


@dataclass(frozen=True)
class Inversion:
    """Two candidates that the table puts in the wrong order.

    Attributes:
        cheaper, dearer: by the table; measured, ``cheaper`` took ``factor`` times as long.
    """

    cheaper: str
    dearer: str
    kv_len: int
    threads: int
    factor: float


@dataclass(frozen=True)
class RankCheck:
    """How well a table orders candidates at lengths where it was not measured.

    Attributes:
        correlation: Spearman's, per number of threads and length; the worst of them.
        worst: the inversion with the largest measured factor; ``None``: no inversion.
        median_error: of predicted / measured - 1, absolute.
        compared: number of predictions.
        refused: predictions that the table declined, with the reason.
    """

    correlation: float
    worst: Inversion | None
    median_error: float
    compared: int
    refused: tuple[str, ...]


def check_ranking(table: CostTable, plan: CostPlan, progress: Progress | None = None) -> RankCheck:
    """Measure ``plan`` afresh and compare with what ``table`` says.

    Raises:
        UsageError: the table knows nothing of what was measured.
    """
    measured = measure_costs(plan, progress)
    return compare_tables(table, measured, plan)


def compare_tables(table: CostTable, measured: CostTable, plan: CostPlan) -> RankCheck:
    """Predictions of ``table`` against the points of ``measured``."""
    groups: dict[tuple[int, Sizes], list[tuple[str, float, float]]] = {}
    refused = []
    for threads, sizes in _shapes(plan):
        for variant in plan.variants:
            arguments: Any = (variant, sizes.batch, sizes.query_len, sizes.kv_len, threads)
            for runs_as in RUNS_AS:
                options: Any = {"runs_as": runs_as, "density": sizes.density}
                real = measured.time(*arguments, **options)
                guess = table.time(*arguments, **options)
                if not isinstance(real, float):
                    continue
                label = f"{variant.op_type}:{variant.overload} as {runs_as}"
                if isinstance(guess, float):
                    groups.setdefault((threads, sizes), []).append((label, guess, real))
                else:
                    refused.append(f"{label}: {guess.reason}")
    if not groups:
        raise UsageError("The cost table knows none of what was measured: " + "; ".join(refused))
    errors = [abs(guess / real - 1) for rows in groups.values() for _, guess, real in rows]
    worst: Inversion | None = None
    for (threads, sizes), rows in groups.items():
        for first in rows:
            for second in rows:
                factor = first[2] / second[2]
                if first[1] < second[1] and factor > (worst.factor if worst else 1.0):
                    worst = Inversion(first[0], second[0], sizes.kv_len, threads, factor)
    correlations = [
        spearman([row[1] for row in rows], [row[2] for row in rows])
        for rows in groups.values()
        if len(rows) > 1
    ]
    return RankCheck(
        correlation=min(correlations, default=1.0),
        worst=worst,
        median_error=float(np.median(errors)),
        compared=len(errors),
        refused=tuple(dict.fromkeys(refused)),
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation of two series without ties."""
    ranks = np.array([np.argsort(np.argsort(values)) for values in (first, second)])
    squares = float(((ranks[0] - ranks[1]) ** 2).sum())
    count = len(first)
    return 1.0 - 6.0 * squares / (count * (count**2 - 1))


def between(lengths: Sequence[int]) -> tuple[int, ...]:
    """Lengths half-way (in the logarithm) between those of a table, for ``check_ranking``."""
    ordered = sorted(lengths)
    middles = [round((low * high) ** 0.5) for low, high in zip(ordered, ordered[1:], strict=False)]
    return tuple(middles) or (round(ordered[0] * REACH**0.5),)
