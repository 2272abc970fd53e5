"""``manifest.json``: what an artifact is, where it came from, and what became of every site."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from subquad.runtime.errors import IntegrityError

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
MODEL_NAME = "model.onnx"
REFERENCE_NAME = "reference.onnx"
DATA_NAME = "model.onnx.data"

InputRole = Literal["token_ids", "padding_mask", "ids", "values", "past"]


@dataclass(frozen=True)
class InputSpec:
    """One graph input.

    Attributes:
        name: graph input name.
        dtype: NumPy dtype name, e.g. ``int64``.
        shape: fixed sizes, or names of dynamic dimensions (``"batch"``, ``"length"``).
        role: ``token_ids`` (vocabulary indices), ``padding_mask`` (0/1, 1 = real token), ``ids``
            (other small indices such as segment ids), ``values`` (floats: pixels, audio), ``past``
            (what an earlier call returned; see ``runtime/past.py``).
        high: exclusive upper bound of valid indices, where known.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    role: InputRole
    high: int | None = None


@dataclass(frozen=True)
class OutputSpec:
    """One graph output.

    Attributes:
        is_logits: the last axis scores the vocabulary of the ``token_ids``.
        past: name of the input that takes it in the next call, "" = none.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    is_logits: bool = False
    past: str = ""


@dataclass(frozen=True)
class SiteRecord:
    """What became of one attention.

    Attributes:
        site: ``AttentionSite.to_json()``.
        method: method applied (``dense`` = exact).
        params: its parameters.
        operator: ``ai.subquad`` operator and overload now in the graph.
        kernel: template of the kernel that serves it, or "" when only its ONNX function body does.
        reason: why no kernel, or why a requested method was declined.
        prepared: operators and overloads of the nodes that prepare its attention.
        causal_granularity: positions are cut into blocks of this many, and changing a token moves
            nothing in a block before its own; 1 = exactly causal. Says nothing of other sites.
        piece_granularity: pieces of a prefill that start at multiples of so many positions make
            the whole; 1 = any pieces do, 0 = none but the whole.
        variants: what ``prepared`` and ``operator`` compute, in this order: ``{"operator": …,
            "fields": {…}, "tuning": {target: {"how": "tuned" | "nearest" | "default", "params":
            {…}, "note": …}}}``: all static choices, and where its kernel's parameters come from.
        gpu_kernels: GPU target -> template of the kernel for it, or ``no kernel: `` and the reason;
            they are beside the graph, see ``runtime/gpu_kernels.py``.
        keeps: what is kept of earlier tokens for the next call, and why no less; "" where every
            call has all tokens.
    """

    site: dict[str, Any]
    method: str
    params: dict[str, Any]
    operator: str
    kernel: str = ""
    reason: str = ""
    prepared: tuple[str, ...] = ()
    causal_granularity: int = 1
    piece_granularity: int = 1
    variants: tuple[dict[str, Any], ...] = ()
    gpu_kernels: dict[str, str] = field(default_factory=dict)
    keeps: str = ""


@dataclass(frozen=True)
class KernelLibrary:
    """One compiled custom-op library of the artifact.

    Attributes:
        target: instruction set, e.g. ``x86-64-v3``.
        platform: e.g. ``linux-x86_64``.
        path: its entry in ``files``.
        flags: what the processor must have, as in ``/proc/cpuinfo``.
    """

    target: str
    platform: str
    path: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The whole file; see the attributes of the parts.

    Attributes:
        files: relative POSIX path -> ``file_record``, for every file but the manifest itself.
        max_length: longest sequence the source accepts, where known.
        kernels: libraries with the kernels of the sites; each has all of them.
        reference_inputs: of ``reference.onnx``, where they are others than ``inputs``.
    """

    source: dict[str, Any]
    versions: dict[str, str]
    seed: int
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    sites: tuple[SiteRecord, ...]
    rejections: tuple[dict[str, str], ...]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION
    max_length: int | None = None
    kernels: tuple[KernelLibrary, ...] = ()
    reference_inputs: tuple[InputSpec, ...] = ()

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
        except (FileNotFoundError, NotADirectoryError) as error:
            raise IntegrityError(
                f"{folder} is not a subquad artifact: {MANIFEST_NAME} is missing. "
                "Pass the directory that `subquad convert` wrote."
            ) from error
        except OSError as error:
            raise IntegrityError(f"{path} cannot be read: {error.strerror}.") from error
        # RecursionError: brackets nested deeper than the parser's stack.
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"{path} is not valid JSON: {error}. Convert again.") from error
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if type(version) is not int or version != SCHEMA_VERSION:
            raise IntegrityError(
                f"{path}: schema_version {version!r}, but this subquad reads {SCHEMA_VERSION}. "
                "Convert again with this version."
            )
        try:
            return _parse(raw)
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise IntegrityError(f"{path}: malformed field: {what}. Convert again.") from error


def file_record(path: Path) -> dict[str, Any]:
    """The ``files`` entry of one file: ``{"size": bytes, "sha256": hex}``, read as a stream."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"size": stream.tell(), "sha256": digest}


def _parse(raw: dict[str, Any]) -> Manifest:
    """Build the manifest; ``KeyError``, ``TypeError`` or ``ValueError`` name the bad field."""
    max_length = raw.get("max_length")
    if max_length is not None:
        if _expect(max_length, int, "max_length") < 1:
            raise ValueError(f"max_length is {max_length}")
    files = _expect(raw["files"], dict, "files")
    for name, entry in files.items():
        _expect(entry, dict, f"files[{name!r}]")
        size = _expect(entry["size"], int, f"files[{name!r}].size")
        digest = _expect(entry["sha256"], str, f"files[{name!r}].sha256")
        if size < 0 or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise ValueError(f"files[{name!r}] needs a size >= 0 and a sha256 in lower-case hex")
    return Manifest(
        source=_expect(raw["source"], dict, "source"),
        versions=_expect(raw["versions"], dict, "versions"),
        seed=_expect(raw["seed"], int, "seed"),
        inputs=tuple(_parse_input(item) for item in _expect(raw["inputs"], list, "inputs")),
        outputs=tuple(_parse_output(item) for item in _expect(raw["outputs"], list, "outputs")),
        sites=tuple(_parse_site(item) for item in _expect(raw["sites"], list, "sites")),
        rejections=tuple(
            _parse_rejection(item) for item in _expect(raw["rejections"], list, "rejections")
        ),
        files=files,
        schema_version=raw["schema_version"],
        max_length=max_length,
        kernels=tuple(
            _parse_library(item) for item in _expect(raw.get("kernels", []), list, "kernels")
        ),
        reference_inputs=tuple(
            _parse_input(item)
            for item in _expect(raw.get("reference_inputs", []), list, "reference_inputs")
        ),
    )


def _parse_rejection(item: object) -> dict[str, str]:
    fields: dict[str, str] = _expect(item, dict, "rejections[]")
    for key in ("reason", "where"):
        _expect(fields[key], str, f"rejections[].{key}")
    return fields


def _parse_input(item: object) -> InputSpec:
    fields = _signature_fields(item, "inputs")
    role = fields["role"]
    if role not in get_args(InputRole):
        raise ValueError(f"inputs[{fields['name']!r}].role is {role!r}")
    if fields.get("high") is not None:
        high = _expect(fields["high"], int, f"inputs[{fields['name']!r}].high")
        if not 1 <= high < 2**63:
            raise ValueError(f"inputs[{fields['name']!r}].high is {high}")
    return InputSpec(**fields)


def _parse_output(item: object) -> OutputSpec:
    fields = _signature_fields(item, "outputs")
    _expect(fields.get("is_logits", False), bool, f"outputs[{fields['name']!r}].is_logits")
    _expect(fields.get("past", ""), str, f"outputs[{fields['name']!r}].past")
    return OutputSpec(**fields)


def _signature_fields(item: object, where: str) -> dict[str, Any]:
    fields: dict[str, Any] = _expect(item, dict, f"{where}[]")
    name = _expect(fields["name"], str, f"{where}[].name")
    _expect(fields["dtype"], str, f"{where}[{name!r}].dtype")
    shape = _expect(fields["shape"], list, f"{where}[{name!r}].shape")
    for dim in shape:
        if isinstance(dim, bool) or not isinstance(dim, int | str):
            raise TypeError(f"{where}[{name!r}].shape holds {dim!r}")
    return {**fields, "shape": tuple(shape)}


def _parse_site(item: object) -> SiteRecord:
    fields: dict[str, Any] = _expect(item, dict, "sites[]")
    site = _expect(fields["site"], dict, "sites[].site")
    for key, kind in _SITE_FIELDS.items():
        _expect(site[key], kind, f"sites[].site.{key}")
    for key, kind in _MASK_FIELDS.items():
        _expect(site["mask"][key], kind, f"sites[].site.mask.{key}")
    for key in ("method", "operator"):
        _expect(fields[key], str, f"sites[].{key}")
    for key in ("kernel", "reason", "keeps"):
        _expect(fields.get(key, ""), str, f"sites[].{key}")
    _expect(fields["params"], dict, "sites[].params")
    prepared = _expect(fields.get("prepared", []), list, "sites[].prepared")
    prepared = tuple(_expect(name, str, "sites[].prepared[]") for name in prepared)
    for key, least in (("causal_granularity", 1), ("piece_granularity", 0)):
        if _expect(fields.get(key, 1), int, f"sites[].{key}") < least:
            raise ValueError(f"sites[].{key} must be at least {least}")
    for target, text in _expect(fields.get("gpu_kernels", {}), dict, "sites[].gpu_kernels").items():
        _expect(text, str, f"sites[].gpu_kernels[{target!r}]")
    variants = _expect(fields.get("variants", []), list, "sites[].variants")
    variants = tuple(_parse_variant(item) for item in variants)
    return SiteRecord(**{**fields, "prepared": prepared, "variants": variants})


def _parse_variant(item: object) -> dict[str, Any]:
    fields: dict[str, Any] = _expect(item, dict, "sites[].variants[]")
    _expect(fields["operator"], str, "sites[].variants[].operator")
    for key in ("fields", "tuning"):
        _expect(fields[key], dict, f"sites[].variants[].{key}")
    return fields


def _parse_library(item: object) -> KernelLibrary:
    fields: dict[str, Any] = _expect(item, dict, "kernels[]")
    for key in ("target", "platform", "path"):
        _expect(fields[key], str, f"kernels[].{key}")
    flags = [_expect(flag, str, "kernels[].flags[]") for flag in _expect(fields["flags"], list, "")]
    return KernelLibrary(**{**fields, "flags": tuple(flags)})


# The fields of a site that the runtime reads.
_SITE_FIELDS: Mapping[str, type] = {
    "name": str,
    "index": int,
    "is_self": bool,
    "mask": dict,
    "output": str,
    "source_output": str,
    "num_heads": int,
    "value_dim": int,
}
_MASK_FIELDS: Mapping[str, type] = {"window_left": int, "window_right": int}


def _expect(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{where} must be {kind.__name__}, got {type(value).__name__}")
    return value
