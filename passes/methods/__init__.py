"""The replacement methods: one file each, one line here.

A method listed in ``METHODS`` is known to the command line and covered by the contract test.
"""

from __future__ import annotations

from typing import Any

from subquad.passes.methods import (
    block_sparse,
    dense,
    elu,
    hedgehog,
    lolcats,
    static,
    window,
)
from subquad.passes.methods.base import Method, Parameters
from subquad.runtime.errors import UsageError

METHODS: tuple[Method[Any], ...] = (
    dense.METHOD,
    window.METHOD,
    elu.METHOD,
    block_sparse.METHOD,
    hedgehog.METHOD,
    lolcats.METHOD,
    static.METHOD,
)


def get_method(name: str) -> Method[Any]:
    """The method of that name.

    Raises:
        UsageError: there is none; the message names those that exist.
    """
    for method in METHODS:
        if method.name == name:
            return method
    known = ", ".join(method.name for method in METHODS)
    raise UsageError(f"unknown method {name!r}; known: {known}")


def parse_method(text: str) -> tuple[Method[Any], Parameters]:
    """Read ``"window:size=128,sinks=4"``, ``"window:128"`` or ``"dense"``.

    Raises:
        UsageError: unknown method or parameter, a value missing, not an integer or out of range.
    """
    name, colon, rest = text.partition(":")
    method = get_method(name.strip())
    if colon and not rest.strip():
        raise UsageError(f"method {text!r}: expected parameters after the colon")
    try:
        return method, method.parameters.parse(rest)
    except UsageError as error:
        raise UsageError(f"method {text!r}: {error}") from None


def method_text(method: Method[Any], params: Parameters) -> str:
    """The text :func:`parse_method` reads back."""
    described = params.describe()
    return f"{method.name}:{described}" if described else method.name
