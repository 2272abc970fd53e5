"""Time and memory of reading a long prompt: artifacts against the plain export and torch.

    python benchmarks/prefill.py --lengths 4096 8000 --method dense --rounds 5

SmolLM2-135M reads a prompt of each length and returns the logits of all positions. Candidates: an
artifact for each ``--method``, the unconverted export (``reference.onnx`` of the first artifact) in
ONNX Runtime, and the torch model. Each lives in a process of its own, so that its memory can be
read. They take turns with a matrix product, since other work on the machine hits neighbours in time
alike: read the medians of the paired ratios, and distrust a run whose matrix product varied much.

Nothing is timed unless all candidates agree with torch first. Results go to
``benchmarks/results/prefill.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

CHECK_LENGTH = 200
"""Tokens of the comparison before any timing."""

TOLERANCE = 2e-4
"""Largest accepted difference of logits, relative to the largest logit: float32, 30 layers."""

GEMM_SIZE = 2048
NOISE_LIMIT = 0.15
"""A spread of the matrix product above this means that the machine was busy with other things."""

TORCH = "torch"
EXPORT = "plain export"


# Child: one candidate, driven by lines of JSON.


def serve(spec: dict[str, Any]) -> None:
    """Load one candidate, then answer requests until the input ends."""
    from subquad.runtime.machine import peak_rss_bytes

    run = open_torch(spec) if spec["name"] == TORCH else open_artifact(spec)
    run(np.ones((1, 8), np.int64))
    print(json.dumps({"ready": True, "loaded_bytes": peak_rss_bytes()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = np.load(request["ids"])
        start = time.perf_counter()
        logits = run(ids)
        seconds = time.perf_counter() - start
        # The last row depends on all tokens; all rows would be 1.6 GB at 8000.
        np.save(request["logits"], logits[0] if request["all"] else logits[0, -1:])
        del logits
        print(json.dumps({"seconds": seconds, "peak_bytes": peak_rss_bytes()}), flush=True)


def open_artifact(spec: dict[str, Any]) -> Any:
    """The artifact, or its reference, in ONNX Runtime: ids -> logits."""
    from subquad.runtime.artifact import load
    from subquad.runtime.manifest import REFERENCE_NAME, Manifest
    from subquad.runtime.session import open_session, run_session

    folder = Path(spec["artifact"])
    manifest = Manifest.read(folder)
    (output,) = (item.name for item in manifest.outputs if item.is_logits)

    def feeds(ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        by_role = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
        return {item.name: by_role[item.role] for item in manifest.inputs}

    if spec["name"] == EXPORT:
        session = open_session(folder / REFERENCE_NAME, folder=folder, threads=spec["threads"])
        return lambda ids: run_session(session, feeds(ids), [output])[0]
    artifact = load(folder, threads=spec["threads"])
    return lambda ids: artifact.run(feeds(ids), [output])[output]


def open_torch(spec: dict[str, Any]) -> Any:
    """The Hugging Face model with its fastest attention: ids -> logits."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(spec["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        spec["source"], dtype=torch.float32, attn_implementation="sdpa"
    )
    model.eval().requires_grad_(False)

    def run(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        with torch.inference_mode():
            logits: NDArray[np.float32] = model(
                input_ids=torch.from_numpy(ids), use_cache=False
            ).logits.numpy()
        return logits

    return run


# Parent.


class Candidate:
    """A running child."""

    def __init__(self, spec: dict[str, Any], folder: Path) -> None:
        self.name: str = spec["name"]
        self._logits = folder / f"logits-{spec['index']}.npy"
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.loaded_bytes = int(self._answer()["loaded_bytes"])
        self.peak_bytes = 0

    def run(self, ids: Path, *, all_rows: bool = False) -> float:
        """Seconds for one prompt."""
        assert self._process.stdin is not None
        request = {"ids": str(ids), "logits": str(self._logits), "all": all_rows}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.peak_bytes = int(answer["peak_bytes"])
        return float(answer["seconds"])

    def logits(self) -> NDArray[np.float32]:
        """Of the last run: ``[rows, vocabulary]``."""
        loaded: NDArray[np.float32] = np.load(self._logits)
        return loaded

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name}: process ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def differences(candidates: Sequence[Candidate]) -> dict[str, float]:
    """Largest difference of the last logits from torch's, relative to the largest logit."""
    want = next(item for item in candidates if item.name == TORCH).logits()
    scale = float(np.abs(want).max())
    return {item.name: float(np.abs(item.logits() - want).max()) / scale for item in candidates}


def require_agreement(found: dict[str, float], exact: set[str], where: str) -> None:
    """End the run unless every exact candidate agrees with torch."""
    wrong = {name: value for name, value in found.items() if name in exact and value > TOLERANCE}
    if wrong:
        sys.exit(f"{where}: logits differ from torch by {wrong}, limit {TOLERANCE}. Not timed.")


def time_gemm() -> float:
    """Seconds for one matrix product of fixed size."""
    matrix = np.full((GEMM_SIZE, GEMM_SIZE), 0.5, np.float32)
    start = time.perf_counter()
    matrix @ matrix
    return time.perf_counter() - start


def measure(
    specs: Sequence[dict[str, Any]], tokens: NDArray[np.int64], length: int, rounds: int
) -> dict[str, Any]:
    """All candidates at one length, in turn."""
    exact = {spec["name"] for spec in specs if spec["exact"]}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        prompt, probe = folder / "prompt.npy", folder / "probe.npy"
        np.save(prompt, tokens[None, :length])
        np.save(probe, tokens[None, :CHECK_LENGTH])
        candidates = []
        for spec in specs:
            candidates.append(Candidate(spec, folder))
            stack.callback(candidates[-1].close)
        for candidate in candidates:
            candidate.run(probe, all_rows=True)
        probe_differences = differences(candidates)
        require_agreement(probe_differences, exact, f"{CHECK_LENGTH} tokens, all positions")

        seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
        gemm: list[float] = []
        time_gemm()
        for number in range(rounds + 1):
            turn = number % len(candidates)
            gemm_seconds = time_gemm()
            got = {item.name: item.run(prompt) for item in candidates[turn:] + candidates[:turn]}
            summary = ", ".join(f"{name} {value:.2f}" for name, value in got.items())
            print(f"{length} tokens, round {number}: {summary} s", file=sys.stderr, flush=True)
            if number == 0:  # pages in memory for the first time
                prompt_differences = differences(candidates)
                require_agreement(prompt_differences, exact, f"{length} tokens, last position")
                continue
            gemm.append(gemm_seconds)
            for name, value in got.items():
                seconds[name].append(value)
        return {
            "length": length,
            "rounds": rounds,
            "gemm_seconds": gemm,
            "candidates": [
                {
                    "name": candidate.name,
                    "exact": candidate.name in exact,
                    "seconds": seconds[candidate.name],
                    "peak_bytes": candidate.peak_bytes,
                    "loaded_bytes": candidate.loaded_bytes,
                    "max_difference_all_positions": probe_differences[candidate.name],
                    "max_difference_last_position": prompt_differences[candidate.name],
                }
                for candidate in candidates
            ],
        }


def gemm_spread(result: dict[str, Any]) -> float:
    """Distance of the slowest matrix product from the median, relative to the median."""
    middle = statistics.median(result["gemm_seconds"])
    return float(max(result["gemm_seconds"]) / middle - 1)


def as_markdown(report: dict[str, Any]) -> str:
    """The report as tables."""
    machine = report["machine"]
    lines = [
        f"# Prefill of {report['model']}",
        "",
        f"`{report['command']}`",
        "",
        f"{machine['cpu']}, {report['threads']} threads, {report['date']}; "
        + ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        "",
        "Seconds are medians (smallest - largest). Ratios are medians over rounds of "
        "other / first artifact in the same round. Peak is the whole process.",
    ]
    for result in report["results"]:
        first = result["candidates"][0]["seconds"]
        spread = gemm_spread(result)
        noise = " **The machine was busy: distrust these.**" if spread > NOISE_LIMIT else ""
        lines += [
            "",
            f"## {result['length']} tokens, {result['rounds']} rounds",
            "",
            f"The {GEMM_SIZE} x {GEMM_SIZE} matrix product took up to {spread:.0%} longer than "
            f"its median.{noise}",
            "",
            "| | seconds | ratio | peak MiB | largest difference of logits from torch |",
            "|---|---|---|---|---|",
        ]
        for item in result["candidates"]:
            values = item["seconds"]
            ratio = statistics.median(
                value / base for value, base in zip(values, first, strict=True)
            )
            lines.append(
                f"| {item['name']} | {statistics.median(values):.2f} "
                f"({min(values):.2f} - {max(values):.2f}) | {ratio:.2f} "
                f"| {item['peak_bytes'] / 2**20:.0f} "
                f"| {item['max_difference_all_positions']:.1e} |"
            )
    return "\n".join(lines) + "\n"


def command_line(args: argparse.Namespace) -> str:
    """What repeats this run, without local paths."""
    lengths = " ".join(map(str, args.lengths))
    methods = " ".join(f"--method {method}" for method in args.method)
    return (
        f"python benchmarks/prefill.py --lengths {lengths} {methods} "
        f"--rounds {args.rounds} --threads {args.threads}"
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8000])
    parser.add_argument("--rounds", type=int, default=5, help="after one that is not counted")
    parser.add_argument("--method", action="append", help="artifact to make; default dense")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--artifacts", type=Path, help="keep artifacts here and use those there")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "prefill")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.method = args.method or ["dense"]
    if args.serve:
        serve(json.loads(args.serve))
        return 0

    from tokenizers import Tokenizer

    import third_party
    from subquad.converter.pipeline import convert
    from subquad.runtime.machine import describe_machine, versions

    source = third_party.smollm2()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokens = np.array(tokenizer.encode(third_party.wikipedia_article()).ids)
    if max(args.lengths) > len(tokens):
        parser.error(f"the text has {len(tokens)} tokens only")

    with tempfile.TemporaryDirectory() as temporary:
        specs: list[dict[str, Any]] = []
        for method in args.method:
            name = f"subquad {method}"
            artifact = (args.artifacts or Path(temporary)) / method.replace(":", "-")
            if not artifact.is_dir():
                artifact.parent.mkdir(parents=True, exist_ok=True)
                convert(source, artifact, force=(method,))
            exact = method == "dense"
            specs.append({"name": name, "artifact": str(artifact), "exact": exact})
        specs.append({"name": EXPORT, "artifact": specs[0]["artifact"], "exact": True})
        specs.append({"name": TORCH, "source": str(source), "exact": True})
        specs = [
            spec | {"index": index, "threads": args.threads} for index, spec in enumerate(specs)
        ]
        results = [measure(specs, tokens, length, args.rounds) for length in args.lengths]
    report = {
        "model": "SmolLM2-135M",
        "command": command_line(args),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "threads": args.threads,
        "versions": versions(["subquad", "onnxruntime", "torch", "transformers", "numpy"]),
        "results": results,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    args.output.with_suffix(".md").write_text(as_markdown(report), "utf-8")
    print(as_markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
