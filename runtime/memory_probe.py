"""``python -m subquad.runtime.memory_probe TASK``: the child process of ``bench``.

Prints the peak resident memory in bytes as JSON.
"""

from __future__ import annotations

import json
import sys

from subquad.runtime.bench import run_alone
from subquad.runtime.machine import peak_rss_bytes


def main() -> None:
    """Run the task and report."""
    run_alone(json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps(peak_rss_bytes()))


if __name__ == "__main__":
    main()
