"""Artifacts of one decoder against its exact artifact, its plain export and torch.

    subquad convert MODEL exact --kernels cpu
    subquad convert MODEL planned --kernels cpu --budget ppl=1% --lengths 8000 --data texts/
    python benchmarks/artifacts.py planned exact --source MODEL --lengths 4096 8000

The first artifact is the one the ratios are of. All run in turns on the same tokens, each in a
process of its own; prints a table, and writes ``--output`` (.json, .md).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import render
from harness import Case, Contestant, Settings, run_cases
from run import PACKAGES, RATE
from subquad.runtime.machine import describe_machine, usable_cores, versions


def contestants(options: argparse.Namespace, length: int) -> tuple[Contestant, ...]:
    """The artifacts, then what they come from; nothing is judged, for plans are not exact."""
    first = str(options.artifacts[0])
    rows = [(path.name, "artifact", str(path)) for path in options.artifacts]
    rows += [("plain export", "export", first), ("torch", "torch", first)]
    return tuple(
        Contestant(
            label,
            f"model {label}",
            {
                "kind": "model",
                "how": how,
                "artifact": folder,
                "source": str(options.source),
                "is_decoder": True,
                "length": length,
                "batch": 1,
                "real": 1.0,
                "threads": options.threads,
            },
            ours=how == "artifact",
        )
        for label, how, folder in rows
        if label not in options.without
    )


def main(arguments: Sequence[str]) -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("artifacts", nargs="+", type=Path, help="folders with distinct names")
    parser.add_argument("--source", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--time", type=float, default=3600.0)
    parser.add_argument("--without", nargs="*", default=[], metavar="LABEL")
    parser.add_argument("--output", type=Path, help="without suffix")
    options = parser.parse_args(arguments)
    if len({path.name for path in options.artifacts}) < len(options.artifacts):
        parser.error("two artifacts have one name; they are told apart by it")

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {text}", file=sys.stderr, flush=True)

    size = sum(path.stat().st_size for path in options.source.glob("*.safetensors")) / 4
    cases = [
        Case(
            options.source.name,
            length,
            options.threads,
            contestants(options, length),
            None,
            predicted=len(contestants(options, length))
            * (2.5 * size * length / (RATE * options.threads)),
            facts={"title": f"{options.source.name}, prefill"},
        )
        for length in options.lengths
    ]
    results, skipped = run_cases(cases, Settings(options.rounds, options.time), say)
    report: dict[str, Any] = {
        "schema": 1,
        "set": "artifacts",
        "command": "python benchmarks/artifacts.py "
        + " ".join(path.name for path in options.artifacts)
        + f" --lengths {' '.join(map(str, options.lengths))}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "versions": versions(PACKAGES),
        "settings": {"rounds": options.rounds, "seconds": options.time, "clock": "wall"},
        "seconds": time.monotonic() - started,
        "results": results,
        "skipped": skipped,
        "must": [],
    }
    text = render.as_markdown(report)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        options.output.with_suffix(".md").write_text(text, "utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
