"""Does the cost table put what may run in the right order, at lengths where it was not measured?

    python benchmarks/cost_ranking.py --shape 12/12/64 --threads 2 --lengths 1024 4096
    python benchmarks/cost_ranking.py --artifact out --table costs.json

Measures afresh half-way between the lengths (or at ``--at``), compares with what the table says,
and prints the rank correlation (the worst of all lengths and numbers of threads), the worst
inversion (two candidates in the wrong order, and by how much) and the median error. Without
``--table`` the table of this machine is used, or measured first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from subquad.passes.cost_measurement import (
    CostPlan,
    between,
    candidates_of,
    check_ranking,
    example_sites,
    measure_costs,
    sites_of,
)
from subquad.passes.costs import CostTable
from subquad.runtime.errors import Rejection
from subquad.runtime.jsonable import json_ready
from subquad.runtime.machine import usable_cores


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", type=Path, help="its attentions")
    parser.add_argument("--shape", default="12/12/64", help="HEADS/KV_HEADS/DIM, without artifact")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--at", type=int, nargs="+", help="lengths that are measured afresh")
    parser.add_argument("--threads", type=int, nargs="+", default=[usable_cores()])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--time", type=float, default=600.0, help="seconds for each of the two")
    args = parser.parse_args(arguments)
    sites = sites_of(args.artifact) if args.artifact else example_sites(args.shape)
    plan = CostPlan(
        tuple(variant for site in sites for variant in candidates_of(site)),
        lengths=tuple(args.lengths),
        threads=tuple(args.threads),
        rounds=args.rounds,
        seconds=args.time,
    )

    def say(text: str, share: float | None) -> None:
        print(text, file=sys.stderr, flush=True)

    found = CostTable.load(args.table) if args.table else CostTable.find()
    if isinstance(found, Rejection) or not all(
        found.covers(variant, threads) for variant in plan.variants for threads in plan.threads
    ):
        print("measuring the table first", file=sys.stderr)
        found = measure_costs(plan, say)
    fresh = CostPlan(
        plan.variants,
        lengths=tuple(args.at) if args.at else between(args.lengths),
        threads=plan.threads,
        rounds=args.rounds,
        seconds=args.time,
    )
    print(json.dumps(json_ready(check_ranking(found, fresh, say)), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
