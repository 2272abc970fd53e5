"""Tuning records: one JSON line per measured candidate, in files that only grow.

A line is written whole, under a lock, and forced to disk, so an interrupted search loses nothing
but the candidate it was at. A line that a crash cut off is left out when the file is read.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from subquad.kernels.tuning.bucket import Bucket
from subquad.runtime.errors import OutputError, UsageError
from subquad.runtime.whole_file import whole_file

logger = logging.getLogger(__name__)

SCHEMA = 1

Status = Literal["ok", "failed", "wrong"]
"""``failed``: not compiled, crashed or out of time. ``wrong``: other numbers than the reference."""


@dataclass(frozen=True)
class Key:
    """What a record holds for.

    Attributes:
        bucket: the shape.
        target: name of the instruction set.
        template: ``module:attribute``.
        template_version: hash of its sources.
        tvm: version.
    """

    bucket: Bucket
    target: str
    template: str
    template_version: str
    tvm: str

    def to_json(self) -> dict[str, Any]:
        own = {"target": self.target, "template": self.template, "tvm": self.tvm}
        return self.bucket.to_json() | own | {"template_version": self.template_version}


@dataclass(frozen=True)
class Record:
    """One candidate, measured.

    Attributes:
        params: all parameters of the template's space.
        ratios: lower quartile, median and upper quartile of time over that of the default
            parameters, paired within rounds; empty unless ``ok``.
        rounds: pairs behind them.
        confirmed: whether this is the measurement that ended a search.
        reason: why not ``ok``.
        machine: the processor, or ``rpc <key>``.
        threads: of a call.
    """

    key: Key
    params: tuple[tuple[str, int], ...]
    status: Status
    ratios: tuple[float, ...] = ()
    rounds: int = 0
    confirmed: bool = False
    reason: str = ""
    machine: str = ""
    threads: int = 1

    def to_line(self) -> str:
        raw = asdict(self) | {"params": dict(self.params), "schema": SCHEMA}
        del raw["key"]
        text = json.dumps(raw | self.key.to_json(), sort_keys=True, separators=(",", ":"))
        return text + "\n"

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Record:
        """Raises KeyError, TypeError, AttributeError or ValueError: no record of this schema."""
        if raw["schema"] != SCHEMA:
            raise ValueError(f"schema is {raw['schema']!r}, this subquad reads {SCHEMA}")
        if raw["status"] not in get_args(Status):
            raise ValueError(f"unknown status {raw['status']!r}")
        names = ("target", "template", "template_version", "tvm")
        texts = {name: raw[name] for name in (*names, "reason", "machine")}
        for name, value in texts.items():
            if not isinstance(value, str):
                raise TypeError(f"{name} must be a string, got {value!r}")
        for name, value in (*raw["params"].items(), *((n, raw[n]) for n in ("rounds", "threads"))):
            if type(value) is not int:
                raise TypeError(f"{name} must be an integer, got {value!r}")
        ratios = tuple(float(item) for item in raw["ratios"])
        good = len(ratios) == 3 and all(0 < item < 1e6 for item in ratios)
        if raw["status"] == "ok" and not good:
            raise ValueError(f"an ok record needs three positive ratios, got {raw['ratios']!r}")
        return Record(
            key=Key(Bucket.from_json(raw), *(texts[name] for name in names)),
            params=tuple(sorted(raw["params"].items())),
            status=raw["status"],
            ratios=ratios,
            rounds=raw["rounds"],
            confirmed=raw["confirmed"] is True,
            reason=texts["reason"],
            machine=texts["machine"],
            threads=raw["threads"],
        )

    @property
    def rank(self) -> tuple[Any, ...]:
        """Lowest is best: confirmed first, then the least upper quartile, then the text."""
        return (not self.confirmed, self.ratios[-1], self.to_line())


def best_record(records: Iterable[Record]) -> Record | None:
    """The best of records with one key; the same whatever their order. ``None``: none is ok.

    Of several measurements of the same parameters a confirmed one counts, else the one of most
    rounds.
    """
    per_params: dict[tuple[tuple[str, int], ...], Record] = {}
    for record in records:
        if record.status != "ok":
            continue
        known = per_params.get(record.params)
        if known is None or _weight(record) > _weight(known):
            per_params[record.params] = record
    return min(per_params.values(), key=lambda record: record.rank, default=None)


def by_key(records: Iterable[Record]) -> dict[Key, list[Record]]:
    """Records of each key, in order."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault(record.key, []).append(record)
    return groups


def _never_slower(records: Sequence[Record]) -> list[Record]:
    """Those of one key whose parameters no machine found slower than the defaults, or wrong.

    What ships runs on machines that measured nothing, so a winner on one must not lose on another.
    Each machine says what its weightiest measurement of the parameters says.
    """
    last: dict[tuple[Any, ...], Record] = {}
    for record in records:
        place = record.params, record.machine, record.threads
        known = last.get(place)
        if record.status == "ok" and (known is None or _weight(record) > _weight(known)):
            last[place] = record
    refused = {record.params for record in last.values() if record.ratios[1] > 1}
    refused |= {record.params for record in records if record.status == "wrong"}
    return [record for record in records if record.params not in refused]


def _weight(record: Record) -> tuple[Any, ...]:
    return (record.confirmed, record.rounds, record.ratios[-1], record.to_line())


def read_records(path: Path) -> list[Record]:
    """All records of a file, in order; lines that are none are left out with a warning.

    Raises:
        UsageError: it cannot be read, or has lines and none of them is a record.
    """
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError as error:
        raise UsageError(f"tuning records {path} cannot be read: {error.strerror}.") from error
    records, problem = [], ""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(Record.from_json(json.loads(line)))
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            problem = f"line {number}: {what}"
            logger.warning("tuning records %s: %s; left out", path, problem)
    if problem and not records:
        raise UsageError(f"{path} holds no tuning records: {problem}.")
    return records


def append_records(path: Path, records: Sequence[Record]) -> None:
    """Add lines to a file, which is made if it is not there.

    Raises:
        OutputError: it cannot be written.
    """
    text = "".join(record.to_line() for record in records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            stream.seek(0, os.SEEK_END)
            if stream.tell():
                stream.seek(-1, os.SEEK_END)
                # What a crash cut off must not take the next line with it.
                text = text if stream.read(1) == b"\n" else "\n" + text
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise OutputError(f"tuning records {path} cannot be written: {error.strerror}.") from error


def merge_records(sources: Sequence[Path], output: Path, *, best_only: bool = False) -> int:
    """Write the records of all ``sources``, sorted and each once; returns how many.

    Args:
        sources: files of records.
        output: may be one of the sources; it is replaced at the very end.
        best_only: leave out all but the best of each key that no machine found slower than the
            defaults, and keys without a confirmed one.

    Raises:
        UsageError: a source cannot be read or holds no records.
        OutputError: ``output`` cannot be written.
    """
    records = [record for path in sources for record in read_records(path)]
    if best_only:
        best = [best_record(_never_slower(group)) for group in by_key(records).values()]
        records = [record for record in best if record is not None and record.confirmed]
    lines = sorted({record.to_line() for record in records})
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{output} cannot be written: {error.strerror}.") from error
    with whole_file(output) as stream:
        stream.write("".join(lines).encode())
    return len(lines)
