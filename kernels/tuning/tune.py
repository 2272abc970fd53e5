"""Tune kernels of given shapes and write what was found as records."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from subquad.kernels.host.build import missing_tools
from subquad.kernels.host.compile_child import make_fields
from subquad.kernels.host.targets import CPU_TARGETS, host_targets
from subquad.kernels.kernel import CPU_TEMPLATES, CpuTarget, load_template
from subquad.kernels.operator import OperatorVariant
from subquad.kernels.operators import OPERATORS
from subquad.kernels.tuning.choose import (
    TuningBook,
    hinted_length,
    index_records,
    make_key,
    tuning_space,
    user_records,
)
from subquad.kernels.tuning.local import LocalBench
from subquad.kernels.tuning.metaschedule import check_packages, why_not
from subquad.kernels.tuning.records import (
    Key,
    Record,
    append_records,
    best_record,
    merge_records,
    read_records,
)
from subquad.kernels.tuning.rpc import RpcBench, open_tracker
from subquad.kernels.tuning.search import Bench, Found, Trial, Values, search
from subquad.kernels.tuning.workload import Workload, missing_inputs, parse_shape
from subquad.runtime.artifact import open_manifest
from subquad.runtime.errors import Rejection, TargetUnavailableError, UsageError
from subquad.runtime.machine import cpu_flags, cpu_model, usable_cores

__all__ = [
    "OPERATORS",
    "TuneReport",
    "find_target",
    "merge_records",
    "parse_shape",
    "shapes_of_artifact",
    "tune",
    "user_records",
]

logger = logging.getLogger(__name__)

Shape = tuple[OperatorVariant, Workload]
Progress = Callable[[str, float | None], None]
MakeBench = Callable[[OperatorVariant, Workload], Bench]
Find = Callable[[OperatorVariant, Workload, float, Callable[[str], None]], Found]
"""Variant, workload, seconds and where to show progress -> what was found."""


@dataclass(frozen=True)
class TunedKernel:
    """What became of one shape.

    Attributes:
        operator, variant: op_type and overload.
        workload: timed.
        how: ``tuned``, or ``default`` where the search found nothing.
        params: the best parameters; empty = the template's defaults.
        ratios: quartiles of their time over that of the defaults.
        trials: candidates by outcome.
        reason: why not ``tuned``.
        seconds: spent.
    """

    operator: str
    variant: str
    workload: Workload
    how: str
    params: Mapping[str, int]
    ratios: tuple[float, float, float]
    rounds: int
    trials: Mapping[str, int]
    reason: str
    seconds: float


@dataclass(frozen=True)
class TuneReport:
    """The result of ``tune``.

    Attributes:
        kernels: in the order they were tuned.
        target: name of the instruction set.
        records: the file.
        machine: the processor, or ``rpc <key>``.
    """

    kernels: tuple[TunedKernel, ...]
    target: str
    records: Path
    machine: str
    threads: int
    seed: int
    seconds: float


def tune(
    shapes: Sequence[Shape],
    records: Path,
    *,
    target: CpuTarget,
    trials: int = 64,
    seconds: float = 600.0,
    threads: int | None = None,
    seed: int = 0,
    templates: Mapping[str, str] = CPU_TEMPLATES,
    engine: str = "templates",
    rpc: tuple[str, str] | None = None,
    progress: Progress | None = None,
) -> TuneReport:
    """Search the parameters of the kernels of ``shapes``; every trial is a line in ``records``.

    Shapes of one bucket are tuned once. A search goes on where records of the same key end.

    Args:
        shapes: variants with the sizes to time them on.
        records: file of records, made if it is not there.
        target: instruction set; without ``rpc``, one that this machine has.
        trials: candidates per shape, at most.
        seconds: for all shapes together.
        threads: of a call; default: the usable cores.
        seed: of the search and of the inputs.
        templates: operator -> ``module:attribute``.
        engine: ``templates``, or ``metaschedule``, which has nothing to search in kernels that
            are scheduled already; see ``metaschedule.py``.
        rpc: address of a TVM RPC tracker and key of its servers, to measure there instead of in
            ONNX Runtime on this machine.
        progress: called with a message and the share of the time that is gone.

    Raises:
        UsageError: no shapes, or ``records`` is no file of records.
        TargetUnavailableError: kernels cannot be built here, or not run; no server is free.
        OutputError: ``records`` cannot be written.
    """
    if not shapes:
        raise UsageError("Nothing to tune: give an artifact or --shapes.")
    missing = missing_tools()
    if missing is not None:
        raise TargetUnavailableError(f"Kernels cannot be tuned here: {missing.reason}.")
    threads = usable_cores() if threads is None else threads
    begin = time.monotonic()
    with ExitStack() as stack:
        if engine == "metaschedule":
            check_packages()
            machine = cpu_model()
            find: Find = partial(_by_metaschedule, target, templates, threads)
        else:
            machine, make_bench = _bench_maker(target, templates, threads, seed, rpc, stack)
            facts = {"machine": machine, "threads": threads}
            find = _Searcher(target, templates, records, make_bench, trials, seed, facts).find
        # An unwritable file is an error now, not after the first trial.
        append_records(records, [])
        unique = _unique(shapes, target, templates)
        kernels = []
        for number, (variant, workload) in enumerate(unique):
            start = time.monotonic()
            share = (begin + seconds - start) / (len(unique) - number)

            def show(message: str, name: str = variant.overload) -> None:
                if progress is not None:
                    gone = (time.monotonic() - begin) / seconds
                    progress(f"{name}: {message}", min(1.0, gone))

            show("compiling")
            found = find(variant, workload, share, show)
            spent = time.monotonic() - start
            kernels.append(_tuned(variant, workload, found, spent))
    spent = time.monotonic() - begin
    return TuneReport(tuple(kernels), target.name, records, machine, threads, seed, spent)


def _bench_maker(
    target: CpuTarget,
    templates: Mapping[str, str],
    threads: int,
    seed: int,
    rpc: tuple[str, str] | None,
    stack: ExitStack,
) -> tuple[str, MakeBench]:
    """What is recorded as the machine, and what makes the bench of a shape."""
    if rpc is not None:
        tracker = stack.enter_context(open_tracker(*rpc))

        def remote(variant: OperatorVariant, workload: Workload) -> Bench:
            return RpcBench(variant, workload, target, templates, threads, seed, tracker=tracker)

        return f"rpc {rpc[1]}", remote
    lacking = sorted(set(target.flags) - cpu_flags())
    if lacking:
        raise TargetUnavailableError(
            f"Target {target.name} cannot be timed here: this processor lacks "
            f"{' '.join(lacking)}. Tune where it runs, or over --rpc."
        )

    def local(variant: OperatorVariant, workload: Workload) -> Bench:
        return LocalBench(variant, workload, target, templates, threads, seed)

    return cpu_model(), local


def _tuned(
    variant: OperatorVariant, workload: Workload, found: Found, seconds: float
) -> TunedKernel:
    return TunedKernel(
        operator=variant.op_type,
        variant=variant.overload,
        workload=workload,
        how="default" if found.reason else "tuned",
        params={} if found.reason else dict(found.params),
        ratios=found.ratios,
        rounds=found.rounds,
        trials={str(status): count for status, count in found.trials.items()},
        reason=found.reason,
        seconds=seconds,
    )


def _by_metaschedule(
    target: CpuTarget,
    templates: Mapping[str, str],
    threads: int,
    variant: OperatorVariant,
    workload: Workload,
    seconds: float,
    show: Callable[[str], None],
) -> Found:
    template = load_template(variant.op_type, templates)
    refusal = template if isinstance(template, Rejection) else template.supports(variant)
    if refusal is not None:
        return Found((), reason=refusal.reason)
    return Found((), reason=why_not(variant, target, templates, threads, seconds))


@dataclass(frozen=True)
class _Searcher:
    """Searches template parameters; the attributes are those of ``tune``."""

    target: CpuTarget
    templates: Mapping[str, str]
    path: Path
    make_bench: MakeBench
    trials: int
    seed: int
    facts: Mapping[str, Any]

    def find(
        self,
        variant: OperatorVariant,
        workload: Workload,
        seconds: float,
        show: Callable[[str], None],
    ) -> Found:
        space = tuning_space(variant, self.target, self.templates)
        if isinstance(space, Rejection):
            return Found((), reason=space.reason)
        problem = missing_inputs(variant)
        if problem:
            return Found((), reason=f"tuning cannot make up its inputs: {problem}")
        key = make_key(variant, workload, self.target, self.templates[variant.op_type])
        earlier = read_records(self.path)
        own = [record for record in earlier if record.key == key]
        done = 0

        def report(params: Values, trial: Trial, confirmed: bool) -> None:
            nonlocal done
            done += 1
            record = self._record(key, params, trial, confirmed)
            append_records(self.path, [record])
            ok = trial.status == "ok"
            result = f"{record.ratios[1]:.3f} of the defaults" if ok else trial.status
            show(
                f"confirmed, {result}" if confirmed else f"trial {done} of {self.trials}, {result}"
            )

        return search(
            space,
            self.make_bench(variant, workload),
            trials=self.trials,
            seconds=seconds,
            seed=f"{self.seed} {key.to_json()}",
            known=_known(own),
            start=_promising(key, own, earlier),
            report=report,
        )

    def _record(self, key: Key, params: Values, trial: Trial, confirmed: bool) -> Record:
        ok = trial.status == "ok"
        return Record(
            key=key,
            params=params,
            status=trial.status,
            ratios=trial.ratios("default") if ok else (),
            rounds=len(trial.times["candidate"]) if ok else 0,
            confirmed=confirmed,
            reason=trial.reason,
            **self.facts,
        )


def _known(records: Sequence[Record]) -> dict[Values, float | None]:
    return {
        params: None if best is None else best.ratios[1]
        for params in dict.fromkeys(record.params for record in records)
        for best in [best_record(record for record in records if record.params == params)]
    }


def _promising(key: Key, own: Sequence[Record], earlier: Sequence[Record]) -> list[dict[str, int]]:
    """Where to begin: the best of this key, and of the nearest others."""
    # Measured again, since times of another session compare badly with this one's.
    ranked = sorted((record for record in own if record.status == "ok"), key=lambda r: r.rank)
    found = [dict(record.params) for record in ranked[:3]]
    book = TuningBook((index_records(earlier),))
    return found + [dict(record.params) for record in book.near(key)[:3]]


def _unique(
    shapes: Sequence[Shape], target: CpuTarget, templates: Mapping[str, str]
) -> list[Shape]:
    """One shape of each bucket; those without a template stay, to be reported."""
    found: dict[Any, Shape] = {}
    for variant, workload in shapes:
        key: Any = variant
        if not isinstance(tuning_space(variant, target, templates), Rejection):
            key = make_key(variant, workload, target, templates[variant.op_type])
        found.setdefault(key, (variant, workload))
    return list(found.values())


def find_target(name: str | None) -> CpuTarget:
    """A target by its name; by default the best that this machine runs.

    Raises:
        UsageError: unknown name.
    """
    known = {target.name: target for group in CPU_TARGETS.values() for target in group}
    if name is None:
        missing = missing_tools()
        if missing is not None:
            raise TargetUnavailableError(f"Kernels cannot be tuned here: {missing.reason}.")
        return host_targets()[-1]
    if name not in known:
        raise UsageError(f"Unknown target {name!r}; known: {', '.join(known)}.")
    return known[name]


def shapes_of_artifact(
    folder: Path, *, batch: int = 1, lengths: Sequence[int] | None = None
) -> list[Shape]:
    """The operators of an artifact, each at every length.

    Args:
        folder: the artifact.
        batch: rows of a call.
        lengths: default: one, from the longest input that the model takes.

    Raises:
        IntegrityError: no artifact.
        UsageError: it was written before artifacts listed their operators' variants.
    """
    _, manifest = open_manifest(folder)
    found: dict[OperatorVariant, None] = {}
    for record in manifest.sites:
        if not record.variants:
            raise UsageError(
                f"{folder} does not say what its attentions compute "
                f"({record.site['name']}). Convert it again with this version."
            )
        for item in record.variants:
            # Those that prepare an attention have no kernels to tune.
            if item["operator"] in OPERATORS:
                variant = OPERATORS[item["operator"]](**make_fields(item["fields"]))
                found[variant] = None
    sizes = lengths or (hinted_length(manifest.max_length),)
    return [(variant, Workload(batch, n, n)) for variant in found for n in sizes]
