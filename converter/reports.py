"""``report.json`` and ``report.html`` of an artifact that is in place.

They are no part of the artifact: its manifest does not name them, and whatever goes wrong while
they are made, the artifact is there and whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from subquad.converter.html_report import html_report
from subquad.runtime.errors import OutputError
from subquad.runtime.jsonable import json_ready
from subquad.runtime.whole_file import whole_file

if TYPE_CHECKING:
    from subquad.converter.conversion_report import ConversionReport

REPORT_NAME = "report.json"
PAGE_NAME = "report.html"


def write_reports(folder: Path, report: ConversionReport) -> None:
    """Write both, or replace older ones; the JSON is there before the page is made.

    Args:
        folder: of the finished artifact.
        report: of its conversion.

    Raises:
        OutputError: they cannot be written; the artifact is not touched.
    """
    text = json.dumps(json_ready(report.to_json()), indent=1, sort_keys=True)
    _replace(folder / REPORT_NAME, text + "\n")
    _replace(folder / PAGE_NAME, html_report(json.loads(text)))


def _replace(path: Path, text: str) -> None:
    try:
        with whole_file(path) as stream:
            stream.write(text.encode())
    except OutputError as error:
        raise OutputError(f"The artifact {path.parent} is complete, but {error}") from error
