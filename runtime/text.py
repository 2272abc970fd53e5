"""Text in and out, by the ``tokenizer.json`` of an artifact and the ``tokenizers`` package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subquad.runtime.errors import UsageError

TOKENIZER_NAME = "tokenizer.json"


class Tokenizer:
    """A tokenizer of an artifact; made by ``load``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The file may carry the padding and truncation of the training run.
        tokenizer.no_padding()
        tokenizer.no_truncation()

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """Read ``folder/tokenizer.json``.

        Raises:
            UsageError: the artifact has no tokenizer, or the ``text`` extra is not installed.
        """
        path = folder / TOKENIZER_NAME
        if not path.is_file():
            raise UsageError(
                f"{folder} has no {TOKENIZER_NAME}, so it cannot read text. Pass a .npz file with "
                "one array per input."
            )
        try:
            import tokenizers
        except ModuleNotFoundError as error:
            raise UsageError(
                "Text needs the tokenizers package: pip install 'subquad[text]'."
            ) from error
        try:
            content = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
        # A file it cannot parse raises plain Exception, which we do not catch: the file's hash is
        # verified, so the tokenizer is newer than the installed package, as the message says.
        return Tokenizer(tokenizers.Tokenizer.from_str(content))

    def encode(self, text: str, *, limit: int | None = None) -> list[int]:
        """Token ids with special tokens; at most ``limit``, the closing special ones kept.

        Raises:
            UsageError: the text holds what is no character, as a command line can that is no UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"A text holds what is no character: {error}. Use UTF-8.") from error
        if limit is None:
            return list(self._tokenizer.encode(text).ids)
        self._tokenizer.enable_truncation(limit)
        try:
            # It is ignored below the number of special tokens.
            return list(self._tokenizer.encode(text).ids)[:limit]
        finally:
            self._tokenizer.no_truncation()

    def spell(self, text: str) -> list[int]:
        """Token ids of ``text`` alone, without special tokens around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token(self, index: int) -> str:
        """The text of one token."""
        return str(self._tokenizer.decode([index], skip_special_tokens=False))
