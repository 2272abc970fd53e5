"""What an artifact still finds far away, beside its own unconverted reference.

    python benchmarks/recall.py ARTIFACT --data texts.txt code.txt --length 4096 --rows 2

Hides facts in rows of each text and asks for them at the end (``runtime/recall_rows.py``). Prints
one row per kind and distance, and the recall that was kept of what the reference finds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import subquad
from subquad.runtime.manifest import Manifest
from subquad.runtime.probes import recall, recall_facts, spelling_tokenizer
from subquad.runtime.samples import TextSource, is_causal_model
from subquad.runtime.text import Tokenizer
from subquad.runtime.validate_recall import reference_run

Values = Mapping[str, NDArray[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=2, help="of each text")
    parser.add_argument("--beyond", type=int, default=0, help="tokens of the widest window")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    manifest = Manifest.read(options.artifact)
    tokenizer, causal = Tokenizer.load(options.artifact), is_causal_model(manifest)
    texts = []
    for path in options.data:
        source = TextSource(path, tokenizer, causal=causal)
        for row in range(min(options.rows, source.available(options.length))):
            ids = source.tokens(row, options.length, options.length)
            texts.append(np.asarray(ids, np.int64))
    artifact = subquad.load(options.artifact, threads=options.threads)
    points = recall(
        manifest,
        reference_run(options.artifact, manifest, options.threads),
        artifact.run,
        texts,
        spelling_tokenizer(options.artifact),
        beyond=options.beyond,
    )
    facts = recall_facts(points)
    print(
        "| kind | distance | answer tokens | reference | artifact | counts |\n" + "|---" * 6 + "|"
    )
    for point in points:
        print(
            f"| {point.kind} | {point.distance} | {point.tokens} "
            f"| {point.exact:.0%} ({point.exact_probability:.2f}) "
            f"| {point.model:.0%} ({point.model_probability:.2f}) "
            f"| {'yes' if point.counts else 'no'} |"
        )
    for kind, found in {**facts["recall_kinds"], "all": {"kept": facts["recall_kept"]}}.items():
        kept = found["kept"]
        print(f"{kind}: {found['says_nothing'] if kept is None else f'{kept:.1%} kept'}")


if __name__ == "__main__":
    main()
