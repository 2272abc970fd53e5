"""Runs an ONNX model with ONNX Runtime and nothing else: ``run_model.py REQUEST.json``.

The request and the answer are those of ``run_model.cjs``.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

request = json.loads(Path(sys.argv[1]).read_text("utf-8"))
session = onnxruntime.InferenceSession(request["model"], providers=["CPUExecutionProvider"])
feeds = {
    feed["name"]: np.fromfile(feed["file"], feed["dtype"]).reshape(feed["dims"])
    for feed in request["feeds"]
}
names = [output.name for output in session.get_outputs()]
described: list[dict[str, object]] = []
for name, value in zip(names, session.run(names, feeds), strict=True):
    file = Path(request["output"]) / f"{len(described)}.bin"
    value.tofile(file)
    described.append({"name": name, "dims": value.shape, "file": str(file)})
assert not {"subquad", "torch", "onnx"} & set(sys.modules)
print(json.dumps(described))
