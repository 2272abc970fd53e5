"""Compare every attention of ``model.onnx`` with the same value of ``reference.onnx``.

Both graphs are opened with these values as further outputs, as many at a time as memory allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.runtime import onnx_wire
from subquad.runtime.artifact import read_model
from subquad.runtime.errors import IntegrityError, SubquadError
from subquad.runtime.kernel_library import KernelMode, choose_kernels
from subquad.runtime.manifest import MODEL_NAME, REFERENCE_NAME, Manifest, SiteRecord
from subquad.runtime.metamorphic import Change, length_axis, real_tokens, select
from subquad.runtime.metrics import Difference, relative_change
from subquad.runtime.past import with_past
from subquad.runtime.samples import Batch, Case, Layout, Samples
from subquad.runtime.session import QUIET_THREADS, open_session, run_session

Progress = Callable[[str, float | None], None]
Values = Mapping[str, NDArray[Any]]

# Site values held at a time, of both models together.
_SITE_BYTES = 512 << 20


@dataclass(frozen=True)
class SiteResult:
    """One attention, over all cases.

    Attributes:
        name, index, method: as in the manifest.
        relative_l2: worst case; ``None`` if it could not be read.
        length, padding: the worst case.
        note: why it could not be compared.
    """

    name: str
    index: int
    method: str
    relative_l2: float | None
    length: int | None = None
    padding: str = ""
    note: str = ""


class SiteComparison:
    """One comparison of all attentions.

    Attributes:
        notes: what could not be compared as a whole.
        leaking_site: the first attention that reacts to tokens it may not see.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        samples: Samples,
        layout: Layout,
        *,
        provider: str,
        threads: int | None,
        kernels: KernelMode,
        report: Progress,
    ) -> None:
        self.notes: list[str] = []
        self.leaking_site: str | None = None
        self._folder = folder
        self._manifest = manifest
        self._samples = samples
        self._layout = layout
        self._provider = provider
        self._threads = threads
        self._kernels = kernels
        self._report = report
        # The last session of each file, and the values it returns.
        self._kept: dict[str, tuple[tuple[str, ...], Any]] = {}

    def run(
        self, cases: Sequence[Case], leak: tuple[Batch, Change] | None
    ) -> tuple[SiteResult, ...]:
        """Compare the value of every attention; find where ``leak`` starts."""
        records, results = self._readable_sites()
        if not records:
            return tuple(results)
        worst: dict[str, tuple[float, Case]] = {}
        notes: dict[str, str] = {}
        try:
            if leak is not None:
                self._localise(records, *leak)
            for case in cases:
                for group in self._groups(records, case):
                    self._compare_group(group, case, worst, notes)
        except SubquadError as error:
            self.notes.append(f"attentions could not be compared: {error}")
        for record in records:
            name = record.site["name"]
            error_value, case_of = worst.get(name, (None, None))
            results.append(
                SiteResult(
                    name=name,
                    index=record.site["index"],
                    method=record.method,
                    relative_l2=error_value,
                    length=case_of.length if case_of else None,
                    padding=case_of.padding if case_of else "",
                    note=notes.get(name, "" if case_of else "not compared"),
                )
            )
        return tuple(sorted(results, key=lambda item: item.index))

    def _readable_sites(self) -> tuple[list[SiteRecord], list[SiteResult]]:
        """Sites whose values exist in both graphs, and results for the others."""
        have_model = _values_of(self._folder, MODEL_NAME)
        have_reference = _values_of(self._folder, REFERENCE_NAME)
        readable, results = [], []
        for record in sorted(self._manifest.sites, key=lambda item: item.site["index"]):
            site = record.site
            note = ""
            if site["output"] not in have_model:
                note = f"{MODEL_NAME} has no value {site['output']!r}"
            elif site["source_output"] not in have_reference:
                note = f"{REFERENCE_NAME} has no value {site['source_output']!r}"
            if note:
                results.append(
                    SiteResult(site["name"], site["index"], record.method, None, note=note)
                )
            else:
                readable.append(record)
        return readable, results

    def _groups(self, records: Sequence[SiteRecord], case: Case) -> Iterator[list[SiteRecord]]:
        """Sites in graph order, so many at a time that their values fit ``_SITE_BYTES``."""
        rows = max(count for _, count in case.parts)
        group: list[SiteRecord] = []
        held = 0
        for record in records:
            heads, size = record.site["num_heads"], record.site["value_dim"]
            # float32, in both models
            needed = 8 * rows * heads * size * max(1, case.length)
            if group and held + needed > _SITE_BYTES:
                yield group
                group, held = [], 0
            group.append(record)
            held += needed
        yield group

    def _compare_group(
        self,
        group: Sequence[SiteRecord],
        case: Case,
        worst: dict[str, tuple[float, Case]],
        notes: dict[str, str],
    ) -> None:
        self._report(f"attentions: length {case.length}, padding {case.padding}", None)
        model_names = [record.site["output"] for record in group]
        reference_names = [record.site["source_output"] for record in group]
        differences = {record.site["name"]: Difference() for record in group}
        for batch in self._samples.batches(case):
            real = real_tokens(self._layout, batch.feeds)
            want = self._read_values(REFERENCE_NAME, reference_names, batch.feeds)
            got = self._read_values(MODEL_NAME, model_names, batch.feeds)
            for record, model_name, reference_name in zip(
                group, model_names, reference_names, strict=True
            ):
                name = record.site["name"]
                model = got[model_name]
                reference = _as_heads(want[reference_name], model)
                if reference is None:
                    notes[name] = (
                        f"shapes differ: {list(model.shape)} in the model, "
                        f"{list(want[reference_name].shape)} in the reference"
                    )
                    continue
                pair = [_site_vectors(values, real) for values in (reference, model)]
                differences[name].add(pair[0], pair[1])
        for name, difference in differences.items():
            if difference.vectors and difference.relative_l2 > worst.get(name, (-1.0, case))[0]:
                worst[name] = (difference.relative_l2, case)

    def _read_values(self, file: str, names: Sequence[str], feeds: Values) -> Values:
        session = self._tapped(file, tuple(dict.fromkeys(names)))
        unique = list(dict.fromkeys(names))
        if file == REFERENCE_NAME:
            feeds = with_past(self._manifest.reference_inputs or self._manifest.inputs, feeds)
        return dict(zip(unique, run_session(session, feeds, unique), strict=True))

    def _tapped(self, file: str, names: tuple[str, ...]) -> Any:
        """A session of ``file`` that also returns ``names``; the last one of each file is kept."""
        if file in self._kept and self._kept[file][0] == names:
            return self._kept[file][1]
        self._kept.pop(file, None)
        outputs = {spec.name for spec in self._manifest.outputs}
        extended = onnx_wire.add_outputs(
            read_model(self._folder, file), [name for name in names if name not in outputs]
        )
        is_model = file == MODEL_NAME
        provider = self._provider if is_model else "cpu"
        mode: KernelMode = self._kernels if is_model else "off"
        session = open_session(
            extended,
            folder=self._folder,
            provider=provider,
            threads=self._threads,
            config=QUIET_THREADS,
            libraries=choose_kernels(self._folder, self._manifest, mode, provider=provider).paths,
            arena=False,
        )
        self._kept[file] = (names, session)
        return session

    def _localise(self, records: Sequence[SiteRecord], batch: Batch, change: Change) -> None:
        """Name the first site that reacts to a change that it may not see."""
        names = [record.site["output"] for record in records]
        before = self._read_values(MODEL_NAME, names, batch.feeds)
        after = self._read_values(MODEL_NAME, names, change.feeds)
        for record in records:
            name = record.site["output"]
            values = [_site_vectors(item[name], change.keep) for item in (before, after)]
            if relative_change(values[0], values[1]) > 0.0:
                self.leaking_site = record.site["name"]
                return


def _values_of(folder: Path, file: str) -> frozenset[str]:
    try:
        return onnx_wire.value_names(read_model(folder, file))
    except ValueError as error:
        raise IntegrityError(f"{folder / file} is not an ONNX file: {error}.") from error


def as_vectors(values: NDArray[Any]) -> NDArray[Any]:
    """Rows along the last axis; a scalar is one row."""
    return values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)


def _as_heads(reference: NDArray[Any], model: NDArray[Any]) -> NDArray[Any] | None:
    """``reference`` in the layout ``[batch, heads, length, size]`` of ``model``."""
    if reference.shape == model.shape:
        return reference
    if model.ndim == 4 and reference.ndim == 3:
        batch, heads, length, size = model.shape
        if reference.shape == (batch, length, heads * size):
            return reference.reshape(batch, length, heads, size).transpose(0, 2, 1, 3)
    return None


def _site_vectors(values: NDArray[Any], real: Mapping[str, NDArray[np.bool_]]) -> NDArray[Any]:
    """Rows of a site output ``[batch, heads, length, size]`` that belong to real tokens."""
    if values.ndim == 4:
        batch, heads, _, size = values.shape
        found = length_axis((batch, heads, "length", size), values, real)
        if found is not None:
            return select(values, *found)
    return as_vectors(values)
