"""An encoder-decoder -> two artifacts in one folder, see ``encoder_decoder``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subquad.converter.atomic import atomic_directory
from subquad.converter.conversion_report import ConversionReport, Progress, StageClock
from subquad.converter.cpu_kernels import join_kernel_facts
from subquad.converter.huggingface import trace_encoder_decoder
from subquad.converter.pipeline import Selection, raise_traced, require_raised, write_artifact
from subquad.converter.reports import write_reports
from subquad.runtime.machine import peak_rss_bytes


def convert_pair(
    source: Path,
    output: Path,
    *,
    overwrite: bool,
    needed: int | None,
    progress: Progress | None,
    **options: Any,
) -> ConversionReport:
    """Convert both graphs; every attention stays exact.

    Args:
        source: a Hugging Face folder of an encoder-decoder.
        output, overwrite, progress: as ``convert``.
        needed: attentions that must be raised in each graph, -1 = all.
        options: of ``write_artifact``.

    Returns:
        One report for both; sites, files and stages are named with their graph.

    Raises:
        what ``convert`` raises.
    """
    reports = {}
    with atomic_directory(output, overwrite=overwrite) as folder:
        clock = StageClock(progress)
        with clock.stage("trace"):
            parts = trace_encoder_decoder(source)
        for name, traced in parts.items():
            part = StageClock(None if progress is None else _named(progress, name))
            raised = raise_traced(traced, part)
            require_raised(raised, needed)
            (folder / name).mkdir()
            reports[name] = write_artifact(
                folder / name,
                traced,
                raised,
                Selection.of().assignments(raised, traced.source_hash),
                part,
                shown_as=output / name,
                **options,
            )
        if progress is not None:
            progress("publish", None)
    for name, report in reports.items():
        write_reports(output / name, report)
    return _joined(reports, output, clock.seconds)


def _named(progress: Progress, name: str) -> Progress:
    return lambda message, share: progress(f"{name}: {message}", share)


def _joined(
    reports: dict[str, ConversionReport], output: Path, seconds: dict[str, float]
) -> ConversionReport:
    def named(items: Sequence[dict[str, Any]], name: str, key: str) -> list[dict[str, Any]]:
        return [{**item, key: f"{name}: {item[key]}"} for item in items]

    sites: list[dict[str, Any]] = []
    rejections: list[dict[str, Any]] = []
    files: dict[str, Any] = {}
    for name, report in reports.items():
        for record in report.sites:
            site = {**record["site"], "name": f"{name}: {record['site']['name']}"}
            sites.append({**record, "site": site})
        rejections += named(report.rejections, name, "where")
        files |= {f"{name}/{path}": entry for path, entry in report.files.items()}
        seconds |= {f"{name}: {stage}": spent for stage, spent in report.seconds.items()}
    first = next(iter(reports.values()))
    return ConversionReport(
        source=first.source,
        sites=tuple(sites),
        rejections=tuple(rejections),
        seconds=seconds,
        peak_rss_bytes=peak_rss_bytes(),
        output=str(output),
        files=files,
        check={name: report.check for name, report in reports.items()},
        facts={"kernels": join_kernel_facts([r.facts["kernels"] for r in reports.values()])},
    )
