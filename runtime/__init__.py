"""Load, run, validate and benchmark artifacts: NumPy and ONNX Runtime only."""
