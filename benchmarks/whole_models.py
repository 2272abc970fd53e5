"""Whole models: exact artifacts, the plain export and torch, on the same tokens.

Each contestant has a process of its own. Outputs are compared with the torch model in float64 on
few tokens first. Artifacts are converted once and kept, under a name with the hash of the code that
made them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from contestants import Prepared

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "support"))

Kind = Literal["artifact", "functions", "export", "torch", "torch float64", "torch.compile"]

CHECK_LENGTH = 200
"""Tokens of the comparison with float64."""

TEXT = ("argparse.py", "typing.py", "inspect.py", "tarfile.py", "ast.py")
"""Of the standard library: what the models read."""


@dataclass(frozen=True)
class ModelEntry:
    """One contestant: the source model, or an artifact made by one method."""

    label: str
    kind: Kind
    method: str = "dense"
    slow_start: bool = False

    @property
    def exact(self) -> bool:
        return self.method == "dense"

    @property
    def ours(self) -> bool:
        return self.kind in ("artifact", "functions")


@dataclass(frozen=True)
class Model:
    """A model and what is measured on it.

    Attributes:
        source: its Hugging Face folder, downloaded if it has to be.
        is_decoder: returns logits of all positions.
        real: share of the tokens that are real, the others being padding on the right.
        slow: leave out of the default set.
    """

    name: str
    title: str
    source: Callable[[], Path]
    is_decoder: bool
    entries: tuple[ModelEntry, ...]
    lengths: tuple[int, ...]
    batch: int = 1
    real: float = 1.0
    slow: bool = False


def _third_party(name: str) -> Callable[[], Path]:
    def fetch() -> Path:
        import third_party

        folder: Path = getattr(third_party, name)()
        return folder

    return fetch


OURS = (
    ModelEntry("exact, kernels", "artifact"),
    ModelEntry("exact, functions", "functions"),
)
SOURCES = (
    ModelEntry("plain export", "export"),
    ModelEntry("torch", "torch"),
    ModelEntry("torch.compile", "torch.compile", slow_start=True),
)

MODELS: tuple[Model, ...] = (
    Model(
        "demo",
        "demo model, prefill",
        lambda: ROOT / "examples" / "demo_model",
        True,
        (*OURS, *SOURCES, ModelEntry("window 512, kernels", "artifact", "window:size=512")),
        (512, 2048, 4096),
    ),
    Model(
        "minilm",
        "MiniLM-L6, batch of 8, half of the tokens padding",
        _third_party("minilm_l6"),
        False,
        OURS + SOURCES,
        (128, 512),
        batch=8,
        real=0.5,
    ),
    Model(
        "smollm2",
        "SmolLM2-135M, prefill",
        _third_party("smollm2"),
        True,
        OURS + SOURCES,
        (1024, 4096, 8000),
        slow=True,
    ),
)


# The parent: artifacts, and specs for the children.


def artifact(model: Model, method: str, *, kernels: bool) -> Path:
    """The artifact of a method, converted now or before."""
    import third_party

    name = f"{model.name}-{method.replace(':', '-')}-{'cpu' if kernels else 'none'}-{_code_hash()}"
    target: Path = third_party.cache_dir() / "benchmarks" / name
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "subquad", "convert"]
        command += [str(model.source()), str(target), "--force", method]
        command += ["--kernels", "cpu" if kernels else "none"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{model.name}: conversion failed: {done.stderr.strip()}")
    return target


@cache
def _code_hash() -> str:
    digest = hashlib.sha256()
    for folder in ("converter", "passes", "kernels", "runtime"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cc", ".h"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def spec_of(model: Model, entry: ModelEntry, length: int, threads: int) -> dict[str, Any]:
    """What the child opens; converts if it has to."""
    # The functions of an artifact do not depend on its kernels.
    kernels = importlib.util.find_spec("tvm") is not None
    method = entry.method if entry.ours else "dense"
    needs_artifact = entry.ours or entry.kind == "export"
    folder = str(artifact(model, method, kernels=kernels)) if needs_artifact else None
    return {
        "kind": "model",
        "how": entry.kind,
        "artifact": folder,
        "source": str(model.source()),
        "is_decoder": model.is_decoder,
        "length": length,
        "batch": model.batch,
        "real": model.real,
        "threads": threads,
    }


def check_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The same contestant on few tokens."""
    return {**spec, "length": min(CHECK_LENGTH, spec["length"]), "batch": 1}


# The child.

_OPEN: dict[tuple[Any, ...], Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]] = {}


def prepare(spec: Mapping[str, Any]) -> Prepared:
    """One contestant on the first tokens of the text; output ``[batch, length, width]``."""
    key = spec["how"], spec["artifact"], spec["source"], spec["threads"]
    if key not in _OPEN:
        opener = _open_torch if spec["how"].startswith("torch") else _open_artifact
        _OPEN[key] = opener(spec)
    run = _OPEN[key]
    ids = _tokens(Path(spec["source"]), spec["length"], spec["batch"])
    mask = np.tile(
        np.arange(spec["length"]) < max(1, int(spec["length"] * spec["real"])), (spec["batch"], 1)
    )
    kept: list[Any] = [None]

    def call() -> None:
        kept[0] = None
        kept[0] = run(ids, mask.astype(np.int64))

    return Prepared(call, lambda: kept[0])


def _tokens(source: Path, length: int, batch: int) -> NDArray[np.int64]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    library = Path(sysconfig.get_path("stdlib"))
    text = "".join((library / name).read_text("utf-8") for name in TEXT)
    ids = np.array(tokenizer.encode(text).ids, dtype=np.int64)
    if len(ids) < length:
        raise ValueError(f"the text has {len(ids)} tokens only, {length} are needed")
    # Each row starts elsewhere.
    return np.stack([np.roll(ids, -row * 97)[:length] for row in range(batch)])


def _open_artifact(spec: Mapping[str, Any]) -> Callable[..., NDArray[Any]]:
    from subquad.runtime.kernel_library import choose_kernels
    from subquad.runtime.manifest import MODEL_NAME, REFERENCE_NAME, Manifest
    from subquad.runtime.session import TURNS, open_session, run_session

    folder = Path(spec["artifact"]).resolve()
    manifest = Manifest.read(folder)
    libraries: tuple[Path, ...] = ()
    if spec["how"] == "artifact":
        libraries = choose_kernels(folder, manifest, spec.get("kernels", "require")).paths
    file = REFERENCE_NAME if spec["how"] == "export" else MODEL_NAME
    session = open_session(
        folder / file, folder=folder, threads=spec["threads"], config=TURNS, libraries=libraries
    )
    output = next(o.name for o in manifest.outputs if o.is_logits == spec["is_decoder"])

    def run(ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        by_role = {"token_ids": ids, "padding_mask": mask, "ids": np.zeros_like(ids)}
        feeds = {item.name: by_role[item.role] for item in manifest.inputs}
        result: NDArray[np.float32] = run_session(session, feeds, [output])[0]
        return result

    return run


def _open_torch(spec: Mapping[str, Any]) -> Callable[..., NDArray[Any]]:
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    torch.set_num_threads(spec["threads"])
    factory: Any = AutoModelForCausalLM if spec["is_decoder"] else AutoModel
    model = factory.from_pretrained(
        spec["source"],
        dtype=torch.float64 if spec["how"] == "torch float64" else torch.float32,
        attn_implementation="sdpa",
    )
    model.eval().requires_grad_(False)
    forward = torch.compile(model) if spec["how"] == "torch.compile" else model
    options = {"use_cache": False} if spec["is_decoder"] else {}

    def run(ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[Any]:
        with torch.inference_mode():
            result = forward(
                input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), **options
            )
        array: NDArray[Any] = (result.logits if spec["is_decoder"] else result[0]).numpy()
        return array

    return run
