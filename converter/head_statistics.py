"""Where the heads of a source look, on sample inputs: what `inspect --data` shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad.converter.base_artifact import base_artifact
from subquad.converter.work_folder import WorkFolder
from subquad.passes.calibrate.data import CALIBRATION_TOKENS, open_data
from subquad.passes.calibrate.engine import Engine, State
from subquad.passes.calibrate.segments import load_split
from subquad.passes.calibrate.statistics import SiteStatistics, StatisticsCollector
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime.jsonable import json_ready
from subquad.runtime.manifest import MODEL_NAME

if TYPE_CHECKING:
    from subquad.converter.pipeline import Source


def inspect_heads(
    source: Source,
    *,
    data: Sequence[Path],
    lengths: Sequence[int],
    work: Path,
    seed: int = 0,
    threads: int | None = None,
    tokens: int = CALIBRATION_TOKENS,
    progress: Callable[[str, float | None], None] | None = None,
) -> dict[str, Any]:
    """The manifest of the exact artifact of ``source``, and statistics of every head.

    Args:
        source: as ``convert``.
        data: files or folders; none = made-up inputs.
        lengths: tokens per row.
        work: folder for the exact artifact, which a later plan can use.
        seed, threads: as ``plan_source``.
        tokens: to take statistics on, per length.
        progress: called with each stage's name.

    Returns:
        A report as of ``inspect_source`` with two more entries: ``statistics``, site ->
        ``SiteStatistics.to_json()``, and ``data``.

    Raises:
        as ``plan_source``.
    """
    folder, manifest = base_artifact(source, WorkFolder(work), progress=progress)
    samples = open_data(
        manifest,
        folder,
        paths=data,
        lengths=lengths,
        seed=seed,
        calibration_tokens=tokens,
        heldout_tokens=1,
    )
    sites = [AttentionSite.from_json(record.site) for record in manifest.sites]
    engine = Engine(load_split(folder, MODEL_NAME, sites), folder, threads=threads)
    found: dict[str, SiteStatistics] = {}

    def visit(rank: int, states: Sequence[State]) -> None:
        split_site = engine.split.sites[rank]
        collector = StatisticsCollector(split_site.site)
        for state in states:
            collector.add({role: state[name] for role, name in split_site.inputs.items()})
        found[split_site.site.name] = collector.result()
        if progress is not None:
            progress(f"statistics of {split_site.site.name}", (rank + 1) / len(sites))

    engine.run([batch.feeds for batch in samples.calibration], {}, visit=visit)
    report: dict[str, Any] = json_ready(manifest)
    return report | {
        "statistics": {name: statistics.to_json() for name, statistics in found.items()},
        "data": samples.description,
        "synthetic": samples.synthetic,
    }
