"""What calibration and distillation give back, and what planning gains an encoder.

    python benchmarks/repairs.py demo       # the demo model all as lolcats, repaired
    python benchmarks/repairs.py minilm     # MiniLM: the planner's choice; lolcats forced
    python benchmarks/repairs.py whisper    # Whisper tiny.en's encoder: the planner's choice

``demo``: perplexity of held-out files of the standard library at 1024 tokens, of the source, of the
artifact with maps as they start, fitted, and repaired. Recovered is the share of the rise of the
perplexity (over the source's) that is gone. ``minilm``: the correlation with the judgements of the
Lee corpus, and the mean cosine between the mean embeddings of source and artifact, on the corpus
and on Wikipedia at 512 tokens. Neither is calibrated on. ``whisper``: what the decoder of the
source writes after each encoder, for recordings that are calibrated on and others. ``--output``:
all as JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planned import ROOT, articles, sources, subquad, write_texts

import third_party  # isort: skip  (its folder is on the path by then)

Flags = tuple[str | Path, ...]

DEMO = ROOT / "examples" / "demo_model"
LENGTH = 1024
METHOD = "lolcats:size=64,sinks=4"
DISTIL = "rank=16,steps=100,learning_rate=0.005"
ENCODER_LENGTH = 512
LEE_TOKENS = 384
ROUNDS = 15
CALIBRATED_ON = ("endgame_nagg_nell", "two_cities")
CALIBRATION_STEP = 10
"""Seconds from piece to piece of a recording that is calibrated on."""


def perplexity(artifact: Path, text: Path, length: int, rows: int) -> dict[str, float]:
    """Of the source and of the artifact."""
    result = subquad(
        *("validate", artifact, "--data", text, "--lengths", str(length), "--rows", str(rows)),
        *("--paddings", "none", "--no-metamorphic", "--no-attention"),
    )
    logits = result["cases"][0]["logits"]
    source = logits["reference_perplexity"]
    return {
        "source": source,
        "artifact": source * logits["perplexity_ratio"],
        "kl": logits["kl_mean"],
    }


def demo(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The demo model, every attention as ``METHOD``."""
    data = folder / "calibration"
    data.mkdir()
    documents = sources()
    for number, text in enumerate(text for i, text in enumerate(documents) if i % 3):
        (data / f"code{number:02}.txt").write_text(text, "utf-8")
    test = folder / "test.txt"
    test.write_text("\n\n\n".join(documents[::3]), "utf-8")
    shared: Flags = ("--lengths", str(LENGTH), "--data", data, *_threads(options))
    tokens = ("--calibration-tokens", "32768", "--heldout-tokens", "4096")
    ways: dict[str, Flags] = {
        "as they start": (),
        "fitted": ("--calibrate", *shared, *tokens),
        "repaired": ("--distil", options.distil, *shared, *tokens),
    }
    found: dict[str, Any] = {"method": METHOD, "length": LENGTH, "ways": {}}
    for name, flags in ways.items():
        output = folder / name.replace(" ", "-")
        processor = _processor_seconds()
        report = subquad(
            *("convert", DEMO, output, "--force", METHOD, "--kernels", options.kernels, *flags)
        )
        processor = _processor_seconds() - processor
        found["ways"][name] = {
            **perplexity(output, test, LENGTH, options.rows),
            "seconds": sum(report["seconds"].values()),
            "processor": processor,
            "calibration": report.get("calibration", []),
            "distillation": report.get("distillation"),
            "branches": report.get("branches", []),
        }
    lost = {name: way["artifact"] - way["source"] for name, way in found["ways"].items()}
    for name in ("as they start", "fitted"):
        found[f"recovered of {name}"] = 1 - lost["repaired"] / lost[name]
    return found


def _processor_seconds() -> float:
    """Of all processes that were started here and ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def print_demo(found: dict[str, Any]) -> None:
    print(f"demo model, every attention {found['method']}, {found['length']} tokens")
    print(
        "| maps | perplexity | of the source | KL | conversion | processor |\n" + "|---" * 6 + "|"
    )
    for name, way in found["ways"].items():
        print(
            f"| {name} | {way['artifact']:.3f} | {way['source']:.3f} | {way['kl']:.4f} "
            f"| {way['seconds']:.0f} s | {way['processor']:.0f} s |"
        )
    for name in ("as they start", "fitted"):
        print(f"recovered of what is lost with maps {name}: {found[f'recovered of {name}']:.0%}")


def feeds_of(manifest: Any, ids: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """Inputs of an encoder for rows without padding."""
    by_role = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    return {item.name: by_role.get(item.role, np.zeros_like(ids)) for item in manifest.inputs}


def embed(artifact: Any, ids: list[NDArray[np.int64]]) -> NDArray[np.float32]:
    """Means over the tokens of each row, ``[rows, size]``."""
    runs = (artifact.run(feeds_of(artifact.manifest, row)) for row in ids)
    return np.stack([outputs["last_hidden_state"][0].mean(axis=0) for outputs in runs])


def judge_encoder(artifact: Path, exact: Path) -> dict[str, float]:
    """Lee correlation of the artifact, and how near its embeddings are to those of the source."""
    from tokenizers import Tokenizer

    import subquad as library

    tokenizer = Tokenizer.from_file(str(exact / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    corpus = third_party.lee()

    def ids(text: str, most: int) -> NDArray[np.int64]:
        return np.array([tokenizer.encode(text).ids[:most]])

    rows = {
        "lee": [ids(text, LEE_TOKENS) for text in corpus.documents],
        # Every third article, which calibration does not see.
        "wikipedia": [ids(text, ENCODER_LENGTH) for text in articles()[::3][:24]],
    }
    loaded = {"artifact": library.load(artifact), "exact": library.load(exact)}
    found = {}
    for name, of_text in rows.items():
        vectors = {who: embed(model, of_text) for who, model in loaded.items()}
        unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in vectors.values()]
        cosines = (unit[0] * unit[1]).sum(axis=1)
        found[f"cosine {name}"] = float(cosines.mean())
        found[f"least cosine {name}"] = float(cosines.min())
        if name == "lee":
            found["pearson"] = corpus.pearson(vectors["artifact"])
            found["pearson of the source"] = corpus.pearson(vectors["exact"])
    return found


def minilm(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """MiniLM: planned within a budget, and every attention as lolcats with repair."""
    data = write_texts(folder)[0] / "wikipedia"
    source = third_party.minilm_l6()
    shared: Flags = ("--lengths", str(ENCODER_LENGTH), "--data", data, *_threads(options))
    kernels = ("--kernels", options.kernels)
    subquad("convert", source, folder / "exact", *kernels)
    found: dict[str, Any] = {"length": ENCODER_LENGTH, "kernels": options.kernels}
    ids = np.random.default_rng(0).integers(1000, 30000, (4, ENCODER_LENGTH))

    def fast(artifact: Path) -> float:
        import subquad as library

        feeds = feeds_of(library.load(artifact).manifest, ids)
        return speedup(artifact, folder / "exact", feeds, options.threads)

    for minimize in options.minimize:
        flags = ("--budget", options.budget, "--minimize", minimize)
        report = subquad("convert", source, folder / minimize, *flags, *shared, *kernels)
        plan = report["planning"]["plan"]
        found[f"planned, {minimize}"] = {
            "saving": plan["saving"],
            "prices": plan["prices"],
            "methods": [site["method"] for site in plan["sites"]],
            "seconds": sum(report["seconds"].values()),
            "speedup": fast(folder / minimize),
            **judge_encoder(folder / minimize, folder / "exact"),
        }
    method = "lolcats:size=64"
    report = subquad(
        *("convert", source, folder / "forced", "--force", method),
        *("--distil", options.distil, *shared, *kernels),
    )
    found[f"forced {method}, repaired"] = {
        "seconds": sum(report["seconds"].values()),
        "speedup": fast(folder / "forced"),
        **judge_encoder(folder / "forced", folder / "exact"),
    }
    return found


def speedup(
    artifact: Path, exact: Path, feeds: dict[str, NDArray[Any]], threads: str | None
) -> float:
    """Over the exact artifact: median of ratios in turns, in changing order."""
    import subquad as library

    count = None if threads is None else int(threads)
    models = [library.load(path, threads=count) for path in (exact, artifact)]
    ratios = []
    for number in range(ROUNDS + 1):
        seconds = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            models[which].run(feeds)
            seconds[which] = time.perf_counter() - start
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios[1:])  # the first run warms up


def print_minilm(found: dict[str, Any]) -> None:
    print(f"MiniLM at {found['length']} tokens, runs as {found['kernels']}")
    print("| artifact | Lee Pearson | cosine Lee | cosine Wikipedia | saved | speed over exact |")
    print("|---|---|---|---|---|---|")
    for name, way in found.items():
        if not isinstance(way, dict):
            continue
        saved = "-" if way.get("saving") is None else f"{way['saving']:.0%} {way['prices']['unit']}"
        print(
            f"| {name} | {way['pearson']:.4f} | {way['cosine lee']:.4f} "
            f"| {way['cosine wikipedia']:.4f} | {saved} | {way['speedup']:.2f}x |"
        )


def whisper(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The encoder of Whisper tiny.en on real speech: planned, over our own exact artifact."""
    import subquad as library
    import whisper_encoder

    speech = folder / "speech"
    speech.mkdir()
    for name in CALIBRATED_ON:
        features = whisper_encoder.features(name, step=CALIBRATION_STEP)
        np.savez(speech / f"{name}.npz", input_features=features)
    source = f"{ROOT / 'tests' / 'support' / 'whisper_encoder.py'}:encoder"
    kernels = ("--kernels", options.kernels)
    subquad("convert", source, folder / "exact", *kernels)
    report = subquad(
        *("convert", source, folder / "planned", "--budget", options.budget, *kernels),
        *("--data", speech, "--lengths", str(whisper_encoder.LENGTH)),
        *_threads(options),
    )
    models = [library.load(folder / name) for name in ("exact", "planned")]
    cosines, texts = [], {}
    for name in whisper_encoder.recordings():
        heard: list[list[str]] = [[], []]
        for piece in whisper_encoder.features(name):
            runs = (model.run({"input_features": piece[None]}) for model in models)
            exact, ours = (next(iter(outputs.values()))[0] for outputs in runs)
            lengths = np.linalg.norm(exact, axis=1) * np.linalg.norm(ours, axis=1)
            cosines.append(float(((exact * ours).sum(axis=1) / lengths).mean()))
            for text, hidden in zip(heard, (exact, ours), strict=True):
                text.append(whisper_encoder.transcribe(hidden))
        texts[name] = dict(zip(("exact", "planned"), map(" ".join, heard), strict=True))
    plan = report["planning"]["plan"]
    feeds = {"input_features": whisper_encoder.features("two_cities")[:1]}
    return {
        "kernels": options.kernels,
        "saving": plan["saving"],
        "measured": plan["measured"],
        "methods": [site["method"] for site in plan["sites"]],
        "why": [site["why"] for site in plan["sites"]],
        "cosine": statistics.mean(cosines),
        "texts": texts,
        "speedup": speedup(folder / "planned", folder / "exact", feeds, options.threads),
        "seconds": sum(report["seconds"].values()),
    }


def print_whisper(found: dict[str, Any]) -> None:
    print(f"Whisper tiny.en encoder, 1500 positions, runs as {found['kernels']}")
    for method, why in zip(found["methods"], found["why"], strict=True):
        print(f"  {method}: {why}")
    for name, text in found["texts"].items():
        seen = ", calibrated on" if name in CALIBRATED_ON else ""
        print(f"{name}{seen}: {text['exact']}")
        if text["planned"] != text["exact"]:
            print(f"  CHANGED: {text['planned']}")
    same = sum(text["planned"] == text["exact"] for text in found["texts"].values())
    print(
        f"{found['saving']:.0%} of the attentions' FLOPs saved, mean cosine of the hidden states "
        f"{found['cosine']:.4f}, {same} of {len(found['texts'])} transcripts unchanged, "
        f"{found['speedup']:.2f}x the exact artifact; {found['seconds']:.0f} s"
    )


def _threads(options: argparse.Namespace) -> tuple[str, ...]:
    return ("--threads", options.threads) if options.threads else ()


WHAT = {
    "demo": (demo, print_demo),
    "minilm": (minilm, print_minilm),
    "whisper": (whisper, print_whisper),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=list(WHAT))
    parser.add_argument("--kernels", default="none", choices=["none", "cpu"])
    parser.add_argument("--budget", default="cosine=0.99")
    parser.add_argument(
        "--minimize", nargs="*", default=["flops"], help="of minilm; none: no plan, only repair"
    )
    parser.add_argument("--distil", default=DISTIL)
    parser.add_argument("--threads")
    parser.add_argument("--rows", type=int, default=4, help="rows of the test text")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    measure, show = WHAT[options.what]
    with tempfile.TemporaryDirectory(prefix="subquad-repairs-") as scratch:
        found = measure(Path(scratch), options)
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")
    show(found)


if __name__ == "__main__":
    main()
