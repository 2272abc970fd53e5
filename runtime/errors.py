"""Errors shown to the user, each with its documented exit code, and reasoned refusals.

| code | meaning |
|---|---|
| 0 | pass |
| 2 | usage |
| 3 | unsupported or invalid input, with the reason |
| 4 | accuracy budget missed |
| 5 | a required replacement did not happen |
| 6 | target unavailable and fallback forbidden |
| 7 | artifact integrity |
| 8 | output could not be written (permissions, disk full) |
| 130 | interrupted |
"""

from __future__ import annotations

from dataclasses import dataclass


class SubquadError(Exception):
    """Base of every error a user can cause; the message says what, where, why and what to do."""

    exit_code = 3


class UsageError(SubquadError):
    """The command or call itself is wrong: unknown method, bad parameter, missing file."""

    exit_code = 2


class UnsupportedModelError(SubquadError):
    """The source cannot be read, traced or converted."""

    exit_code = 3


class BudgetError(SubquadError):
    """The artifact differs from its reference by more than the budget allows."""

    exit_code = 4


class ReplacementError(SubquadError):
    """A replacement the user required did not happen."""

    exit_code = 5


class TargetUnavailableError(SubquadError):
    """The requested execution target is not available here and fallback is forbidden."""

    exit_code = 6


class IntegrityError(SubquadError):
    """A file of the artifact is missing, changed or inconsistent with the manifest."""

    exit_code = 7


class OutputError(SubquadError):
    """The output location cannot be written: permissions, disk full."""

    exit_code = 8


@dataclass(frozen=True)
class Rejection:
    """Why a recogniser, method or kernel declines; not an error.

    Attributes:
        reason: one sentence with the offending value.
        where: name of the site or node.
    """

    reason: str
    where: str = ""
