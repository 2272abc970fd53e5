"""Every method at every attention of a model: accuracy, speed and memory, losers included.

    python benchmarks/methods.py --write        # docs/method_results.md
    python benchmarks/methods.py demo --output results.json

Models: the demo model (held-out files of the standard library, 2048 tokens) and MiniLM (Lee corpus
and Wikipedia, 512 tokens). Every conversion forces one method everywhere, with what learns fitted
to texts that nothing is judged by. Speed and peak memory are those of the ONNX functions, over the
exact artifact's; with compiled kernels (``--kernels cpu``) they are others.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from planned import ROOT, subquad, write_texts
from repairs import DEMO, judge_encoder, perplexity

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
        report = subquad(
            *("convert", source, output, "--force", method, "--calibrate", "--data", data),
            *("--lengths", str(length), "--kernels", options.kernels, *threads),
        )
        fits = [fit["after"] for fit in report.get("calibration", [])]
        entry: dict[str, Any] = {"seconds": sum(report["seconds"].values())}
        if fits:
            heads = [error for fit in fits for error in fit]
            entry["fit error"] = sum(heads) / max(1, len(heads))
        if model == "demo":
            entry |= perplexity(output, tests["code"], length, options.rows)
        else:
            entry |= judge_encoder(output, folder / "dense")
        flags = ("--lengths", str(length), "--unchecked", "--time-limit", "60", *threads)
        (case,) = subquad("bench", output, *flags)["cases"]
        entry |= {"speedup": case["speedup"], "peak": case["artifact_peak_bytes"]}
        found[method] = entry
        print(f"{model}: {method} done", flush=True)
    return found


def table(model: str, found: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    exact = found["dense"]["speedup"]
    if model == "demo":
        lines = [
            f"## Demo model, {LENGTHS[model]} tokens of held-out code",
            "",
            "| everywhere | perplexity over the source's | KL | time over exact | peak memory |",
            "|---|---|---|---|---|",
        ]
    else:
        lines = [
            f"## MiniLM-L6, up to {LENGTHS[model]} tokens",
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
        time = exact / entry["speedup"]
        lines.append(f"| `{method}` | {quality} | {time:.2f} | {entry['peak'] / 2**20:.0f} MiB |")
    return "\n".join(lines)


def page(results: dict[str, dict[str, dict[str, Any]]], kernels: str) -> str:
    runs_as = "compiled kernels" if kernels == "cpu" else "ONNX functions"
    head = f"""# Every method on real models

Written by `python benchmarks/methods.py --write --kernels {kernels}`. One method at every
attention, whatever it costs; a plan mixes them within a budget instead. What learns is fitted
(`--calibrate`), nothing is repaired. Times are those of {runs_as} on two shared cores;
below 1 = faster than exact.
"""
    return "\n".join([head, *(table(model, found) + "\n" for model, found in results.items())])


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
