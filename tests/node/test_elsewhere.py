"""``model.onnx`` is a plain file: other ONNX Runtimes run it, without subquad."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import subquad
from subquad.converter.pipeline import convert
from subquad.runtime.manifest import MODEL_NAME
from third_party import building, cache_dir

HERE = Path(__file__).parent
DEMO_MODEL = HERE.parents[1] / "examples" / "demo_model"

NODE_PACKAGE = ("onnxruntime-node", "1.30.0")
LOWEST_ONNXRUNTIME = "1.27.0"
"""What pyproject.toml promises; the wheel that is tested against."""

Arrays = Mapping[str, NDArray[Any]]


FORCE = ("window:size=32@1", "block_sparse:0.5,block=16@2", "elu@3")
"""Layer 0 stays exact. Layers 1 and 3 are variants of one operator: runtimes must tell them apart.
Layer 2 has a loop in its body, and a constant."""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Any:
    output = tmp_path_factory.mktemp("demo") / "artifact"
    convert(DEMO_MODEL, output, force=FORCE)
    return subquad.load(output)


@pytest.fixture(scope="module")
def feeds(artifact: Any) -> dict[str, NDArray[Any]]:
    ids = np.random.default_rng(0).integers(1, 512, (2, 150))
    mask = np.ones_like(ids)
    mask[1, :40] = 0
    by_role = {"token_ids": ids, "padding_mask": mask}
    return {spec.name: by_role[spec.role] for spec in artifact.manifest.inputs}


def check_run(
    command: list[str],
    artifact: Any,
    feeds: Arrays,
    folder: Path,
    environ: Mapping[str, str] | None = None,
) -> None:
    """``command REQUEST.json`` computes what the artifact does here."""
    request: dict[str, Any] = {
        "model": str(artifact.path / MODEL_NAME),
        "output": str(folder),
        "feeds": [],
    }
    for name, array in feeds.items():
        file = folder / f"{name}.bin"
        array.tofile(file)
        request["feeds"].append(
            {"name": name, "dtype": array.dtype.name, "dims": array.shape, "file": str(file)}
        )
    path = folder / "request.json"
    path.write_text(json.dumps(request), "utf-8")
    done = subprocess.run(
        [*command, str(path)], cwd=folder, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    want = artifact.run(feeds)
    assert {item["name"] for item in answer} == set(want)
    for item in answer:
        got = np.fromfile(item["file"], np.float32).reshape(item["dims"])
        # Other versions order float32 sums differently.
        scale = max(1.0, float(np.abs(want[item["name"]]).max()))
        assert np.abs(got - want[item["name"]]).max() <= 1e-4 * scale


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_plain_onnxruntime(artifact: Any, feeds: Arrays, tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(HERE / "run_model.py")]
    check_run(command, artifact, feeds, tmp_path, clean_environment())


@pytest.mark.slow
def test_lowest_supported_onnxruntime(artifact: Any, feeds: Arrays, tmp_path: Path) -> None:
    environment = cache_dir() / f"onnxruntime-{LOWEST_ONNXRUNTIME}"
    if not environment.is_dir():
        with building(environment) as staged:
            venv.create(staged, with_pip=False, symlinks=True)
            install = [sys.executable, "-m", "pip", "--python", str(staged / "bin" / "python")]
            install += ["install", "--quiet", "numpy", f"onnxruntime=={LOWEST_ONNXRUNTIME}"]
            # The repository's constraints pin the version that is developed with.
            environ = {k: v for k, v in os.environ.items() if k != "PIP_CONSTRAINT"}
            subprocess.run(install, check=True, env=environ)
    python = str(environment / "bin" / "python")
    check_run([python, str(HERE / "run_model.py")], artifact, feeds, tmp_path, clean_environment())


@pytest.mark.node
def test_onnxruntime_node(artifact: Any, feeds: Arrays, tmp_path: Path) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.fail("Node.js and npm are needed; deselect this test with -m 'not node'")
    package = "@".join(NODE_PACKAGE)
    folder = cache_dir() / package.replace("@", "-")
    if not folder.is_dir():
        with building(folder) as staged:
            # The package's install script would fetch GPU libraries.
            install = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund"]
            subprocess.run([*install, "--prefix", str(staged), package], check=True)
    environ = os.environ | {"NODE_PATH": str(folder / "node_modules")}
    check_run([node, str(HERE / "run_model.cjs")], artifact, feeds, tmp_path, environ)
