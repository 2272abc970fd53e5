"""An encoder-decoder as two artifacts in one folder: one runs once, the other per token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from subquad.runtime.artifact import Artifact, load
from subquad.runtime.errors import IntegrityError
from subquad.runtime.kernel_library import KernelMode
from subquad.runtime.manifest import MANIFEST_NAME

ENCODER, DECODER = "encoder", "decoder"


def is_pair(folder: Path) -> bool:
    """Whether ``folder`` holds both."""
    return all((folder / part / MANIFEST_NAME).is_file() for part in (ENCODER, DECODER))


def load_pair(
    folder: Path, *, provider: str, threads: int | None, kernels: KernelMode
) -> tuple[Artifact, Artifact]:
    """Encoder and decoder; arguments and errors as of ``load``."""
    options: dict[str, Any] = {"provider": provider, "threads": threads, "kernels": kernels}
    return load(folder / ENCODER, **options), load(folder / DECODER, **options)


def encode(
    encoder: Artifact, decoder: Artifact, inputs: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """What the decoder reads in every step, by its input names.

    Raises:
        UsageError: the inputs are not those of the encoder.
        IntegrityError: the two do not belong together.
    """
    made = encoder.run(inputs)
    given = {name.replace("present.", "past_key_values.", 1): x for name, x in made.items()}
    if "attention_mask" in inputs:
        given["encoder_attention_mask"] = inputs["attention_mask"]
    wanted = [spec.name for spec in decoder.manifest.inputs if reads_encoder(spec.name)]
    missing = [name for name in wanted if name not in given]
    if missing:
        raise IntegrityError(
            f"{encoder.path} makes no {missing[0]!r}, which {decoder.path} reads. Convert again."
        )
    return {name: given[name] for name in wanted}


def reads_encoder(name: str) -> bool:
    """Whether an input of a decoder comes from the encoder, and is the same in all steps."""
    return f".{ENCODER}." in name or name.startswith(f"{ENCODER}_")
