"""What recognition makes of the zoo, as ``docs/coverage.md`` and ``coverage.json`` here.

    python -m zoo.report [--family NAME]... [--exporter NAME]... [--minutes N] [--missing]

A row per family, a column per exporter. Each cell is measured: the exported file is read, raised,
and run at lengths and paddings it was not exported with. Cells are kept, so a run that is stopped
goes on where it was; both files are written as it goes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from zoo.exports import EXPORTERS, exporters_of, make_exports
from zoo.families import FAMILIES, SPELLINGS
from zoo.measure import ROOT, Cell, cell_file, measured

DOCUMENT = ROOT / "docs" / "coverage.md"
RESULTS = Path(__file__).with_name("coverage.json")
# Every family gets these first: they differ the most.
_FIRST = ("torchscript17-eager", "dynamo24-sdpa")
# Exports made by one child, which imports torch once.
_BATCH = 12

Pair = tuple[str, str]


def in_order(pairs: Sequence[Pair]) -> list[Pair]:
    """One TorchScript and one dynamo export of every family first, then the cheaper exporter.

    Opsets of one family and spelling follow each other: they share what torch captures.
    """
    first = [(family, _or_other(family, name)) for name in _FIRST for family in FAMILIES]
    names = sorted(EXPORTERS, key=lambda name: SPELLINGS.index(EXPORTERS[name].spelling))
    rest = [
        (family, name)
        for dynamo in (False, True)
        for family in FAMILIES
        for name in names
        if EXPORTERS[name].dynamo == dynamo
    ]
    wanted = set(pairs)
    return [pair for pair in dict.fromkeys([*first, *rest]) if pair in wanted]


def _or_other(family: str, exporter: str) -> str:
    """The same exporter with a spelling that the family has."""
    found = EXPORTERS[exporter]
    spelling = next(s for s in (found.spelling, *SPELLINGS) if s in FAMILIES[family].spellings)
    return exporter.replace(found.spelling, spelling)


def measure_all(pairs: Sequence[Pair], minutes: float) -> Iterator[Cell]:
    """One cell after the other; a recogniser that crashes gives a cell too."""
    deadline = time.monotonic() + 60 * minutes
    pool: ProcessPoolExecutor | None = None
    for batch in (pairs[i : i + _BATCH] for i in range(0, len(pairs), _BATCH)):
        if time.monotonic() > deadline:
            break
        make_exports([pair for pair in batch if not cell_file(*pair).exists()])
        for pair in batch:
            pool = pool or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            future = pool.submit(measured, *pair)
            error = future.exception()
            if error is None:
                yield future.result()
                continue
            reason = f"the recogniser fails: {type(error).__name__}: {error}"
            yield Cell(*pair, FAMILIES[pair[0]].sites, failure=reason)
            pool.shutdown()
            pool = None
    if pool is not None:
        pool.shutdown()


# --- the document ----------------------------------------------------------------------------

# Above it, the exported file itself is not the model at lengths or paddings other than traced.
EXPORT_TOLERANCE = 1e-3

_INTRODUCTION = """\
# Which attentions are recognised

Written by `make coverage`; do not edit. Small random models of every family (weights enlarged,
head sizes no power of four), exported in the ways torch offers, read as `.onnx`, raised, and run
at lengths 3, 19 and 70 with rows unpadded, padded in front, behind, and with holes.

A cell: attentions raised / attentions in the model, and the largest difference from the torch
model in eager mode at real tokens, relative to the largest value. *export* = there is no file to
read, see below. `!` = the exported file itself differs from the torch model (by more than 1e-3 of
its largest value) at a length or padding it was not exported with; what is in the file is followed
all the same, and the difference shown is that from the file. An empty cell: not measured.

"""


def document(cells: Sequence[Cell]) -> str:
    names = [n for n in EXPORTERS if any(c.exporter == n for c in cells)]
    table = {(c.family, c.exporter): c for c in cells}
    rows = [n for n in FAMILIES if any(c.family == n for c in cells)]
    there = [c for c in cells if not c.failure]
    raised, total = sum(len(c.raised) for c in there), sum(c.sites for c in there)
    worst = max((c.source_error for c in there if c.source_error is not None), default=0.0)
    lines = [
        f"**{raised} of {total} attentions** in {len(there)} exported files are raised; the "
        f"largest difference between a raised and an exported graph is {worst:.0e}.",
        "",
        "| family | what is raised | " + " | ".join(names) + " |",
        "|---" * (len(names) + 2) + "|",
    ]
    for row in rows:
        mine = [table[row, name] for name in names if (row, name) in table]
        meanings = dict.fromkeys(meaning for cell in mine for meaning in cell.raised.values())
        entries = [_cell(table.get((row, name))) for name in names]
        lines.append(f"| {row} | {'; '.join(meanings)} | " + " | ".join(entries) + " |")
    return _INTRODUCTION + "\n".join([*lines, *_details(cells)]) + "\n"


def _details(cells: Sequence[Cell]) -> Iterator[str]:
    yield from ("", "## What is declined, and why", "")
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        for reason, count in Counter(map(_general, cell.declined.values())).items():
            reasons.setdefault(reason, []).append(f"{cell.family} {cell.exporter} ×{count}")
    for reason, places in sorted(reasons.items(), key=lambda item: -len(item[1])):
        yield f"- {reason} ({_shown(places)})"
    yield from ("", "## How it was proved", "")
    yield "Every mask also agreed with the graph's own, and every raised node with its subgraph, on"
    yield "sampled lengths, paddings and inputs (see [recognition.md](recognition.md))."
    yield ""
    proofs: dict[str, dict[str, None]] = {}
    for cell in cells:
        for how in cell.proofs.values():
            proofs.setdefault(_general(how), {})[cell.family] = None
    for how, families in sorted(proofs.items(), key=lambda item: (-len(item[1]), item[0])):
        yield f"- {how} ({', '.join(families)})"
    wrong = [(c, c.failure or c.note) for c in cells if c.failure or c.note]
    if wrong:
        yield from ("", "## What cannot be exported, read or run", "")
        texts: dict[str, list[str]] = {}
        for cell, text in wrong:
            texts.setdefault(text, []).append(f"{cell.family} {cell.exporter}")
        for text, places in texts.items():
            yield f"- {_shown(places)}: {text}"


def _shown(places: Sequence[str]) -> str:
    more = f" and {len(places) - 6} more" if len(places) > 6 else ""
    return ", ".join(places[:6]) + more


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.failure:
        return "*export*"
    differs = cell.export_error is None or cell.export_error > EXPORT_TOLERANCE
    known = cell.source_error is not None
    error = cell.source_error if differs and known else cell.eager_error
    shown = f" {error:.0e}" if cell.raised and error is not None else ""
    return f"{len(cell.raised)}/{cell.sites}{shown}{'!' if differs else ''}"


def _general(reason: str) -> str:
    """A reason without the names of values."""
    return re.sub(r"'[^']*'|unk__\d+", "…", reason)


# --- the command -----------------------------------------------------------------------------


def known_cells() -> dict[Pair, Cell]:
    """Results of earlier runs, by family and exporter."""
    if not RESULTS.exists():
        return {}
    cells = map(Cell.from_json, json.loads(RESULTS.read_text("utf-8")))
    return {(cell.family, cell.exporter): cell for cell in cells}


def write(measured_now: dict[Pair, Cell]) -> None:
    """Both files, in the order of the tables, with what earlier runs found elsewhere."""
    cells = known_cells() | measured_now
    kept = [cells[f, e] for f in FAMILIES for e in EXPORTERS if (f, e) in cells]
    rows = ",\n".join(json.dumps(cell.to_json(), allow_nan=False) for cell in kept)
    RESULTS.write_text(f"[\n{rows}\n]\n", "utf-8")
    DOCUMENT.write_text(document(kept), "utf-8")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="zoo.report", description=__doc__)
    parser.add_argument("--family", action="append", choices=list(FAMILIES))
    parser.add_argument("--exporter", action="append", choices=list(EXPORTERS))
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no more after this time"
    )
    parser.add_argument(
        "--missing", action="store_true", help="only what coverage.json has no result of"
    )
    options = parser.parse_args(arguments)
    known = known_cells() if options.missing else {}
    pairs = in_order(
        [
            (family, exporter)
            for family in options.family or FAMILIES
            for exporter in exporters_of(family)
            if exporter in (options.exporter or EXPORTERS) and (family, exporter) not in known
        ]
    )
    cells: dict[Pair, Cell] = {}
    for number, cell in enumerate(measure_all(pairs, options.minutes), start=1):
        cells[cell.family, cell.exporter] = cell
        text = f"{number:4}/{len(pairs)}  {cell.family:24}{cell.exporter:22}{_cell(cell)}"
        print(text, cell.failure or cell.note, file=sys.stderr, flush=True)
        write(cells)


if __name__ == "__main__":
    main(sys.argv[1:])
