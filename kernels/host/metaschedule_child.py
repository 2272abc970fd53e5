"""Ask MetaSchedule what it could search in a kernel: the child process of
``kernels/tuning/metaschedule.py``.

The task is that of ``measure_child.py`` as far as it names a kernel; the result is
``{"spaces": 1, "instructions": 0, "decisions": 0}``.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subquad.kernels.host.compile_child import load_named, make_target, make_variant
from subquad.kernels.kernel import KernelTemplate


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    Path(task["result"]).write_text(json.dumps(_examine(task)), "utf-8")


def _examine(task: Mapping[str, Any]) -> dict[str, int]:
    _load_intrinsics()
    import tvm
    from tvm.s_tir import meta_schedule

    template: KernelTemplate = load_named(task["template"])
    target = make_target(task["target"])
    variant = make_variant(task["variant"], task["fields"])
    function = template.build(variant, target, {})
    tvm_target = {**json.loads(str(target.tvm_target())), "num-cores": task["threads"]}
    context = meta_schedule.TuneContext(
        mod=tvm.IRModule({"main": function}),
        target=tvm.target.Target(tvm_target),
        space_generator="post-order-apply",
        task_name="kernel",
    )
    spaces = context.generate_design_space()
    return {
        "spaces": len(spaces),
        "instructions": sum(len(space.trace.insts) for space in spaces),
        "decisions": sum(len(space.trace.decisions) for space in spaces),
    }


def _load_intrinsics() -> None:
    """Import those of x86 alone: all of ``tvm.s_tir.tensor_intrin`` takes over a minute."""
    import tvm
    import tvm.s_tir

    name = "tvm.s_tir.tensor_intrin"
    package = types.ModuleType(name)
    package.__path__ = [str(Path(tvm.__file__).parent / "s_tir" / "tensor_intrin")]
    sys.modules[name] = package
    tvm.s_tir.tensor_intrin = package
    importlib.import_module(f"{name}.x86")


if __name__ == "__main__":
    main()
