"""Timing several kernels in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

SAMPLE_SECONDS = 0.01
"""A timing covers as many calls as take this long: clocks are coarse."""

FIRST_ROUNDS = 3
"""Rounds before a candidate may be given up."""

MAX_REPEATS = 1000


def repeats_for(seconds: float) -> int:
    """Calls per timing, for a call that takes ``seconds``."""
    return max(1, min(MAX_REPEATS, round(SAMPLE_SECONDS / max(seconds, 1e-6))))


def time_rounds(
    timers: Mapping[str, Callable[[], float]], rounds: int, give_up: float, end: float
) -> dict[str, list[float]]:
    """Seconds of each kernel, one per round, the kernels of a round in turns.

    Args:
        timers: ``default``, ``candidate`` and perhaps ``best`` -> one timing.
        rounds: at most, and at least one.
        give_up: stop early when ``candidate`` is this many times slower than ``best``
            (``default`` where there is none).
        end: when to stop, in the time of ``time.monotonic``.
    """
    times: dict[str, list[float]] = {name: [] for name in timers}
    order = list(timers)
    rival = "best" if "best" in timers else "default"
    for number in range(rounds):
        for name in order:
            times[name].append(timers[name]())
        # Whoever runs first meets other caches than whoever runs last.
        order = order[1:] + order[:1]
        if time.monotonic() >= end:
            break
        if number + 1 >= FIRST_ROUNDS:
            pairs = zip(times["candidate"], times[rival], strict=True)
            if statistics.median(mine / other for mine, other in pairs) > give_up:
                break
    return times
