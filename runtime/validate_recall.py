"""The recall that an artifact keeps of its reference's, for a budget of ``validate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from subquad.runtime.artifact import load
from subquad.runtime.kernel_library import KernelMode
from subquad.runtime.manifest import REFERENCE_NAME, Manifest
from subquad.runtime.past import with_past
from subquad.runtime.probes import Run, spelling_tokenizer, token_ids
from subquad.runtime.recall_budget import (
    RecallKept,
    RecallTest,
    hits,
    rows_of_texts,
)
from subquad.runtime.samples import Case, Samples
from subquad.runtime.session import QUIET_THREADS, open_session, run_session

Values = Mapping[str, NDArray[Any]]


def artifact_recall(
    folder: Path,
    manifest: Manifest,
    samples: Samples,
    cases: Sequence[Case],
    *,
    provider: str,
    threads: int | None,
    kernels: KernelMode,
    seed: int,
) -> tuple[RecallKept, tuple[str, ...]]:
    """Hide facts in the inputs of every length and ask both models; and what a reader must know.

    Raises:
        UsageError: the reference knows too little.
    """
    texts: dict[tuple[int, str], list[Any]] = {}
    for length in dict.fromkeys(case.length for case in cases):
        case = next(case for case in cases if case.length == length)
        whole = case if case.padding == "given" else replace(case, padding="none")
        rows = [row for batch in samples.batches(whole) for row in token_ids(manifest, batch.feeds)]
        texts[length, ""] = rows
    asked = rows_of_texts(texts, spelling_tokenizer(folder), seed)
    # One after the other: both together would need the memory of two models.
    test = RecallTest(
        manifest, asked, hits(manifest, asked, reference_run(folder, manifest, threads))
    )
    artifact = load(
        folder,
        provider=provider,
        threads=threads,
        verify=False,
        config=QUIET_THREADS,
        kernels=kernels,
        arena=False,
    )
    found = test.kept(artifact.run)
    ratios = ", ".join(f"{ratio:.1%} at length {n}" for n, ratio in sorted(found.lengths.items()))
    note = f"recall kept of the reference's: {ratios}; standard error {found.error:.1%}"
    return found, (note, *test.notes)


def reference_run(folder: Path, manifest: Manifest, threads: int | None) -> Run:
    """``reference.onnx`` of an artifact; runs give its logits."""
    session = open_session(
        folder / REFERENCE_NAME,
        folder=folder,
        threads=threads,
        config=QUIET_THREADS,
        arena=False,
    )
    names = [spec.name for spec in manifest.outputs if spec.is_logits]
    inputs = manifest.reference_inputs or manifest.inputs

    def run(feeds: Values) -> Values:
        return dict(zip(names, run_session(session, with_past(inputs, feeds), names), strict=True))

    return run
