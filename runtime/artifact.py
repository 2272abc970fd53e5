"""Load an artifact directory, prove that it is intact, and run it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.runtime import onnx_wire
from subquad.runtime.errors import IntegrityError, TargetUnavailableError, UsageError
from subquad.runtime.kernel_library import KernelChoice, KernelMode, choose_kernels
from subquad.runtime.manifest import (
    MANIFEST_NAME,
    MODEL_NAME,
    InputSpec,
    Manifest,
    file_record,
)
from subquad.runtime.past import PAST, empty_past, rows_of
from subquad.runtime.session import onnxruntime, open_session, provider_name, run_session


@dataclass(frozen=True)
class SiteExecution:
    """What computes one attention: a kernel, or the ONNX function body of its operator.

    Attributes:
        site: name of the site.
        method: method applied (``dense`` = exact).
        operator: ``ai.subquad`` operator and overload.
        runs_as: ``kernel <template> (<instruction set>)`` or ``function body``.
        reason: why no kernel runs, or why a requested method was declined.
    """

    site: str
    method: str
    operator: str
    runs_as: str
    reason: str


@dataclass(frozen=True)
class Execution:
    """What really runs, as opposed to what was asked for.

    Attributes:
        provider: requested provider, by its ONNX Runtime name; it did start.
        session_providers: ``session.get_providers()``; operators the first lacks run on the rest.
        onnxruntime: version.
        threads: threads for one operator; ``None`` = ONNX Runtime's choice.
        sites: in graph order.
    """

    provider: str
    session_providers: tuple[str, ...]
    onnxruntime: str
    threads: int | None
    sites: tuple[SiteExecution, ...]


class Artifact:
    """A loaded artifact; made by ``load``.

    Attributes:
        path: the directory.
        manifest: its manifest.
        execution: what really runs.
    """

    def __init__(self, path: Path, manifest: Manifest, session: Any, execution: Execution) -> None:
        self.path = path
        self.manifest = manifest
        self.execution = execution
        self._session = session

    @property
    def session(self) -> Any:
        """ONNX Runtime's session, for callers that keep values inside of it."""
        return self._session

    def run(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Sequence[str] | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Run the model once.

        Args:
            inputs: one array for every input of ``manifest.inputs``; those of the role ``past``
                may be left out, all together: then no tokens came before.
            outputs: names of the wanted outputs; all by default.

        Raises:
            UsageError: an input is missing, unknown, or of a wrong dtype, shape or range.
            SubquadError: ONNX Runtime failed; the message has its reason.
        """
        known = [spec.name for spec in self.manifest.outputs]
        names = known if outputs is None else list(outputs)
        for name in names:
            if name not in known:
                raise UsageError(f"No output {name!r}; the outputs are {', '.join(known)}.")
        feeds = check_inputs(self.manifest.inputs, inputs)
        return dict(zip(names, run_session(self._session, feeds, names), strict=True))


def load(
    path: str | os.PathLike[str],
    *,
    provider: str = "cpu",
    threads: int | None = None,
    verify: bool = True,
    config: Mapping[str, str] | None = None,
    kernels: KernelMode = "auto",
    arena: bool = True,
) -> Artifact:
    """Open the artifact directory ``path``.

    Args:
        path: the directory that ``subquad convert`` wrote.
        provider: ``cpu``, ``cuda``, another short name, or a full ONNX Runtime provider name.
            Operators the provider lacks run on the CPU, but it must have started.
        threads: for one operator; ``None`` leaves the choice to ONNX Runtime.
        verify: compare size and SHA-256 of every file with the manifest. Names and sizes are
            checked in any case.
        config: further ONNX Runtime session configuration entries.
        kernels: ``auto`` loads the artifact's kernel library for this machine, if it has one;
            ``off`` runs the ONNX functions; ``require`` refuses to run an attention without one.
        arena: whether the session keeps the memory of a run for the next one; off, runs of a few
            long sequences need less of it.

    Raises:
        UsageError: no such directory, unknown provider.
        IntegrityError: a file is missing, changed, or not under the artifact directory.
        TargetUnavailableError: ONNX Runtime or the provider is not available here; a kernel
            library cannot be loaded; kernels are required and missing.
    """
    folder, manifest = open_manifest(path)
    check_files(folder, manifest, hashes=verify)
    check_overloads(folder)
    choice = choose_kernels(folder, manifest, kernels, provider=provider)
    session = open_session(
        folder / MODEL_NAME,
        folder=folder,
        provider=provider,
        threads=threads,
        config=config,
        libraries=choice.paths,
        arena=arena,
    )
    _check_signature(manifest, session)
    execution = _execution(manifest, session, provider, threads, choice)
    return Artifact(folder, manifest, session, execution)


def open_manifest(path: str | os.PathLike[str]) -> tuple[Path, Manifest]:
    """The artifact directory and its manifest, files not yet checked."""
    folder = Path(path)
    if not folder.exists():
        raise UsageError(f"No such artifact directory: {folder}")
    return folder, Manifest.read(folder)


def check_files(folder: Path, manifest: Manifest, *, hashes: bool = True) -> None:
    """Compare every file of the manifest with the disk, reading files as streams.

    Raises:
        IntegrityError: names the first file that is missing, changed, not regular or outside.
    """
    if MODEL_NAME not in manifest.files:
        raise IntegrityError(f"{folder / MANIFEST_NAME} lists no {MODEL_NAME}. Convert again.")
    root = folder.resolve()
    for name, expected in manifest.files.items():
        path = _checked_path(root, name)
        try:
            if path.stat().st_size != expected["size"]:
                raise IntegrityError(
                    f"{folder / name}: {path.stat().st_size} bytes, but the manifest says "
                    f"{expected['size']}. The file is incomplete or was changed; convert or copy "
                    "again."
                )
            if hashes and file_record(path) != {key: expected[key] for key in ("size", "sha256")}:
                raise IntegrityError(
                    f"{folder / name}: content differs from its SHA-256 in the manifest. "
                    "The file was changed; convert or copy again."
                )
        except OSError as error:
            raise IntegrityError(f"{folder / name} cannot be read: {error.strerror}.") from error
    for name in manifest.files:
        if name.endswith(".onnx"):
            _check_external_data(folder, name, manifest)


def check_overloads(folder: Path) -> None:
    """Refuse an ONNX Runtime that would silently run one variant of an operator for all.

    Measured: 1.24 to 1.26 look functions up by domain and name only; 1.27 to 1.32 do not.
    """
    version = onnxruntime().__version__
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= (1, 27):
        return
    overloaded = sorted(onnx_wire.overloaded_functions(read_model(folder, MODEL_NAME)))
    if overloaded:
        raise TargetUnavailableError(
            f"{folder / MODEL_NAME} has several variants of {', '.join(overloaded)}, which ONNX "
            f"Runtime {version} confuses with each other. Install onnxruntime 1.27 or newer."
        )


def read_model(folder: Path, name: str) -> bytes:
    """The graph of one ``.onnx`` file of the artifact, without its external data."""
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise IntegrityError(f"{folder / name} cannot be read: {error.strerror}.") from error


def check_inputs(
    specs: Sequence[InputSpec], inputs: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """``inputs`` as contiguous arrays, each in agreement with its spec and with the others.

    Raises:
        UsageError: says which input is wrong, what was expected, and what came.
    """
    names = [spec.name for spec in specs]
    if not any(spec.role == "past" and spec.name in inputs for spec in specs):
        inputs = {**empty_past(specs, rows_of(inputs)), **inputs}
    missing = [name for name in names if name not in inputs]
    unknown = [name for name in inputs if name not in names]
    if missing or unknown:
        parts = [f"missing: {', '.join(missing)}"] if missing else []
        parts += [f"unknown: {', '.join(map(str, unknown))}"] if unknown else []
        raise UsageError(f"The model takes {', '.join(names)}; {'; '.join(parts)}.")
    dims: dict[str, tuple[int, str]] = {}
    for spec in specs:
        _check_array(spec, inputs[spec.name], dims)
    _check_sums(dims)
    for spec in specs:
        _check_values(spec, inputs[spec.name])
    return {name: np.ascontiguousarray(inputs[name]) for name in names}


def _check_array(spec: InputSpec, array: object, dims: dict[str, tuple[int, str]]) -> None:
    """Dtype, rank and sizes; ``dims`` collects the sizes of named dimensions and who set them."""
    shape = ", ".join(map(str, spec.shape))
    wanted = f"Input {spec.name!r} must be a {spec.dtype} array of shape [{shape}]"
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{wanted}, got {type(array).__name__}.")
    if array.dtype.name != spec.dtype:
        raise UsageError(
            f"{wanted}, got dtype {array.dtype.name}. Convert with .astype(numpy.{spec.dtype})."
        )
    got = list(array.shape)
    if array.ndim != len(spec.shape):
        raise UsageError(f"{wanted}, got {array.ndim} dimensions: {got}.")
    for axis, (dim, size) in enumerate(zip(spec.shape, array.shape, strict=True)):
        if isinstance(dim, int) and size != dim:
            raise UsageError(f"{wanted}, got {got}: axis {axis} must be {dim}.")
        if size == 0 and dim != PAST:
            raise UsageError(f"{wanted}, got {got}: axis {axis} ({dim}) is empty.")
        if isinstance(dim, str):
            first, owner = dims.setdefault(dim, (size, spec.name))
            if size != first:
                raise UsageError(f"{wanted}, got {got}: {dim} is {first} in input {owner!r}.")


def _check_sums(dims: Mapping[str, tuple[int, str]]) -> None:
    """Dimensions that are sums of others."""
    for dim, (size, owner) in dims.items():
        parts = dim.split(" + ")
        if len(parts) > 1 and all(part in dims for part in parts):
            wanted = sum(dims[part][0] for part in parts)
            if size != wanted:
                raise UsageError(
                    f"Input {owner!r}: {dim} must be {wanted}, got {size}. It counts tokens of "
                    "earlier calls and of this one."
                )


def _check_values(spec: InputSpec, array: NDArray[Any]) -> None:
    if spec.role in ("values", "past"):
        return
    if spec.role == "padding_mask":
        if not np.isin(array, (0, 1)).all():
            raise UsageError(f"Input {spec.name!r} must hold 0 (padding) and 1 (real token) only.")
        return
    low, high = int(array.min()), int(array.max())
    if low < 0 or (spec.high is not None and high >= spec.high):
        bound = "0 or more" if spec.high is None else f"0 to {spec.high - 1}"
        bad = low if low < 0 else high
        raise UsageError(f"Input {spec.name!r} must hold indices of {bound}, got {bad}.")


def _checked_path(root: Path, name: str) -> Path:
    """``root / name``, provided that it is a regular file that lies under ``root``."""
    pure = PurePosixPath(name)
    plain = name and not pure.is_absolute() and ".." not in pure.parts and pure.as_posix() == name
    # A backslash or colon would be a separator or a drive on Windows.
    if not plain or set(name) & set("\\:\0"):
        raise IntegrityError(
            f"{MANIFEST_NAME} lists {name!r}, which is no plain relative path. "
            "Do not trust this artifact."
        )
    path = root / name
    resolved = path.resolve()
    if not resolved.is_relative_to(root):
        raise IntegrityError(f"{name!r} leads out of the artifact directory, to {resolved}.")
    if not path.exists():
        raise IntegrityError(f"{path} is missing. Convert or copy again.")
    if not path.is_file():
        raise IntegrityError(f"{path} is not a regular file.")
    return path


def _check_external_data(folder: Path, name: str, manifest: Manifest) -> None:
    """Weights may come from listed files only: ONNX Runtime would read an unlisted one unseen."""
    try:
        locations = onnx_wire.external_locations(read_model(folder, name))
    except ValueError as error:
        raise IntegrityError(f"{folder / name} is not an ONNX file: {error}.") from error
    for location in sorted(locations):
        if location not in manifest.files:
            raise IntegrityError(
                f"{folder / name} reads weights from {location!r}, which the manifest does not "
                "list. Convert again."
            )


_DTYPES = {"tensor(float)": "float32", "tensor(double)": "float64"}
"""Those that ONNX calls otherwise than NumPy."""


def _check_signature(manifest: Manifest, session: Any) -> None:
    for kind, specs, values in (
        ("inputs", manifest.inputs, session.get_inputs()),
        ("outputs", manifest.outputs, session.get_outputs()),
    ):
        listed, real = {spec.name for spec in specs}, {value.name for value in values}
        if listed != real or len(specs) != len(values):
            raise IntegrityError(
                f"{MODEL_NAME} has the {kind} {', '.join(sorted(real))}, but the manifest lists "
                f"{', '.join(sorted(listed))}. Convert again."
            )
        of_name = {value.name: value for value in values}
        for spec in specs:
            value = of_name[spec.name]
            fits = spec.dtype == _DTYPES.get(value.type, value.type[len("tensor(") : -1])
            # ONNX Runtime does not know the shape of every output.
            if not fits or (kind == "inputs" and not _same_shape(spec.shape, value.shape)):
                raise IntegrityError(
                    f"{MODEL_NAME} has {spec.name!r} as {value.type} of shape {value.shape}, but "
                    f"the manifest lists {spec.dtype} of shape {list(spec.shape)}. Convert again."
                )


def _same_shape(listed: Sequence[int | str], real: Sequence[int | str | None]) -> bool:
    """Whether the fixed dimensions are the same; names are ours."""
    fixed = [[dim if isinstance(dim, int) else None for dim in shape] for shape in (listed, real)]
    return fixed[0] == fixed[1]


def _execution(
    manifest: Manifest, session: Any, provider: str, threads: int | None, choice: KernelChoice
) -> Execution:
    sites = []
    for record in manifest.sites:
        runs_as, reason = "function body", record.reason
        if record.kernel and choice.library is not None:
            # A node whose name the library registers never runs as a function.
            runs_as = f"kernel {record.kernel} ({choice.library.target})"
        elif record.kernel and choice.reason:
            reason = f"{reason}; {choice.reason}" if reason else choice.reason
        sites.append(
            SiteExecution(
                site=record.site["name"],
                method=record.method,
                operator=record.operator,
                runs_as=runs_as,
                reason=reason,
            )
        )
    return Execution(
        provider=provider_name(provider),
        session_providers=tuple(session.get_providers()),
        onnxruntime=onnxruntime().__version__,
        threads=threads,
        sites=tuple(sites),
    )
