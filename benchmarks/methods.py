"""Every method at every attention of a model: accuracy, speed and memory, losers included.

    python benchmarks/methods.py --write        # docs/method_results.md
    python benchmarks/methods.py demo --output results.json

Models: the demo model (held-out files of the standard library, 2048 tokens) and MiniLM (Lee corpus
and Wikipedia, 512 tokens). Every conversion forces one method everywhere, with what learns fitted
to texts that nothing is judged by. Speed, in turns with the exact artifact, and peak memory are
those of the ONNX functions; with compiled kernels (``--kernels cpu``) they are others. With one
model only, the page's table of the other is left as it is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from planned import ROOT, subquad, write_texts
from repairs import DEMO, ROUNDS, Flags, feeds_of, judge_encoder, perplexity, speedup
from subquad.passes.methods import parse_method
from subquad.runtime.artifact import open_manifest
from subquad.runtime.manifest import MODEL_NAME

import third_party  # isort: skip  (its folder is on the path by then)

METHODS = (
    "dense",
    "window:size=64",
    "window:size=256",
    "block_sparse:tau=0.8",
    "block_sparse:tau=0.95",
    "elu",
    "hedgehog",
    "lolcats:size=64,sinks=4",
    "lolcats:size=256,sinks=4",
    "static",
)
PAGE = ROOT / "docs" / "method_results.md"
LENGTHS = {"demo": 2048, "minilm": 512}
TITLES = {
    "demo": f"## Demo model, {LENGTHS['demo']} tokens of held-out code",
    "minilm": f"## MiniLM-L6, up to {LENGTHS['minilm']} tokens",
}
CALIBRATION_TOKENS = "32768"
IDS = 1000
"""Random tokens below that number are timed."""


def measure(model: str, folder: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Method -> figures."""
    length = LENGTHS[model]
    source = DEMO if model == "demo" else third_party.minilm_l6()
    data, tests = write_texts(folder)
    data /= "code" if model == "demo" else "wikipedia"
    found: dict[str, dict[str, Any]] = {}
    threads = ("--threads", options.threads) if options.threads else ()
    for method in METHODS:
        output = folder / method.replace(":", "-").replace("=", "").replace(",", "-")
        flags: Flags = ("--force", method, "--kernels", options.kernels)
        if parse_method(method)[0].learns:
            flags += ("--calibrate", "--data", data, "--lengths", str(length), *threads)
            flags += ("--calibration-tokens", CALIBRATION_TOKENS)
        report = subquad("convert", source, output, *flags)
        fits = [fit["after"] for fit in report.get("calibration", [])]
        entry: dict[str, Any] = {"seconds": sum(report["seconds"].values())}
        if fits:
            heads = [error for fit in fits for error in fit]
            entry["fit error"] = sum(heads) / max(1, len(heads))
        if model == "demo":
            entry |= perplexity(output, tests["code"], length, options.rows)
        else:
            entry |= judge_encoder(output, folder / "dense")
        ids = np.random.default_rng(0).integers(0, IDS, (1, length))
        feeds = feeds_of(open_manifest(output)[1], ids)
        entry["speedup"] = speedup(output, folder / "dense", feeds, options.threads)
        entry["peak"] = peak_bytes(output, length, options.threads)
        found[method] = entry
        print(f"{model}: {method} done", flush=True)
    return found


def peak_bytes(artifact: Path, length: int, threads: str | None) -> int:
    """Largest resident memory of a process that runs the artifact once."""
    task = {"folder": str(artifact), "file": MODEL_NAME, "length": length, "batch": 1, "seed": 0}
    task |= {"provider": "cpu", "threads": int(threads) if threads else None, "kernels": "auto"}
    command = [sys.executable, "-m", "subquad.runtime.memory_probe", json.dumps(task)]
    return int(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))


def table(model: str, found: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    if model == "demo":
        lines = [
            TITLES[model],
            "",
            "| everywhere | perplexity over the source's | KL | time over exact | peak memory |",
            "|---|---|---|---|---|",
        ]
    else:
        lines = [
            TITLES[model],
            "",
            "| everywhere | Lee Pearson | cosine, Lee | cosine, Wikipedia | time over exact "
            "| peak memory |",
            "|---|---|---|---|---|---|",
        ]
    for method, entry in found.items():
        if model == "demo":
            quality = f"{entry['artifact'] / entry['source']:.3f} | {entry['kl']:.3f}"
        else:
            quality = (
                f"{entry['pearson']:.3f} | {entry['cosine lee']:.4f} "
                f"| {entry['cosine wikipedia']:.4f}"
            )
        time = "1" if method == "dense" else format(1 / entry["speedup"], ".2f")
        lines.append(f"| `{method}` | {quality} | {time} | {entry['peak'] / 2**20:.0f} MiB |")
    return "\n".join(lines)


def page(results: dict[str, dict[str, dict[str, Any]]], kernels: str) -> str:
    runs_as = "compiled kernels" if kernels == "cpu" else "ONNX functions"
    head = f"""# Every method on real models

Written by `python benchmarks/methods.py --write --kernels {kernels}`. One method at every
attention, whatever it costs; a plan mixes them within a budget instead. What learns is fitted
(`--calibrate`), nothing is repaired. Times are those of {runs_as}, medians of {ROUNDS} rounds in
turns with the exact artifact, on one thread of an Intel Xeon with AVX-512, a shared machine; below
1 = faster than exact. Peak memory is that of a process which runs the artifact once.
"""
    tables = {model: table(model, found) for model, found in results.items()}
    if PAGE.exists():
        for model in LENGTHS:
            known = PAGE.read_text("utf-8").partition(f"{TITLES[model]}\n")
            if model not in tables and known[1]:
                tables[model] = TITLES[model] + "\n" + known[2].partition("\n## ")[0].rstrip()
    return "\n".join([head, *(tables[model] + "\n" for model in LENGTHS if model in tables)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(LENGTHS))
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--kernels", default="none", choices=["none", "cpu"])
    parser.add_argument("--threads")
    parser.add_argument("--rows", type=int, default=4, help="rows of the test text")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = {}
    for model in options.models:
        with tempfile.TemporaryDirectory(prefix="subquad-methods-") as scratch:
            results[model] = measure(model, Path(scratch), options)
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", "utf-8")
    if options.write:
        PAGE.write_text(page(results, options.kernels), "utf-8")
    print("\n\n".join(table(model, found) for model, found in results.items()))


if __name__ == "__main__":
    main()
