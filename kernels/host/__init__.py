"""Builds TVM kernels into ONNX Runtime custom-op libraries."""
