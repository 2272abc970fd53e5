"""Run a written artifact once beside its reference, in a child process.

A child, so that two sessions never add to the memory of the conversion, and because only a
fresh process shows that the files alone suffice.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from subquad.converter.source_sample import compare, save
from subquad.runtime.errors import UnsupportedModelError
from subquad.runtime.manifest import REFERENCE_NAME

LENGTHS = (5, 11)


def check_artifact(
    folder: Path,
    sample_inputs: Mapping[str, NDArray[Any]],
    sample_outputs: Mapping[str, NDArray[Any]],
) -> dict[str, Any]:
    """Validate ``folder`` at two short lengths; returns the result of ``validate`` as JSON.

    With a sample of the source, its reference must give the source's own outputs; the largest
    relative error is added as ``source_error``.

    Raises:
        UnsupportedModelError: the artifact does not load, gives non-finite numbers, an exact one
            differs from its reference, or the reference from the source.
    """
    with tempfile.TemporaryDirectory(prefix="subquad-check-") as scratch:
        command = [sys.executable, "-m", "subquad.converter.check", str(folder)]
        if sample_outputs:
            path = Path(scratch, "sample.npz")
            save(path, sample_inputs, sample_outputs)
            command.append(str(path))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"exit status {done.returncode}"
        raise UnsupportedModelError(
            f"The converted model failed its own check and was discarded: {reason}"
        )
    result: dict[str, Any] = json.loads(done.stdout)
    if result["verdict"] == "fail":
        raise UnsupportedModelError(
            "The converted model differs from its reference and was discarded: "
            + " ".join(result["reasons"])
        )
    return result


def main() -> None:
    """``python -m subquad.converter.check FOLDER [SAMPLE]``: validate and print JSON."""
    from subquad.runtime.validate import validate

    folder = Path(sys.argv[1])
    # First, and on its own: two sessions are enough for the memory.
    errors = {}
    if len(sys.argv) > 2:
        errors["source_error"] = compare(folder, REFERENCE_NAME, Path(sys.argv[2]))
    result = validate(folder, lengths=LENGTHS, metamorphic=False)
    # Without the folder: it is about to be renamed.
    found = {key: value for key, value in result.to_json().items() if key != "artifact"}
    sys.stdout.write(json.dumps(found | errors))


if __name__ == "__main__":
    main()
