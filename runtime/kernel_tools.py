"""What it takes to compile kernels for CPUs, and what of it is missing here."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

COMPILERS = ("c++", "g++", "clang++")
TVM_PACKAGE = "apache-tvm"
TVM_SERIES = {TVM_PACKAGE: "0.27", "apache-tvm-ffi": "0.1"}
"""The calling convention of kernel objects (``kernels/host/tvm_abi.h``) is that of these."""

KERNEL_MACHINES = ("x86_64",)
"""``platform.machine()`` of the processors that kernels are compiled for."""

INSTALL = "pip install 'subquad[kernels]'"


def missing_kernel_tools() -> str:
    """Why no CPU kernel can be compiled on this machine; "" if all tools are there."""
    if sys.platform != "linux" or platform.machine() not in KERNEL_MACHINES:
        return (
            f"kernels are built on Linux x86-64 only, this is {sys.platform} {platform.machine()}"
        )
    for package, series in TVM_SERIES.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            return f"{package} is not installed: {INSTALL}"
        if not f"{found}.".startswith(f"{series}."):
            return f"{package} is {found}, kernels need {series}.*: {INSTALL}"
    if compiler() is None:
        return f"no C++ compiler was found ({', '.join(COMPILERS)}, or $CXX)"
    return ""


def compiler() -> str | None:
    """Path of the C++ compiler: ``$CXX`` or the first on the path."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    return next((path for name in candidates if (path := shutil.which(name))), None)
