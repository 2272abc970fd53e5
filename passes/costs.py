"""What an attention operator costs on this machine: a table of measured times and memory.

The table holds curves. A curve belongs to one operator with its static choices, to what runs it
(the compiled kernel or the ONNX function) and to a number of threads; its points are measured
(``cost_measurement.py``). Two variants share a curve if they differ in nothing but their scale, the
value of a softcap, the width of a window and its sinks, and the number of heads at the same number
of query heads per key/value head.

What lies between points is interpolated, in this order:

1. density (share of the key blocks that a list keeps): linearly, never beyond what was measured;
2. span (keys of a window and its sinks): linearly, up to twice the largest; below the smallest
   that one's cost, an upper bound;
3. rows (batch times key/value heads): log-log; beyond the largest in proportion; below half of the
   smallest is refused, since fewer rows may leave cores idle;
4. lengths: log-log, either along equal lengths of queries and keys, or along the keys for a fixed
   number of queries (1: decoding), log-log between such numbers. Up to twice the largest and down
   to half of the smallest length the nearest slope goes on; beyond that is refused.

A table belongs to a machine, the versions of what ran, and the code of the kernels. Reading it
elsewhere is refused: times of another machine are no prices.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from subquad.kernels.host.build import cache_folder
from subquad.kernels.operator import OperatorVariant
from subquad.runtime.errors import IntegrityError, OutputError, Rejection, UsageError
from subquad.runtime.jsonable import json_ready
from subquad.runtime.machine import cpu_flags, cpu_model, usable_cores, versions
from subquad.runtime.whole_file import whole_file

SCHEMA_VERSION = 1

RunsAs = Literal["kernel", "function"]
RUNS_AS: tuple[RunsAs, ...] = get_args(RunsAs)

REACH = 2.0
"""Lengths up to so many times beyond the measured ones are extrapolated."""

PACKAGES = ("subquad", "onnxruntime", "apache-tvm")
_SOURCES = Path(__file__).resolve().parent.parent / "kernels"


CurveKey = tuple[str, str, RunsAs, int]
"""Operator, bucket, what runs it, threads."""


@dataclass(frozen=True)
class CostPoint:
    """One measurement.

    Attributes:
        rows: batch times key/value heads.
        query_len, kv_len: of the inputs.
        density: share of the key blocks that the list keeps; 1 without a list.
        span: keys of the window and its sinks; 0 without a window.
        seconds: of one run.
        spread: distance of the quartiles of the single times, relative to ``seconds``.
        bytes: by which one run raises the peak of resident memory, output included; ``None``:
            the system does not tell.
    """

    rows: int
    query_len: int
    kv_len: int
    density: float
    span: int
    seconds: float
    spread: float
    bytes: int | None

    @property
    def place(self) -> tuple[int, int, int, float, int]:
        return self.rows, self.query_len, self.kv_len, self.density, self.span


@dataclass(frozen=True)
class CostCurve:
    """All points of one operator, one way to run it, and one number of threads.

    Attributes:
        operator: ``op_type``.
        bucket: its static choices that matter; see ``bucket_of``.
        runs_as: kernel or function.
        threads: of the session.
        points: sorted.
    """

    operator: str
    bucket: str
    runs_as: RunsAs
    threads: int
    points: tuple[CostPoint, ...]

    @property
    def title(self) -> str:
        """The operator with those of its choices that are not the usual ones, for people."""
        usual = (-1, "none", "lse")
        choices = {
            name: value
            for name, value in json.loads(self.bucket).items()
            if value and value not in usual
        }
        return f"{self.operator} " + " ".join(f"{name}={value}" for name, value in choices.items())

    @property
    def key(self) -> CurveKey:
        return self.operator, self.bucket, self.runs_as, self.threads


@dataclass(frozen=True)
class CostTable:
    """Measured costs of one machine.

    Attributes:
        owner: what they depend on; see ``owner_here``.
        curves: sorted, one per key.
        machine: description, for people.
        settings: how they were measured.
        notes: what was left out, and why.
    """

    owner: Mapping[str, Any]
    curves: tuple[CostCurve, ...]
    machine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def time(
        self,
        variant: OperatorVariant,
        batch: int,
        query_len: int,
        kv_len: int,
        threads: int,
        *,
        density: float = 1.0,
        runs_as: RunsAs | None = None,
    ) -> float | Rejection:
        """Seconds of one run, or why they are not known.

        Args:
            variant: the operator.
            batch, query_len, kv_len: sizes of its inputs.
            threads: of the session.
            density: share of the key blocks kept, for operators that read a list.
            runs_as: default: the kernel where the table has one, else the function.
        """
        wanted = _Wanted(_rows(variant, batch), query_len, kv_len, density, span_of(variant))
        curve = self._curve(variant, threads, runs_as)
        return _look_up(curve, wanted, lambda point: point.seconds)

    def memory(
        self,
        variant: OperatorVariant,
        batch: int,
        query_len: int,
        kv_len: int,
        threads: int,
        *,
        density: float = 1.0,
        runs_as: RunsAs | None = None,
    ) -> float | Rejection:
        """Bytes that one run adds, output included; arguments as for ``time``."""
        curve = self._curve(variant, threads, runs_as)
        if isinstance(curve, CostCurve) and any(point.bytes is None for point in curve.points):
            return Rejection("memory was not measured: this system does not tell it")
        # A run that needs next to nothing may measure 0, which has no logarithm.
        wanted = _Wanted(_rows(variant, batch), query_len, kv_len, density, span_of(variant))
        return _look_up(curve, wanted, lambda point: float(max(point.bytes or 0, 4096)))

    def faster(
        self, variant: OperatorVariant, batch: int, query_len: int, kv_len: int, threads: int
    ) -> RunsAs | Rejection:
        """Whether kernel or function is faster; needs both in the table."""
        times = {}
        for runs_as in RUNS_AS:
            seconds = self.time(variant, batch, query_len, kv_len, threads, runs_as=runs_as)
            if isinstance(seconds, Rejection):
                return seconds
            times[runs_as] = seconds
        return min(RUNS_AS, key=lambda runs_as: times[runs_as])

    def covers(self, variant: OperatorVariant, threads: int) -> bool:
        """Whether the table has any curve of this variant."""
        return isinstance(self._curve(variant, threads, None), CostCurve)

    def _curve(
        self, variant: OperatorVariant, threads: int, runs_as: RunsAs | None
    ) -> CostCurve | Rejection:
        bucket = bucket_of(variant)
        found = {
            curve.runs_as: curve
            for curve in self.curves
            if (curve.operator, curve.bucket, curve.threads) == (variant.op_type, bucket, threads)
        }
        for wanted in RUNS_AS if runs_as is None else (runs_as,):
            if wanted in found:
                return found[wanted]
        how = "" if runs_as is None else f" as {runs_as}"
        return Rejection(
            f"the cost table has no times of {variant.op_type}:{variant.overload}{how} with "
            f"{threads} threads"
        )

    def merge(self, newer: CostTable) -> CostTable:
        """Both tables in one; where both measured the same, the newer one holds.

        Raises:
            UsageError: they belong to different machines or versions.
        """
        _require_owner(newer.owner, self.owner, "The tables cannot be merged")
        points: dict[CurveKey, dict[Any, CostPoint]] = {}
        for curve in (*self.curves, *newer.curves):
            known = points.setdefault(curve.key, {})
            known.update({point.place: point for point in curve.points})
        curves = [
            CostCurve(*key, tuple(known[place] for place in sorted(known)))
            for key, known in sorted(points.items())
        ]
        notes = tuple(dict.fromkeys((*self.notes, *newer.notes)))
        return replace(newer, curves=tuple(curves), notes=notes)

    @property
    def hash(self) -> str:
        """Of everything a price can depend on: plans name it."""
        content = json_ready({"owner": self.owner, "curves": self.curves})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def save(self, path: Path | None = None) -> Path:
        """Write the file, atomically; by default the one ``load`` finds on this machine.

        Raises:
            OutputError: it cannot be written.
        """
        path = path or default_path()
        content = {"schema": SCHEMA_VERSION, "hash": self.hash} | asdict(self)
        text = json.dumps(json_ready(content), indent=1, sort_keys=True, allow_nan=False) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror}.") from error
        with whole_file(path) as stream:
            stream.write(text.encode())
        return path

    @staticmethod
    def load(path: Path) -> CostTable:
        """Read a table that was measured here.

        Raises:
            UsageError: there is no such file, or it is of another machine, other versions or other
                kernels.
            IntegrityError: it is no cost table, or was changed.
        """
        table = _read(path)
        _require_owner(table.owner, owner_here(), f"{path} is not of this machine")
        return table

    @staticmethod
    def find() -> CostTable | Rejection:
        """The table of this machine, or why there is none. It cannot be of another one: its name
        has the hash of what it depends on."""
        path = default_path()
        if not path.exists():
            return Rejection(
                "no costs were measured on this machine with these versions: subquad bench --costs"
            )
        return CostTable.load(path)


def bucket_of(variant: OperatorVariant) -> str:
    """The static choices of a variant that its cost depends on, as text.

    Everything but the scale, the value of a softcap, the width of a window, and the number of
    heads, of which the query heads per key/value head stay.
    """
    fields = asdict(variant)  # type: ignore[call-overload]
    fields.pop("scale", None)
    if span_of(variant):
        fields["sinks"] = bool(fields.get("sinks", 0))
        fields["window_left"] = "some"
        fields["window_right"] = "some" if fields["window_right"] > 0 else 0
    heads, kv_heads = fields.pop("num_heads"), fields.pop("num_kv_heads")
    fields["group"] = heads // kv_heads
    if "softcap" in fields:
        fields["softcap"] = bool(fields["softcap"])
    return json.dumps(json_ready(fields), sort_keys=True)


def span_of(variant: OperatorVariant) -> int:
    """Keys of the window and sinks of all heads alike; 0 where there is no such window."""
    fields = asdict(variant)  # type: ignore[call-overload]
    left, right = fields.get("window_left", -1), fields.get("window_right", -1)
    # Heads with windows of their own have tuples here: those are static choices.
    if not (isinstance(left, int) and isinstance(right, int)) or min(left, right) < 0:
        return 0
    sinks = fields.get("sinks", 0)
    return left + right + 1 + sinks if isinstance(sinks, int) else 0


def owner_here() -> dict[str, Any]:
    """What times on this machine depend on."""
    flags = " ".join(sorted(cpu_flags()))
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "cpu_flags": hashlib.sha256(flags.encode()).hexdigest()[:16],
        "versions": versions(PACKAGES),
        "kernels": _code_hash(),
    }


def default_path() -> Path:
    """Where the table of this machine, these versions and this code is kept."""
    text = json.dumps(owner_here(), sort_keys=True)
    return cache_folder("costs") / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _code_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.rglob("*")):
        if path.suffix in (".py", ".cc", ".h"):
            digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _require_owner(have: Mapping[str, Any], want: Mapping[str, Any], what: str) -> None:
    differing = [name for name in want if have.get(name) != want[name]]
    if differing:
        details = "; ".join(f"{name}: {have.get(name)}, not {want[name]}" for name in differing)
        raise UsageError(f"{what}: {details}. Measure again: subquad bench --costs.")


def _read(path: Path) -> CostTable:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise UsageError(
            f"There is no cost table {path}. Make it: subquad bench --costs."
        ) from error
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} is no cost table: {error}.") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA_VERSION:
        raise IntegrityError(f"{path} is no cost table of schema {SCHEMA_VERSION}.")
    try:
        curves = tuple(
            CostCurve(**{**curve, "points": tuple(CostPoint(**point) for point in curve["points"])})
            for curve in content["curves"]
        )
        table = CostTable(
            content["owner"],
            curves,
            content["machine"],
            content["settings"],
            tuple(content["notes"]),
        )
    except (KeyError, TypeError) as error:
        raise IntegrityError(f"{path} is no cost table: {error}.") from error
    if table.hash != content.get("hash"):
        raise IntegrityError(f"{path} was changed after it was measured. Measure again.")
    return table


def _rows(variant: OperatorVariant, batch: int) -> int:
    num_kv_heads: int = asdict(variant)["num_kv_heads"]  # type: ignore[call-overload]
    return batch * num_kv_heads


Value = Callable[[CostPoint], float]


@dataclass(frozen=True)
class _Wanted:
    rows: int
    query_len: int
    kv_len: int
    density: float
    span: int


def _look_up(curve: CostCurve | Rejection, wanted: _Wanted, value: Value) -> float | Rejection:
    if isinstance(curve, Rejection):
        return curve
    if min(wanted.rows, wanted.query_len, wanted.kv_len) < 1:
        return Rejection(f"sizes must be positive, got {wanted}")
    groups = _grouped(curve.points, lambda point: point.density)
    if set(groups) == {1.0}:
        # Without lists, or measured with full ones: an upper bound.
        return _at_span(groups[1.0], wanted, value)
    around = _around(sorted(groups), wanted.density)
    if around is None:
        return Rejection(
            f"density {wanted.density:g} is outside the measured {min(groups):g} to {max(groups):g}"
        )
    ends = [_at_span(groups[one], wanted, value) for one in around]
    return _between(around, ends, wanted.density, logarithmic=False)


def _at_span(points: Sequence[CostPoint], wanted: _Wanted, value: Value) -> float | Rejection:
    groups = _grouped(points, lambda point: float(point.span))
    spans = sorted(groups)
    span = max(float(wanted.span), spans[0])
    around = _around(spans, span)
    if around is None:
        if len(spans) < 2 or span > REACH * spans[-1]:
            measured = ", ".join(f"{one:g}" for one in spans)
            return Rejection(f"a window of {span:g} keys; measured were only {measured}")
        around = (spans[-2], spans[-1])
    sizes = wanted.rows, wanted.query_len, wanted.kv_len
    ends = [_at_rows(groups[one], *sizes, value) for one in around]
    return _between(around, ends, span, logarithmic=False)


def _at_rows(
    points: Sequence[CostPoint], rows: int, query_len: int, kv_len: int, value: Value
) -> float | Rejection:
    groups = _grouped(points, lambda point: float(point.rows))
    nearest = min(max(float(rows), min(groups)), max(groups))
    if rows < min(groups) / REACH:
        return Rejection(
            f"{rows} rows (batch times key/value heads) are fewer than half of the "
            f"{min(groups):g} measured, and may leave cores idle"
        )
    around = _around(sorted(groups), nearest)
    assert around is not None
    ends = [_at_lengths(groups[one], query_len, kv_len, value) for one in around]
    found = _between(around, ends, nearest, logarithmic=True)
    return found if isinstance(found, Rejection) else found * rows / nearest


def _at_lengths(
    points: Sequence[CostPoint], query_len: int, kv_len: int, value: Value
) -> float | Rejection:
    if query_len == kv_len:
        line = {p.kv_len: value(p) for p in points if p.query_len == p.kv_len}
        return _along(line, kv_len, "equal lengths")
    others = _grouped(
        [p for p in points if p.query_len != p.kv_len], lambda point: float(point.query_len)
    )
    around = _around(sorted(others), float(query_len))
    if around is None:
        have = ", ".join(f"{one:g}" for one in sorted(others)) or "none"
        return Rejection(
            f"{query_len} queries over {kv_len} keys: beside equal lengths only these numbers of "
            f"queries were measured: {have}"
        )
    ends = [
        _along({p.kv_len: value(p) for p in others[one]}, kv_len, f"{one:g} queries")
        for one in around
    ]
    return _between(around, ends, float(query_len), logarithmic=True)


def _along(line: Mapping[int, float], length: int, what: str) -> float | Rejection:
    """Log-log along measured lengths, the end slopes going on by ``REACH``."""
    lengths = sorted(line)
    if length in line:
        return line[length]
    if len(lengths) < 2:
        have = lengths[0] if lengths else "none"
        return Rejection(f"length {length}: for {what} only this was measured: {have}")
    if not lengths[0] / REACH <= length <= lengths[-1] * REACH:
        return Rejection(
            f"length {length} is too far from the measured {lengths[0]} to {lengths[-1]} ({what}); "
            "measure it: subquad bench --costs --lengths"
        )
    low, high = next(
        (pair for pair in pairwise(lengths) if length <= pair[1]), (lengths[-2], lengths[-1])
    )
    slope = math.log(line[high] / line[low]) / math.log(high / low)
    return float(line[low] * (length / low) ** slope)


def _grouped(
    points: Iterable[CostPoint], by: Callable[[CostPoint], float]
) -> dict[float, list[CostPoint]]:
    groups: dict[float, list[CostPoint]] = {}
    for point in points:
        groups.setdefault(by(point), []).append(point)
    return groups


def _around(known: Sequence[float], wanted: float) -> tuple[float, ...] | None:
    """The neighbours of ``wanted`` among sorted values, or itself; ``None``: outside."""
    if wanted in known:
        return (wanted,)
    return next((pair for pair in pairwise(known) if pair[0] < wanted < pair[1]), None)


def _between(
    ends: tuple[float, ...],
    values: Sequence[float | Rejection],
    wanted: float,
    *,
    logarithmic: bool,
) -> float | Rejection:
    numbers = []
    for item in values:
        if isinstance(item, Rejection):
            return item
        numbers.append(item)
    if len(numbers) == 1:
        return numbers[0]
    (low, high), (first, second) = ends, numbers
    if logarithmic:
        share = math.log(wanted / low) / math.log(high / low)
        return float(first * (second / first) ** share)
    return first + (second - first) * (wanted - low) / (high - low)
