"""GPU kernels in an artifact: their files, and what each site is told of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subquad.converter.emit import place_files
from subquad.kernels.host.gpu_build import GpuBuild
from subquad.kernels.operator import OperatorVariant
from subquad.runtime.gpu_kernels import INDEX_NAME
from subquad.runtime.manifest import file_record


def template_name(place: str) -> str:
    """``attention.cpu`` for ``subquad.kernels.attention.cpu:TEMPLATE``."""
    return place.partition(":")[0].removeprefix("subquad.kernels.")


def gpu_records(variants: Sequence[OperatorVariant], builds: Sequence[GpuBuild]) -> dict[str, str]:
    """``SiteRecord.gpu_kernels`` of a site; ``variants``: of its nodes, the last its attention."""
    records = {}
    for build in builds:
        keys = [(variant.op_type, variant.overload) for variant in variants]
        reasons = [build.declined[key].reason for key in keys if key in build.declined]
        served = template_name(build.served[keys[-1]]) if keys[-1] in build.served else ""
        records[build.target.name] = f"no kernel: {'; '.join(reasons)}" if reasons else served
    return records


def write_gpu_kernels(builds: Sequence[GpuBuild], folder: Path) -> dict[str, dict[str, Any]]:
    """``kernels/<target>/``: a library per kernel, and the index; returns the file records."""
    files: dict[str, dict[str, Any]] = {}
    for build in builds:
        if not build.libraries:
            continue
        place = f"kernels/{build.target.name}"
        names = {library.symbol: f"{library.symbol}.so" for library in build.libraries}
        files |= place_files(
            folder, {f"{place}/{names[item.symbol]}": item.path for item in build.libraries}
        )
        index = {
            "arch": build.target.arch,
            "shared_memory_per_block": build.target.shared_memory,
            "kernels": [
                {**item.description, "library": names[item.symbol]} for item in build.libraries
            ],
        }
        path = folder / place / INDEX_NAME
        path.write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", "utf-8")
        files[f"{place}/{INDEX_NAME}"] = file_record(path)
    return files
