"""What recognition makes of the zoo, as ``docs/coverage.md`` and ``docs/coverage.json``.

    python -m zoo.report [--family NAME]... [--exporter NAME]... [--output FOLDER]

A row per family, a column per exporter. Each cell is measured: the exported file is read, raised,
and run at lengths and paddings it was not exported with.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from onnx_graphs import Runner
from subquad.converter.onnx_source import trace_onnx
from subquad.passes.canonicalise import canonicalise
from subquad.passes.raise_attention import raise_attention
from subquad.runtime.errors import SubquadError
from zoo.exports import EXPORTERS, ExportError, export, exporters_of, make_exports
from zoo.families import FAMILIES

DOCS = Path(__file__).parents[3] / "docs"


@dataclass(frozen=True)
class Cell:
    """One export and what became of it.

    Attributes:
        family, exporter: which.
        sites: attentions in the model.
        found: meaning of each raised site -> how many.
        declined: reason -> how many anchors (softmaxes that are no attention included).
        source_error: largest difference between raised and exported graph at real tokens,
            relative to the largest value.
        eager_error: between raised graph and the torch model in eager mode.
        export_error: between exported graph and the torch model.
        failure: why there is nothing to recognise.
    """

    family: str
    exporter: str
    sites: int
    found: dict[str, int] = field(default_factory=dict)
    declined: dict[str, int] = field(default_factory=dict)
    source_error: float = 0.0
    eager_error: float = 0.0
    export_error: float = 0.0
    failure: str = ""

    @property
    def raised(self) -> int:
        return sum(self.found.values())


def measure(family: str, exporter: str) -> Cell:
    """Export (or take from the cache), recognise, run."""
    sites = FAMILIES[family].sites
    try:
        exported = export(family, exporter)
        traced = trace_onnx(exported.path)
    except (ExportError, SubquadError) as error:
        return Cell(family, exporter, sites, failure=str(error))
    model = traced.model
    canonicalise(model)
    result = raise_attention(model)
    source, ours = Runner(traced.reference), Runner(model)
    errors = [0.0, 0.0, 0.0]
    try:
        source(exported.samples[0][0])
    except (ort_errors.Fail, ort_errors.InvalidArgument, ort_errors.RuntimeException) as error:
        text = str(error).strip().splitlines()[0].split(" was false. ")[-1]
        return Cell(family, exporter, sites, failure=f"ONNX Runtime fails on it: {text[:200]}")
    for feeds, eager in exported.samples:
        real = real_tokens(feeds, eager)
        graph, raised = source(feeds)[0], ours(feeds)[0]
        pairs = ((raised, graph), (raised, eager), (graph, eager))
        errors = [max(e, relative(a, b, real)) for e, (a, b) in zip(errors, pairs, strict=True)]
    meanings = Counter(
        site.describe() + ("" if site.is_self else " (cross)") for site in result.sites
    )
    declined = Counter(rejection.reason for rejection in result.rejections)
    return Cell(
        family,
        exporter,
        sites,
        dict(meanings),
        dict(declined),
        source_error=errors[0],
        eager_error=errors[1],
        export_error=errors[2],
    )


def real_tokens(
    feeds: dict[str, NDArray[Any]], output: NDArray[np.float32]
) -> NDArray[np.bool_] | slice:
    """Which positions of the output are compared: padding slots hold nothing of meaning."""
    mask = feeds.get("attention_mask")
    real = mask > 0 if mask is not None else ~feeds["hidden"] if "hidden" in feeds else None
    return real if real is not None and output.shape[:2] == real.shape else slice(None)


def relative(
    got: NDArray[Any], want: NDArray[Any], real: NDArray[np.bool_] | slice = slice(None)
) -> float:
    if got.shape != want.shape:
        return float("inf")
    got, want = got[real], want[real]
    error = float(np.abs(got - want).max() / np.abs(want).max())
    return error if np.isfinite(error) else float("inf")


# --- the document ----------------------------------------------------------------------------

# Above it, the exported file itself is not the model at lengths or paddings other than traced.
EXPORT_TOLERANCE = 1e-3

_INTRODUCTION = """\
# Which attentions are recognised

Written by `make coverage`; do not edit. Small random models of every family (weights enlarged,
head sizes no power of four), each exported in every way torch offers, read as `.onnx`, raised,
and run at lengths 3, 19 and 70 with rows unpadded, padded in front, behind, and with holes.

A cell: attentions raised / attentions in the model, and the largest difference from the exported
graph at real tokens, relative to the largest value. *export* = torch cannot export it that way.
`!` = the exported file itself differs from the torch model (by more than 1e-3 of its largest value)
at a length or padding it was not exported with; what is in the file is followed all the same.

"""


def document(cells: Sequence[Cell]) -> str:
    names = [n for n in EXPORTERS if any(c.exporter == n for c in cells)]
    table = {(c.family, c.exporter): c for c in cells}
    rows = [n for n in FAMILIES if any(c.family == n for c in cells)]
    raised = sum(c.raised for c in cells if not c.failure)
    total = sum(c.sites for c in cells if not c.failure)
    lines = [f"**{raised} of {total} attentions** in {len(cells)} exports are raised.", ""]
    lines.append("| family | what is raised | " + " | ".join(names) + " |")
    lines.append("|---" * (len(names) + 2) + "|")
    for row in rows:
        mine = [table[row, name] for name in names if (row, name) in table]
        meanings = dict.fromkeys(meaning for cell in mine for meaning in cell.found)
        entries = [_cell(table.get((row, name))) for name in names]
        lines.append(f"| {row} | {'; '.join(meanings)} | " + " | ".join(entries) + " |")
    lines += ["", "## What is declined, and why", ""]
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        for reason, count in cell.declined.items():
            where = f"{cell.family} {cell.exporter} ×{count}"
            reasons.setdefault(_general(reason), []).append(where)
    for reason, places in sorted(reasons.items(), key=lambda item: -len(item[1])):
        more = f" and {len(places) - 6} more" if len(places) > 6 else ""
        lines.append(f"- {reason} ({', '.join(places[:6])}{more})")
    failures = [c for c in cells if c.failure]
    if failures:
        lines += ["", "## What torch cannot export, or cannot be read", ""]
        lines += [f"- {c.family} {c.exporter}: {c.failure}" for c in failures]
    return _INTRODUCTION + "\n".join(lines) + "\n"


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.failure:
        return "*export*"
    mark = "!" if cell.export_error > EXPORT_TOLERANCE else ""
    error = f" {cell.source_error:.0e}" if cell.raised else ""
    return f"{cell.raised}/{cell.sites}{error}{mark}"


def _general(reason: str) -> str:
    """A reason without the names of values."""
    return re.sub(r"'[^']*'", "…", reason)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="zoo.report", description=__doc__)
    parser.add_argument("--family", action="append", choices=list(FAMILIES))
    parser.add_argument("--exporter", action="append", choices=list(EXPORTERS))
    parser.add_argument("--output", type=Path, default=DOCS)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    work = [
        (family, exporter)
        for family in options.family or FAMILIES
        for exporter in exporters_of(family)
        if exporter in (options.exporter or EXPORTERS)
    ]
    cells = []
    with ProcessPoolExecutor(options.jobs) as pool:
        families = dict.fromkeys(family for family, _ in work)
        list(pool.map(make_exports, [[w for w in work if w[0] == f] for f in families]))
        for cell in pool.map(measure, *zip(*work, strict=True)):
            print(f"{cell.family:24}{cell.exporter:22}{_cell(cell)}", file=sys.stderr, flush=True)
            cells.append(cell)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "coverage.md").write_text(document(cells), "utf-8")
    (options.output / "coverage.json").write_text(
        json.dumps([asdict(cell) for cell in cells], indent=1) + "\n", "utf-8"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
