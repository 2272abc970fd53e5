"""Which parameters a kernel gets: from records of its shape, of the nearest one, or none."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from subquad.kernels.host.build import installed_version, template_version
from subquad.kernels.kernel import CpuTarget, load_template
from subquad.kernels.operator import OperatorVariant
from subquad.kernels.templates.space import Space
from subquad.kernels.tuning.bucket import bucket_of, distance
from subquad.kernels.tuning.records import Key, Record, best_record, by_key, read_records
from subquad.kernels.tuning.workload import Workload
from subquad.runtime.errors import Rejection
from subquad.runtime.kernel_tools import TVM_PACKAGE

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent.parent / "tuned"
"""Records that come with the package, one file per target."""

OTHER_VERSION = 1.0
"""Added to the distance of records made with other sources of the template, or another TVM."""

MAX_DISTANCE = 6.0
"""Records farther away than this say nothing."""

MAX_LENGTH_HINT = 4096
UNKNOWN_LENGTH = 2048

How = Literal["tuned", "nearest", "default"]


@dataclass(frozen=True)
class Choice:
    """Parameters of one kernel.

    Attributes:
        params: empty = the template's defaults.
        how: where they come from.
        note: which record, or why there is none.
    """

    params: Mapping[str, int]
    how: How
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"how": self.how, "params": dict(self.params), "note": self.note}


@dataclass(frozen=True)
class TuningBook:
    """Records of several files, the user's before the shipped ones.

    Attributes:
        layers: best records per key; an exact hit in an earlier layer wins.
    """

    layers: tuple[Mapping[Key, Record], ...] = field(default=())

    def choose(self, key: Key, space: Space) -> Choice:
        """Parameters for the kernel of ``key``: of equal keys the first, else the nearest.

        Nearest by ``bucket.distance`` plus ``OTHER_VERSION`` for other sources of the template and
        for another TVM; equal distances go to the earlier layer, then to the better record. Only
        records of the same target and template count, and only parameters that ``space`` takes.
        Where the defaults won in the nearest, the kernel of ``key`` has its own defaults.
        """
        for layer in self.layers:
            record = layer.get(key)
            if record is not None and space.fits(dict(record.params)):
                return Choice(dict(record.params), "tuned", _describe(record))
        near = [record for record in self.near(key) if space.fits(dict(record.params))]
        if not near:
            return Choice({}, "default", "no records of this shape or one near it")
        record = near[0]
        versions = "" if _same_versions(key, record.key) else ", other versions"
        where = record.key.bucket.describe()
        note = f"distance {_far(key, record.key):g}{versions}: {where}; {_describe(record)}"
        # The defaults won there; those of this shape may be others, fitted to its head dims.
        params = {} if set(record.ratios) == {1.0} else dict(record.params)
        return Choice(params, "nearest", note)

    def near(self, key: Key) -> list[Record]:
        """Records within ``MAX_DISTANCE`` of ``key``, nearest first."""
        found = [
            (far, index, record.rank, record)
            for index, layer in enumerate(self.layers)
            for other, record in layer.items()
            if (far := _far(key, other)) <= MAX_DISTANCE
        ]
        return [item[3] for item in sorted(found, key=lambda item: item[:3])]


def open_book(files: Sequence[Path] = (), *, user: bool = True, shipped: bool = True) -> TuningBook:
    """Read tuning records.

    Args:
        files: the caller's; each must exist.
        user: also ``user_records()``, if it is there.
        shipped: also what comes with the package.

    Raises:
        UsageError: a file cannot be read or holds no records.
    """
    layers = (
        [index_records(record for path in files for record in read_records(path))] if files else []
    )
    if user and user_records().exists():
        layers.append(index_records(read_records(user_records())))
    if shipped:
        paths = sorted(SHIPPED.glob("*.jsonl"))
        layers.append(index_records(record for path in paths for record in read_records(path)))
    return TuningBook(tuple(layers))


def user_records() -> Path:
    """``$SUBQUAD_CACHE/tuning.jsonl``, or ``tuning.jsonl`` in the user's data folder."""
    if override := os.environ.get("SUBQUAD_CACHE"):
        return Path(override) / "tuning.jsonl"
    from platformdirs import user_data_path

    return user_data_path("subquad", appauthor=False) / "tuning.jsonl"


@dataclass(frozen=True)
class TunedParameters:
    """Parameters for all kernels of an artifact.

    Attributes:
        templates: operator -> ``module:attribute``.
        book: of records; empty: all kernels take the defaults.
        workload: what to look records up for.
    """

    templates: Mapping[str, str]
    book: TuningBook = TuningBook()
    workload: Workload = Workload(1, UNKNOWN_LENGTH, UNKNOWN_LENGTH)

    def of(self, variant: OperatorVariant, target: CpuTarget) -> Mapping[str, int]:
        """What ``build_kernels`` takes."""
        return self.choose(variant, target).params

    def choose(self, variant: OperatorVariant, target: CpuTarget) -> Choice:
        """Parameters for the kernel of ``variant`` on ``target``; see ``TuningBook.choose``."""
        space = tuning_space(variant, target, self.templates)
        if isinstance(space, Rejection):
            return Choice({}, "default", space.reason)
        place = self.templates[variant.op_type]
        return self.book.choose(make_key(variant, self.workload, target, place), space)


@dataclass(frozen=True)
class TuningOptions:
    """What a conversion takes kernel parameters from.

    Attributes:
        on: whether there are any but the defaults.
        records: files written by ``subquad tune``; they win over the user's own file and over
            what ships with the package.
        length: sequence length to look records up for; ``None``: ``hinted_length``.
    """

    on: bool = True
    records: tuple[Path, ...] = ()
    length: int | None = None

    def parameters(self, templates: Mapping[str, str], max_length: int | None) -> TunedParameters:
        """Those of a model that takes ``max_length`` tokens; see ``open_book`` for errors."""
        book = open_book(self.records) if self.on else TuningBook()
        length = self.length or hinted_length(max_length)
        return TunedParameters(templates, book, Workload(1, length, length))


DEFAULT_TUNING = TuningOptions()


def make_key(variant: OperatorVariant, workload: Workload, target: CpuTarget, place: str) -> Key:
    """The key of records of ``variant`` on ``workload``, with the versions of now."""
    return Key(
        bucket_of(variant, workload),
        target.name,
        place,
        template_version(place),
        installed_version(TVM_PACKAGE),
    )


def tuning_space(
    variant: OperatorVariant, target: CpuTarget, templates: Mapping[str, str]
) -> Space | Rejection:
    """What may be tuned of the kernel of ``variant``, or why nothing."""
    template = load_template(variant.op_type, templates)
    if isinstance(template, Rejection):
        return template
    refusal = template.supports(variant)
    if refusal is not None:
        return refusal
    space = getattr(template, "space", None)
    if space is None:
        return Rejection(f"the template of {variant.op_type} has no tuning parameters")
    found: Space = space(variant, target)
    return found


def hinted_length(max_length: int | None) -> int:
    """The length to assume where the user names none: the longest a model takes, within reason.

    Long inputs are where the time goes; those beyond ``MAX_LENGTH_HINT`` take the parameters of it.
    """
    return UNKNOWN_LENGTH if max_length is None else max(1, min(max_length, MAX_LENGTH_HINT))


def index_records(records: Iterable[Record]) -> dict[Key, Record]:
    """The best record of each key that has one."""
    best = {key: best_record(group) for key, group in by_key(records).items()}
    return {key: record for key, record in best.items() if record is not None}


def _far(one: Key, other: Key) -> float:
    """Distance of two keys; infinite where one says nothing about the other."""
    if (one.target, one.template) != (other.target, other.template):
        return math.inf
    far = distance(one.bucket, other.bucket)
    if far is None:
        return math.inf
    versions = (one.template_version != other.template_version) + (one.tvm != other.tvm)
    return far + OTHER_VERSION * versions


def _same_versions(one: Key, other: Key) -> bool:
    return (one.template_version, one.tvm) == (other.template_version, other.tvm)


def _describe(record: Record) -> str:
    return f"{record.ratios[1]:.3g}x the time of the defaults in {record.rounds} rounds"
