"""Run a written artifact once beside its reference, in a child process.

A child, so that two sessions never add to the memory of the conversion, and because only a
fresh process shows that the files alone suffice.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from subquad.runtime.errors import UnsupportedModelError

LENGTHS = (5, 11)


def check_artifact(folder: Path) -> dict[str, Any]:
    """Validate ``folder`` at two short lengths; returns the result of ``validate`` as JSON.

    Raises:
        UnsupportedModelError: the artifact does not load, gives non-finite numbers, or an exact
            one differs from its reference.
    """
    command = [sys.executable, "-m", "subquad.converter.check", str(folder)]
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
    """``python -m subquad.converter.check FOLDER``: validate and print JSON."""
    from subquad.runtime.validate import validate

    result = validate(Path(sys.argv[1]), lengths=LENGTHS, metamorphic=False)
    sys.stdout.write(json.dumps(result.to_json()))


if __name__ == "__main__":
    main()
