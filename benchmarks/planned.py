"""Plan, convert and judge a decoder on texts that were never calibrated on.

    python benchmarks/planned.py --length 4096 --budget ppl=1% --kernels cpu     # SmolLM2-135M
    python benchmarks/planned.py --source examples/demo_model --length 1024 --budget ppl=2%

Calibrates on articles of Wikipedia and files of the standard library, two kinds of documents on
each of which the budget must hold, then validates the artifact on other articles and other files.
Prints one row per text: perplexity over that of the source; what was saved, what planning took, and
how far the artifact still copies. ``--output``: all as JSON.
``--folder`` keeps texts and artifact; the same command goes on there if it was interrupted.
"""

from __future__ import annotations

import argparse
import bz2
import html
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import third_party  # noqa: E402

DUMP = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
LONGEST = 60_000
"""Characters of one document for calibration: no single one is most of the data."""


def articles() -> list[str]:
    """Long Wikipedia articles without most of their markup, longest first."""
    dump = bz2.decompress((third_party.fetch("texts") / DUMP).read_bytes()).decode("utf-8")
    texts = [_plain(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", dump, re.DOTALL)]
    return sorted((text for text in texts if len(text) > 12_000), key=len, reverse=True)


def _plain(text: str) -> str:
    text = html.unescape(text)
    text = re.sub(r"<ref[^>]*/>|<ref.*?</ref>|<!--.*?-->", "", text, flags=re.DOTALL)
    for _ in range(4):  # templates inside templates
        text = re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}", "", text)
    text = re.sub(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1", text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"'{2,}|<[^>]+>", "", text)).strip()


def sources() -> list[str]:
    """Files of the standard library, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py") if path.stat().st_size > 15_000)
    return [path.read_text("utf-8") for path in files]


def write_texts(folder: Path) -> tuple[Path, dict[str, Path]]:
    """The calibration folder, one folder in it for each kind, and a test text of each kind.

    Every third document is for tests.
    """
    calibration = folder / "calibration"
    tests = {}
    for kind, documents in {"wikipedia": articles(), "code": sources()}.items():
        tests[kind] = folder / f"{kind}.txt"
        tests[kind].write_text("\n\n\n".join(documents[::3][:12]), "utf-8")
        (calibration / kind).mkdir(parents=True, exist_ok=True)
        rest = [text for index, text in enumerate(documents) if index % 3]
        for number, text in enumerate(rest[:12]):
            (calibration / kind / f"{number:02}.txt").write_text(text[:LONGEST], "utf-8")
    return calibration, tests


def subquad(*arguments: str | Path) -> dict[str, Any]:
    """Run the command line with ``--json``; exit 4 of ``validate`` still has its result."""
    command = [sys.executable, "-m", "subquad", *map(str, arguments), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 4) or not done.stdout:
        raise SystemExit(f"subquad {arguments[0]} failed with exit {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Convert and validate; everything that is printed."""
    calibration, tests = write_texts(folder)
    source = options.source or third_party.smollm2()
    threads = ("--threads", options.threads) if options.threads else ()
    budget = ("--budget", options.budget)
    report = subquad(
        *("convert", source, folder / "artifact", "--data", calibration, "--overwrite"),
        *(*budget, "--lengths", str(options.length), *threads),
        *("--minimize", options.minimize, "--kernels", options.kernels),
        *("--calibration-tokens", str(options.calibration_tokens)),
        *("--heldout-tokens", str(options.heldout_tokens)),
        *(("--methods", options.methods) if options.methods else ()),
    )
    plan = report["planning"]["plan"]
    texts = []
    for length in options.test_lengths or [options.length]:
        for kind, path in tests.items():
            result = subquad(
                *("validate", folder / "artifact", "--data", path, *budget, *threads),
                *("--lengths", str(length), "--paddings", "none", "--rows", str(options.rows)),
                *("--no-metamorphic", "--no-attention"),
            )
            (case,) = result["cases"]
            texts.append(
                {"text": kind, "length": length, "verdict": result["verdict"], **case["logits"]}
            )
    return {
        "source": str(source),
        "length": options.length,
        "budget": options.budget,
        "saving": plan["saving"],
        "prices": plan["prices"],
        "methods": [site["method"] for site in plan["sites"]],
        "runs": plan["runs"],
        "heldout": plan["measured"],
        "refit": report["refit"].get("applied"),
        "probes": report["probes"],
        "texts": texts,
        "seconds": report["seconds"],
        "peak_rss_bytes": report["peak_rss_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source", type=Path, help="a decoder's folder [default: SmolLM2-135M]")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--budget", default="ppl=1%")
    parser.add_argument("--minimize", default="flops")
    parser.add_argument("--kernels", default="none", choices=["none", "cpu"])
    parser.add_argument("--methods", help="methods the plan may use [default: all]")
    parser.add_argument("--threads")
    parser.add_argument("--test-lengths", type=int, nargs="+", help="[default: that of the plan]")
    parser.add_argument("--rows", type=int, default=2, help="rows of each test text")
    parser.add_argument("--calibration-tokens", type=int, default=8192)
    parser.add_argument("--heldout-tokens", type=int, default=16384)
    parser.add_argument("--folder", type=Path, help="keep everything there")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        found = measure(options, options.folder)
    else:
        with tempfile.TemporaryDirectory(prefix="subquad-planned-") as scratch:
            found = measure(options, Path(scratch))
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")
    print("| text | tokens | ppl of the source | ratio | KL | budget |\n" + "|---" * 6 + "|")
    for text in found["texts"]:
        print(
            f"| {text['text']} | {text['length']} | {text['reference_perplexity']:.3f} "
            f"| {text['perplexity_ratio']:.4f} | {text['kl_mean']:.4f} | {text['verdict']} |"
        )
    kept = found["probes"].get("recall_kept")
    print(
        f"{found['saving']:.1%} of the attentions' {found['prices']['unit']} saved; recall kept: "
        f"{'-' if kept is None else format(kept, '.0%')}; {found['runs']} plans run; "
        f"{sum(found['seconds'].values()):.0f} s, peak {found['peak_rss_bytes'] / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    main()
