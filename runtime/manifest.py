"""``manifest.json``: what an artifact is, where it came from, and what became of every site."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from subquad.runtime.errors import IntegrityError

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
MODEL_NAME = "model.onnx"
REFERENCE_NAME = "reference.onnx"
DATA_NAME = "model.onnx.data"

InputRole = Literal["token_ids", "padding_mask", "ids", "values"]


@dataclass(frozen=True)
class InputSpec:
    """One graph input.

    Attributes:
        name: graph input name.
        dtype: NumPy dtype name, e.g. ``int64``.
        shape: fixed sizes, or names of dynamic dimensions (``"batch"``, ``"length"``).
        role: ``token_ids`` (vocabulary indices), ``padding_mask`` (0/1, 1 = real token), ``ids``
            (other small indices such as segment ids), ``values`` (floats: pixels, audio).
        high: exclusive upper bound of valid indices, where known.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    role: InputRole
    high: int | None = None


@dataclass(frozen=True)
class OutputSpec:
    """One graph output. ``is_logits``: last axis scores the vocabulary of the ``token_ids``."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    is_logits: bool = False


@dataclass(frozen=True)
class SiteRecord:
    """What became of one attention.

    Attributes:
        site: ``AttentionSite.to_json()``.
        method: method applied (``dense`` = exact).
        params: its parameters.
        operator: ``ai.subquad`` operator and overload now in the graph.
        kernel: kernel that serves it, or "" when its ONNX function body runs.
        reason: why no kernel, or why a requested method was declined.
    """

    site: dict[str, Any]
    method: str
    params: dict[str, Any]
    operator: str
    kernel: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Manifest:
    """The whole file; see the attributes of the parts."""

    source: dict[str, Any]
    versions: dict[str, str]
    seed: int
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    sites: tuple[SiteRecord, ...]
    rejections: tuple[dict[str, str], ...]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def dump(self, path: Path) -> None:
        """Write as stable, sorted JSON."""
        path.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n", "utf-8")

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read ``folder/manifest.json``.

        Raises:
            IntegrityError: missing, not JSON, wrong schema version or wrong fields.
        """
        path = folder / MANIFEST_NAME
        try:
            raw = json.loads(path.read_text("utf-8"))
        except FileNotFoundError as error:
            raise IntegrityError(
                f"{folder} is not a subquad artifact: {MANIFEST_NAME} is missing. "
                "Pass the directory that `subquad convert` wrote."
            ) from error
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise IntegrityError(f"{path} is not valid JSON: {error}. Convert again.") from error
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if version != SCHEMA_VERSION:
            raise IntegrityError(
                f"{path}: schema_version {version!r}, but this subquad reads {SCHEMA_VERSION}. "
                "Convert again with this version."
            )
        try:
            return Manifest(
                source=raw["source"],
                versions=raw["versions"],
                seed=raw["seed"],
                inputs=tuple(
                    InputSpec(**{**item, "shape": tuple(item["shape"])}) for item in raw["inputs"]
                ),
                outputs=tuple(
                    OutputSpec(**{**item, "shape": tuple(item["shape"])}) for item in raw["outputs"]
                ),
                sites=tuple(SiteRecord(**item) for item in raw["sites"]),
                rejections=tuple(raw["rejections"]),
                files=raw["files"],
                schema_version=version,
            )
        except (KeyError, TypeError) as error:
            raise IntegrityError(f"{path}: malformed field: {error}. Convert again.") from error
