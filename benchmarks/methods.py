"""Every method at every attention of a model: accuracy, speed and memory, losers included.

    python benchmarks/methods.py --threads 1 --clock cpu --write    # docs/method_results.md
    python benchmarks/methods.py demo --output results.json

Models: the demo model (held-out files of the standard library, 2048 tokens) and MiniLM (Lee corpus
and Wikipedia, 512 tokens). Every conversion forces one method everywhere, with what learns fitted
to texts that nothing is judged by. Then all artifacts of a model run in turns, as
``docs/benchmarks.md`` says; peak memory is that of the process which runs one. Artifacts and
their quality are kept in ``--folder``, so that an interrupted run goes on where it was; another
version of the code starts anew. With one model only, the page's table of the other is left as is.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import render
from harness import Case, Contestant, Settings, run_cases
from planned import ROOT, subquad, write_texts
from repairs import DEMO, Flags, judge_encoder, perplexity
from run import PACKAGES
from subquad.converter.code_hash import code_hash
from subquad.passes.methods import parse_method
from subquad.runtime.errors import TargetUnavailableError
from subquad.runtime.kernel_library import choose_kernels
from subquad.runtime.machine import describe_machine, usable_cores, versions
from subquad.runtime.manifest import Manifest
from subquad.runtime.whole_file import whole_file

import third_party  # isort: skip  (its folder is on the path by then)

EXACT = "dense"
METHODS = (
    EXACT,
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
SECONDS = 1200.0
"""For the timing of one model's artifacts."""


def judge(model: str, method: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Convert, unless that was done before; quality of the artifact."""
    output = artifact(folder, method)
    kept = output.with_name(f"{output.name}.json")
    if kept.is_file():
        known: dict[str, Any] = json.loads(kept.read_text("utf-8"))
        return known
    data, tests = write_texts(folder)
    data /= "code" if model == "demo" else "wikipedia"
    flags: Flags = ("--force", method, "--kernels", options.kernels, "--overwrite")
    if parse_method(method)[0].learns:
        flags += ("--calibrate", "--data", data, "--lengths", str(LENGTHS[model]))
        flags += ("--calibration-tokens", CALIBRATION_TOKENS, "--threads", str(options.threads))
    report = subquad("convert", source(model), output, *flags)
    heads = [error for fit in report.get("calibration", []) for error in fit["after"]]
    entry: dict[str, Any] = {"seconds": sum(report["seconds"].values())}
    if heads:
        entry["fit error"] = sum(heads) / len(heads)
    if model == "demo":
        entry |= perplexity(output, tests["code"], LENGTHS[model], options.rows)
    else:
        entry |= judge_encoder(output, artifact(folder, EXACT))
    with whole_file(kept) as stream:
        stream.write(json.dumps(entry).encode())
    return entry


def artifact(folder: Path, method: str) -> Path:
    return folder / method.replace(":", "-").replace("=", "").replace(",", "-")


def source(model: str) -> Path:
    return DEMO if model == "demo" else third_party.minilm_l6()


def time_all(model: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All artifacts of a model in turns: the report of a benchmark."""
    started = time.monotonic()
    contestants = tuple(
        Contestant(
            method,
            f"model {method}",
            {
                "kind": "model",
                "how": "artifact",
                "artifact": str(artifact(folder, method)),
                "kernels": "require" if has_kernels(artifact(folder, method)) else "auto",
                "source": str(source(model)),
                "is_decoder": model == "demo",
                "length": LENGTHS[model],
                "batch": 1,
                "real": 1.0,
                "threads": options.threads,
            },
            ours=True,
        )
        for method in METHODS
    )
    case = Case(model, LENGTHS[model], options.threads, contestants, None)
    settings = Settings(options.rounds, SECONDS, options.clock)
    results, skipped = run_cases([case], settings, lambda text: print(text, flush=True))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "versions": versions(PACKAGES),
        "settings": {"clock": options.clock},
        "seconds": time.monotonic() - started,
        "results": results,
        "skipped": skipped,
    }


def has_kernels(folder: Path) -> bool:
    """Whether every attention of the artifact has one that runs here."""
    try:
        choose_kernels(folder, Manifest.read(folder), "require")
    except TargetUnavailableError:
        return False
    return True


def measure(model: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Quality of every method, and the report of the timing."""
    quality = {}
    for method in METHODS:
        quality[method] = judge(model, method, folder, options)
        print(f"{model}: {method} done", flush=True)
    kernels = {method: has_kernels(artifact(folder, method)) for method in METHODS}
    return {"quality": quality, "kernels": kernels, "timing": time_all(model, folder, options)}


QUALITY = {
    "demo": ("perplexity over the source's", "KL"),
    "minilm": ("Lee Pearson", "cosine, Lee", "cosine, Wikipedia"),
}


def table(model: str, found: dict[str, Any]) -> str:
    """Markdown."""
    columns = ("everywhere", *QUALITY[model], "time over exact", "peak memory", "runs as")
    lines = [TITLES[model], "", render.where(found["timing"]), ""]
    lines += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    rows: dict[str, Any] = {}
    for case in found["timing"]["results"]:
        rows = {item["label"]: item for item in case["contestants"]}
    for method, entry in found["quality"].items():
        if model == "demo":
            cells = [f"{entry['artifact'] / entry['source']:.3f}", f"{entry['kl']:.3f}"]
        else:
            cells = [f"{entry['pearson']:.3f}", f"{entry['cosine lee']:.4f}"]
            cells += [f"{entry['cosine wikipedia']:.4f}"]
        if method in rows:
            # The exact artifact comes first, so ratios are of its time.
            peak = rows[method]["process_peak_bytes"]
            cells += [f"{1 / rows[method]['ours_over_this']:.2f}"]
            cells += ["" if peak is None else f"{peak / 2**20:.0f} MiB"]
        else:
            cells += ["not measured", ""]
        cells += ["kernels" if found["kernels"][method] else "functions"]
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    command = f"--threads {options.threads} --clock {options.clock} --kernels {options.kernels}"
    head = f"""# Every method on real models

Written by `python benchmarks/methods.py {command} --write`. One method at every attention,
whatever it costs; a plan mixes them within a budget instead. What learns is fitted
(`--calibrate`), nothing is repaired. Times are medians of ratios within a round, all artifacts in
turns ([how](benchmarks.md)): below 1 = faster than exact. Peak memory is that of the process which
runs the artifact.
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
    parser.add_argument("--kernels", default="cpu", choices=["none", "cpu"])
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: one thread")
    parser.add_argument("--rounds", type=int, default=10, help="that count")
    parser.add_argument("--rows", type=int, default=4, help="rows of the test text")
    parser.add_argument("--folder", type=Path, help="where artifacts are kept [default: the cache]")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads != 1:
        parser.error("the clock cpu is for --threads 1")
    name = f"methods-{options.kernels}-{options.threads}-{code_hash()[:16]}"
    folder = options.folder or third_party.cache_dir() / "benchmarks" / name
    results = {}
    for model in options.models:
        (folder / model).mkdir(parents=True, exist_ok=True)
        results[model] = measure(model, folder / model, options)
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", "utf-8")
    if options.write:
        PAGE.write_text(page(results, options), "utf-8")
    print("\n\n".join(table(model, found) for model, found in results.items()))


if __name__ == "__main__":
    main()
