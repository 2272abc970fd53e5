"""NanoGuard as a user's factory: ``subquad convert tests/models/nanoguard_factory.py:build``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

if "third_party" not in sys.modules:  # outside pytest, which knows the folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import third_party  # noqa: E402


def build() -> tuple[torch.nn.Module, dict[str, Any]]:
    """The module and an example of its inputs."""
    length = 24
    ids = torch.arange(2 * length).reshape(2, length)
    return third_party.nanoguard(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
