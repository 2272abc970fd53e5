"""Benchmarks: every operator and whole models against ONNX Runtime and torch.

    python benchmarks/run.py                         # the default set, within ten minutes
    python benchmarks/run.py --set must              # what must be reached, as a table
    python benchmarks/run.py --set full              # every length, one thread and all; hours
    python benchmarks/run.py --set short --threads 1 # short sequences and decode steps
    python benchmarks/run.py --only linear_elu --lengths 4096 --threads 1 --clock cpu
    python benchmarks/run.py --only linear_elu --params rows=6,vectors=2 --params chunk=96

Writes ``benchmarks/results/SET.json``, ``.md`` and ``.png``. The exit status is 0 whatever the
figures are, and 1 if something of ours computes something wrong: then nothing more is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import render
import whole_models
from contestants import ENGINES
from harness import Case, Contestant, Process, Settings, WrongResult, run_cases
from subquad.kernels.example_inputs import example_inputs
from subquad.kernels.host.build import build_kernels
from subquad.kernels.operator import OperatorVariant
from subquad.runtime.machine import describe_machine, usable_cores, versions
from workloads import MUST, SHORT, WORKLOADS, Entry, Workload

HERE = Path(__file__).resolve().parent
SETS = ("default", "must", "full", "operators", "models", "short")
DEFAULT_LENGTHS = (512, 2048, 8192)
SECONDS = {
    "default": 540.0,
    "must": 3600.0,
    "full": 4 * 3600.0,
    "operators": 540.0,
    "short": 1800.0,
}
PACKAGES = ("subquad", "onnxruntime", "torch", "transformers", "apache-tvm", "numpy")

COMPARED_ROWS = 32
CHECK_LENGTH = 1000
"""Where the reference cannot be asked for some rows only."""

RATE = 40e9
"""Rough operations a second of one core, to predict what fits into the time."""

Kernels = dict[tuple[str, str], str]
"""Operator and overload -> library, or the reason why there is none behind a ``!``."""


def build(variants: Iterable[OperatorVariant], params: dict[str, int]) -> Kernels:
    """Compile the kernels of all variants into one library."""
    unique = {(variant.op_type, variant.overload): variant for variant in variants}
    built = build_kernels(list(unique.values()), params=lambda variant, target: params)
    return {
        key: str(built.libraries[-1].path)
        if key in built.served
        else f"!{built.declined[key].reason}"
        for key in unique
    }


def taking_part(item: Workload | whole_models.Model, *, slow: bool, must: bool) -> list[Any]:
    """Entries of a workload or model; for the table only ours and those that a row names."""
    rivals = {row.rival for row in MUST if row.workload == item.name}
    return [
        entry
        for number, entry in enumerate(item.entries)
        if (slow or not entry.slow_start) and (not must or number == 0 or entry.label in rivals)
    ]


def operator_case(
    workload: Workload,
    length: int,
    threads: int,
    tuned: dict[str, Kernels],
    *,
    slow: bool,
    must: bool = False,
) -> Case:
    """One workload; ``tuned`` has the libraries of every set of parameters, "" = defaults."""
    entries = taking_part(workload, slow=slow, must=must)
    first = workload.entries[0]
    sizes = workload.sizes(length)
    sliceable = _sliceable(first.variant)
    # Beside the first and last queries, some between them.
    rows = np.unique(np.linspace(0, sizes.query_len - 1, COMPARED_ROWS).astype(int))
    contestants: list[Contestant] = []
    for entry in entries:
        for label, libraries in tuned.items() if entry.engine == "kernel" else [("", {})]:
            library = libraries.get((entry.variant.op_type, entry.variant.overload))
            bad = library is not None and library.startswith("!")
            comparable = ENGINES[entry.engine].comparable and (
                workload.compared or entry.variant is not first.variant
            )
            contestants.append(
                Contestant(
                    f"{entry.label} {label}".strip(),
                    entry.family,
                    {
                        "kind": "operator",
                        "workload": workload.name,
                        "entry": entry.label,
                        "length": length,
                        "threads": threads,
                        "library": library,
                    },
                    ours=entry.engine in ("kernel", "body"),
                    wanted=_wanted(workload, entry, length, rows if sliceable else None)
                    if comparable
                    else None,
                    scratch=ENGINES[entry.engine].scratch(entry.variant, sizes),
                    limit=1e-5 if entry.engine in ("kernel", "body") else 1e-4,
                    unavailable=str(library)[1:] if bad else "",
                )
            )
    flops = workload.total_flops(length)
    return Case(
        workload.name,
        length,
        threads,
        tuple(contestants),
        flops,
        rows=tuple(int(row) for row in rows) if sliceable else None,
        check=None if sliceable else lambda spec: {**spec, "length": min(length, CHECK_LENGTH)},
        predicted=sum(_predicted(workload, entry, length) for entry in entries) / (RATE * threads),
        facts={
            "batch": workload.batch,
            "query_len": sizes.query_len,
            "real": workload.real,
            "density": workload.density,
            "overload": first.variant.overload,
        },
    )


def _sliceable(variant: Any) -> bool:
    """Whether some queries alone mean the same: no input of theirs but vectors and positions."""
    known = {"query", "query_positions"}
    return all(
        spec.name in known or not any("query_len" in str(dim) for dim in spec.dims)
        for spec in variant.inputs
        if spec is not None
    )


def _wanted(
    workload: Workload, entry: Entry, length: int, rows: NDArray[Any] | None
) -> Callable[[], NDArray[np.float64]]:
    def compute() -> NDArray[np.float64]:
        sizes = workload.sizes(length if rows is not None else min(length, CHECK_LENGTH), entry)
        feeds = example_inputs(entry.variant, sizes)
        if rows is not None:
            feeds["query"] = feeds["query"][:, :, rows]
            if "query_positions" in feeds:
                feeds["query_positions"] = feeds["query_positions"][:, rows]
        result = entry.variant.reference(**feeds)
        output: NDArray[np.float64] = result[0] if isinstance(result, tuple) else result
        return output

    return compute


def _predicted(workload: Workload, entry: Entry, length: int) -> float:
    """Operations, where a rival's cost is that of its own formula."""
    own = workload.total_flops(length)
    if entry.engine in ("kernel", "body") or "Linear" in entry.engine or "chunked" in entry.engine:
        return own
    sizes = workload.sizes(length, entry)
    variant = entry.variant
    pairs = sizes.batch * sizes.query_len * sizes.kv_len / (2 if sizes.query_len > 1 else 1)
    return max(own, 2.0 * pairs * variant.num_heads * (variant.head_dim + variant.value_dim))


def model_case(
    model: whole_models.Model, length: int, threads: int, *, slow: bool, must: bool = False
) -> Case:
    entries = taking_part(model, slow=slow, must=must)
    rows = tuple(range(max(1, int(min(whole_models.CHECK_LENGTH, length) * model.real))))
    wanted = _model_wanted(model, length, threads, rows)
    contestants = tuple(
        Contestant(
            entry.label,
            f"model {model.name} {entry.label}",
            whole_models.spec_of(model, entry, length, threads),
            ours=entry.ours and entry.exact,
            wanted=wanted,
            # Dozens of layers: torch itself is some 1e-6 away from float64.
            limit=1e-4 if entry.exact else None,
        )
        for entry in entries
    )
    parameters = sum(path.stat().st_size for path in model.source().glob("*.safetensors")) / 4
    tokens = length * model.batch
    return Case(
        model.name,
        length,
        threads,
        contestants,
        None,
        rows=rows,
        check=whole_models.check_spec,
        predicted=len(entries) * 2.5 * parameters * tokens / (RATE * threads),
        facts={"batch": model.batch, "real": model.real, "title": model.title},
    )


def _model_wanted(
    model: whole_models.Model, length: int, threads: int, rows: Sequence[int]
) -> Callable[[], NDArray[np.float64]]:
    """Outputs of the torch model in float64, computed once."""
    known: list[NDArray[np.float64]] = []

    def compute() -> NDArray[np.float64]:
        if not known:
            import tempfile

            entry = whole_models.ModelEntry("float64", "torch float64")
            spec = whole_models.check_spec(whole_models.spec_of(model, entry, length, threads))
            process = Process(threads)
            try:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder, "output.npy")
                    process.ask(entry.label, "open", spec=spec)
                    process.ask(entry.label, "first")
                    process.ask(entry.label, "sample", rows=list(rows), path=str(path))
                    known.append(np.load(path))
            finally:
                process.close()
        return known[0]

    return compute


def choose(
    args: argparse.Namespace,
) -> tuple[list[tuple[Workload, int, int]], list[tuple[whole_models.Model, int, int]]]:
    """Workloads and models with their lengths and threads."""
    cores = usable_cores()
    if args.set == "must":
        wanted = {(row.workload, row.length, min(row.threads, cores)) for row in MUST}
        threads = sorted({item[2] for item in wanted})
    else:
        threads = args.threads or sorted({cores, 1}, reverse=True)
        wanted = None

    def pairs(items: Iterable[Any], default: bool) -> list[Any]:
        chosen = []
        for item in items:
            named = args.only is not None and item.name in args.only
            if args.only is not None and not named:
                continue
            full = args.set in ("full", "short") or named or wanted is not None
            if item.slow and not full:
                continue
            lengths = args.lengths or [
                length
                for length in item.lengths
                if full or not default or length in DEFAULT_LENGTHS
            ]
            for length in lengths:
                for count in args.threads or threads:
                    if wanted is None or (item.name, length, count) in wanted:
                        chosen.append((item, length, count))
        return chosen

    if args.set == "short":
        return pairs(SHORT, True), []
    named = SHORT if args.only is not None else ()
    operators = [] if args.set == "models" else pairs((*WORKLOADS, *named), True)
    whole = [] if args.set == "operators" else pairs(whole_models.MODELS, True)
    return operators, whole


def parse_params(text: str) -> dict[str, int]:
    pairs = (item.split("=") for item in text.split(","))
    return {key: int(value) for key, value in pairs}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [item.name for item in (*WORKLOADS, *SHORT, *whole_models.MODELS)]
    parser.add_argument("--set", choices=SETS, default="default")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--threads", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=10, help="that count, per case")
    parser.add_argument(
        "--time", type=float, help="seconds for everything; what does not fit is left out, and said"
    )
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: one thread, busy machine"
    )
    parser.add_argument(
        "--params", action="append", default=[], help="tuning parameters: one more contestant each"
    )
    parser.add_argument(
        "--output", type=Path, help="without suffix; default benchmarks/results/SET"
    )
    args = parser.parse_args(arguments)
    if args.clock == "cpu" and args.threads != [1]:
        parser.error("--clock cpu needs --threads 1: processor time adds up over threads")
    return args


def main(arguments: Sequence[str]) -> int:
    started = time.monotonic()
    args = parse(arguments)

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {text}", file=sys.stderr, flush=True)

    operators, whole = choose(args)
    slow = args.set == "full" or args.only is not None
    variants = [
        entry.variant
        for workload, _, _ in operators
        for entry in workload.entries
        if entry.engine == "kernel"
    ]
    say(f"{len(operators)} operator cases, {len(whole)} model cases; building kernels")
    tuned = {
        label: build(variants, parse_params(label) if label else {}) for label in ["", *args.params]
    }
    must = args.set == "must"
    cases = [operator_case(*item, tuned, slow=slow, must=must) for item in operators]
    for item in whole:
        say(f"preparing {item[0].name}")
        cases.append(model_case(*item, slow=slow, must=must))
    custom = args.set != "short" and (args.only is not None or args.lengths is not None)
    name = "custom" if custom else args.set
    total = args.time or SECONDS.get(args.set, 3600.0)
    settings = Settings(args.rounds, total - (time.monotonic() - started), args.clock)
    try:
        results, skipped = run_cases(cases, settings, say)
    except WrongResult as error:
        print(f"{error}. Nothing more is timed.", file=sys.stderr)
        return 1
    report = {
        "schema": 1,
        "set": name,
        "command": " ".join(["python benchmarks/run.py", *_repeatable(arguments)]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "versions": versions(PACKAGES),
        "settings": {
            "rounds": args.rounds,
            "seconds": total,
            "clock": args.clock,
            "seed": 0,
        },
        "seconds": time.monotonic() - started,
        "results": results,
        "skipped": skipped,
        "must": render.must_rows(results, skipped),
    }
    output = args.output or HERE / "results" / name
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    text = render.as_markdown(report)
    output.with_suffix(".md").write_text(text, "utf-8")
    render.plot(report, output.with_suffix(".png"))
    print(render.table(report) or text)
    return 0


def _repeatable(arguments: Sequence[str]) -> list[str]:
    """The arguments without local paths."""
    kept = list(arguments)
    if "--output" in kept:
        place = kept.index("--output")
        del kept[place : place + 2]
    return kept


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
