"""The exact artifact that planning works on, and the way back from it to a traced model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from subquad.converter.cpu_kernels import KernelKind, chosen_kernels
from subquad.converter.pipeline import convert, parse_required, require_raised
from subquad.converter.source_hash import hash_files
from subquad.converter.traced import TracedModel
from subquad.converter.work_folder import WorkFolder, key_of
from subquad.passes.raise_attention import RaisedSites
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime import onnx_wire
from subquad.runtime.artifact import check_files
from subquad.runtime.errors import IntegrityError, Rejection
from subquad.runtime.manifest import (
    DATA_NAME,
    MANIFEST_NAME,
    MODEL_NAME,
    REFERENCE_NAME,
    Manifest,
)

if TYPE_CHECKING:
    from subquad.converter.pipeline import Source

Progress = Callable[[str, float | None], None]

_OURS = frozenset({MODEL_NAME, REFERENCE_NAME, DATA_NAME, MANIFEST_NAME})


def base_artifact(
    source: Source,
    work: WorkFolder,
    *,
    kernels: KernelKind | None = None,
    require_sites: str | None = None,
    progress: Progress | None = None,
) -> tuple[Path, Manifest]:
    """The exact artifact of ``source``, made once per content of the source.

    A Python object or factory has no content that could be read without running it: it is traced
    each time, and later stages know its weights by their hash.

    Args:
        source, require_sites, kernels: as ``convert``.
        work: holds the artifact, and had it before if the same was asked.

    Raises:
        as ``convert``.
    """
    needed = parse_required(require_sites)
    kind = chosen_kernels(kernels)
    fingerprint = _fingerprint(source)
    if fingerprint is not None:
        facts = {"source": fingerprint, "name": str(source), "kernels": kind}
        folder = work.path / f"base-{key_of(facts)}"
        known = _intact(folder)
        if known is not None:
            require_raised(_raised(known), needed)
            return folder, known
    else:
        folder = work.path / "base"
    convert(
        source,
        folder,
        overwrite=True,
        kernels=kind,
        require_sites=require_sites,
        progress=progress,
    )
    return folder, Manifest.read(folder)


def reopen(folder: Path, manifest: Manifest) -> tuple[TracedModel, RaisedSites]:
    """The raised model of an exact artifact, as it was before it was written.

    Weights stay in the artifact's data file, which must outlive the model.
    """
    companions = sorted(set(manifest.files) - _OURS)
    traced = TracedModel(
        model=ir.load(folder / MODEL_NAME),
        reference=ir.load(folder / REFERENCE_NAME),
        kind=manifest.source["kind"],
        source_name=manifest.source["name"],
        source_hash=manifest.source["hash"],
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        companions=tuple(folder / name for name in companions),
        max_length=manifest.max_length,
    )
    return traced, _raised(manifest)


def content_hash(manifest: Manifest) -> str:
    """Of graph and weights."""
    digest = hashlib.sha256()
    for name in (MODEL_NAME, DATA_NAME):
        digest.update(manifest.files[name]["sha256"].encode())
    return digest.hexdigest()


def _raised(manifest: Manifest) -> RaisedSites:
    return RaisedSites(
        tuple(AttentionSite.from_json(record.site) for record in manifest.sites),
        tuple(Rejection(item["reason"], where=item["where"]) for item in manifest.rejections),
    )


def _intact(folder: Path) -> Manifest | None:
    """The manifest, if the artifact is there and whole."""
    try:
        manifest = Manifest.read(folder)
        check_files(folder, manifest)
    except IntegrityError:
        return None
    return manifest


def _fingerprint(source: Source) -> str | None:
    """Hash of the files of a source; ``None`` if it is no file."""
    if not isinstance(source, (str, Path)):
        return None
    path = Path(source)
    if path.is_dir():
        files = {
            file.relative_to(path).as_posix(): file
            for file in path.rglob("*")
            if file.is_file() and not any(part.startswith(".") for part in file.parts[-1:])
        }
        return hash_files(files)
    if not path.is_file():
        return None
    files = {path.name: path}
    try:
        locations = onnx_wire.external_locations(path.read_bytes())
    except ValueError:
        return None  # no ONNX file: tracing will say so
    for location in locations:
        if (path.parent / location).is_file():
            files[location] = path.parent / location
    return hash_files(files)
