"""What an inspection or a conversion reports, and the clock of its stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Progress = Callable[[str, float | None], None]


@dataclass
class StageClock:
    """Seconds per stage, with progress for the user."""

    progress: Progress | None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        if self.progress is not None:
            self.progress(name, None)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


@dataclass(frozen=True)
class InspectionReport:
    """What a source contains; nothing was written."""

    source: dict[str, Any]
    sites: tuple[dict[str, Any], ...]
    rejections: tuple[dict[str, str], ...]
    seconds: dict[str, float]
    peak_rss_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "sites": list(self.sites),
            "rejections": list(self.rejections),
            "seconds": self.seconds,
            "peak_rss_bytes": self.peak_rss_bytes,
        }


@dataclass(frozen=True)
class ConversionReport(InspectionReport):
    """What a conversion did.

    Attributes:
        output: the artifact directory.
        files: as in the manifest.
        check: result of the smoke check in the child process.
        facts: further entries, such as ``planning``.
    """

    output: str
    files: dict[str, dict[str, Any]]
    check: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        entries = {"output": self.output, "files": self.files, "check": self.check}
        return super().to_json() | entries | self.facts
