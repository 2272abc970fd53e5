"""What recognition makes of one export: which attentions are raised, how proved, how exact.

A result is kept in ``$SUBQUAD_CACHE/zoo/cells`` under a name made of the export, the code that
recognises and the versions it runs on: nothing is measured twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnx_graphs import Runner
from subquad.converter.onnx_source import trace_onnx
from subquad.passes.canonicalise import canonicalise
from subquad.passes.raise_attention import raise_attention
from subquad.passes.recognise.site import AttentionSite
from subquad.passes.recognise.subgraph import ORT_ERRORS
from subquad.runtime.errors import SubquadError
from subquad.runtime.jsonable import json_ready
from zoo.exports import Arrays, ExportError, cache_folder, export, key_of
from zoo.families import FAMILIES

ROOT = Path(__file__).parents[3]
# What a result depends on, beside the export itself.
_CODE = (
    "passes/recognise",
    "passes/raise_attention.py",
    "passes/attention_nodes.py",
    "passes/canonicalise.py",
    "converter/onnx_source.py",
    "converter/simplify.py",
    "kernels/attention",
    "kernels/band.py",
    "kernels/body.py",
    "tests/support/zoo/measure.py",
)
_PACKAGES = ("onnxruntime", "onnx-ir", "onnxscript", "onnx", "numpy")


@dataclass(frozen=True)
class Cell:
    """One export and what became of it.

    Attributes:
        family, exporter: which.
        sites: attentions in the model.
        softmaxes: attention operators and softmaxes in the exported graph.
        raised: name of each raised attention -> what was proved of it.
        proofs: what was proved -> how.
        declined: node -> reason (softmaxes that are no attention included).
        source_error: largest difference between raised and exported graph at real tokens,
            relative to the largest value; None where ONNX Runtime cannot run the exported graph.
        eager_error: between raised graph and the torch model in eager mode.
        export_error: between exported graph and the torch model.
        failure: why there is nothing to recognise.
        note: what else went wrong.
    """

    family: str
    exporter: str
    sites: int
    softmaxes: int = 0
    raised: dict[str, str] = field(default_factory=dict)
    proofs: dict[str, str] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)
    source_error: float | None = None
    eager_error: float | None = None
    export_error: float | None = None
    failure: str = ""
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        raw: dict[str, Any] = json_ready(asdict(self))
        # Two digits: the others change with every version of the runtime.
        return {k: float(f"{v:.1e}") if isinstance(v, float) else v for k, v in raw.items()}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Cell:
        numbers = {k: float(v) for k, v in raw.items() if k.endswith("_error") and v is not None}
        return Cell(**{**raw, **numbers})


def measured(family: str, exporter: str) -> Cell:
    """The result from the cache, or measured now."""
    path = cell_file(family, exporter)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(measure(family, exporter).to_json(), allow_nan=False)
        part = path.with_suffix(".part")
        part.write_text(text, "utf-8")
        part.replace(path)
    return Cell.from_json(json.loads(path.read_text("utf-8")))


def cell_file(family: str, exporter: str) -> Path:
    return cache_folder() / "cells" / f"{key_of(family, exporter)}_{_code_key()}.json"


@cache
def _code_key() -> str:
    digest = hashlib.sha256()
    for place in _CODE:
        files = [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))
        for file in files:
            digest.update(file.read_bytes())
    for package in _PACKAGES:
        digest.update(version(package).encode())
    return digest.hexdigest()[:10]


def measure(family: str, exporter: str) -> Cell:
    """Export (or take from the cache), recognise, run."""
    sites = FAMILIES[family].sites
    try:
        exported = export(family, exporter)
        traced = trace_onnx(exported.path)
    except (ExportError, SubquadError) as error:
        return Cell(family, exporter, sites, failure=str(error))
    model = traced.model
    canonicalise(model)
    softmaxes = sum(_is_anchor(node) for node in model.graph.all_nodes())
    result = raise_attention(model)
    graphs = {"exported": _Outputs(traced.reference), "raised": _Outputs(model)}
    errors: list[float | None] = [None, None, None]
    for feeds, eager in exported.samples:
        real = real_tokens(feeds, eager)
        graph, raised = (graphs[name].of(feeds) for name in ("exported", "raised"))
        pairs = ((raised, graph), (raised, eager), (graph, eager))
        errors = [
            e if a is None or b is None else max(e or 0.0, relative(a, b, real))
            for e, (a, b) in zip(errors, pairs, strict=True)
        ]
    failed = [f"ONNX Runtime fails on the {n} graph: {g.failure}" for n, g in graphs.items()]
    return Cell(
        family,
        exporter,
        sites,
        softmaxes,
        raised={site.name: meaning(site) for site in result.sites},
        proofs={meaning(site): how(site) for site in result.sites},
        declined={rejection.where: rejection.reason for rejection in result.rejections},
        source_error=errors[0],
        eager_error=errors[1],
        export_error=errors[2],
        note="; ".join(f for f, g in zip(failed, graphs.values(), strict=True) if g.failure),
    )


class _Outputs:
    """First outputs of a model, or why ONNX Runtime gives none."""

    def __init__(self, model: ir.Model) -> None:
        self.failure = ""
        self._model = model
        self._runner: Runner | None = None

    def of(self, feeds: Arrays) -> NDArray[Any] | None:
        if self.failure:
            return None
        try:
            self._runner = self._runner or Runner(self._model)
            return self._runner(feeds)[0]
        except ORT_ERRORS as error:
            self.failure = str(error).strip().splitlines()[0].split(" was false. ")[-1][:200]
            return None


def _is_anchor(node: ir.Node) -> bool:
    return node.op_type == "Softmax" or node.op_type.endswith("Attention")


def meaning(site: AttentionSite) -> str:
    return site.describe() + ("" if site.is_self else " (cross)")


def how(site: AttentionSite) -> str:
    """The derivation of the mask, and why what else is added is no mask."""
    biases = dict.fromkeys(f"not proved to be a mask: {bias.reason}" for bias in site.biases)
    return "; ".join([site.proof.mask, *biases])


def real_tokens(feeds: Arrays, output: NDArray[np.float32]) -> NDArray[np.bool_] | slice:
    """Which positions of the output are compared: padding slots hold nothing of meaning."""
    mask = feeds.get("attention_mask")
    real = mask > 0 if mask is not None else ~feeds["hidden"] if "hidden" in feeds else None
    return real if real is not None and output.shape[:2] == real.shape else slice(None)


def relative(
    got: NDArray[Any], want: NDArray[Any], real: NDArray[np.bool_] | slice = slice(None)
) -> float:
    if got.shape != want.shape:
        return float("inf")
    got, want = got[real], want[real]
    error = float(np.abs(got - want).max() / np.abs(want).max())
    return error if np.isfinite(error) else float("inf")
