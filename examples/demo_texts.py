"""Write texts that the demo model was never trained on: to plan with, and to judge by.

    python examples/demo_texts.py out/demo-texts

``calibration/`` gets every other held-out file of the standard library, ``test.txt`` the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from train_demo_model import read_corpus, stdlib_root


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    texts = list(read_corpus(stdlib_root(), held_out=True).values())
    calibration = folder / "calibration"
    calibration.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts[::2]):
        (calibration / f"{number:02}.txt").write_text(text, encoding="utf-8")
    (folder / "test.txt").write_text("\n\n\n".join(texts[1::2]), encoding="utf-8")


if __name__ == "__main__":
    main()
