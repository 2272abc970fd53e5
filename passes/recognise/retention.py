"""Linear attention whose weights decay with the distance: RetNet's mask of powers."""

from __future__ import annotations

from dataclasses import replace

from subquad.passes.recognise.affine import ZERO, OpaqueError, position
from subquad.passes.recognise.candidates import Candidate
from subquad.passes.recognise.decay import NoDecayError, exponent, rate_of
from subquad.passes.recognise.expressions import AtLeastZero, atoms
from subquad.passes.recognise.mask import (
    Mask,
    ScoreShape,
    assignments,
    decay_elements,
    derive_mask,
    is_feasible,
)
from subquad.passes.recognise.site import MaskPredicate
from subquad.passes.recognise.symbolic import Interpreter


def as_decay(candidate: Candidate, shape: ScoreShape, interpreter: Interpreter) -> Candidate | None:
    """The candidate with factors that are no masks as decays; ``None``: it has none."""
    if candidate.linear is None:
        return None
    masks: list[Mask] = []
    for value, kind in candidate.masks:
        if kind == "factor":
            try:
                derive_mask(interpreter, ((value, kind),), shape)
            except OpaqueError:
                masks.append((value, "decay"))
                continue
        masks.append((value, kind))
    changed = tuple(masks) != candidate.masks
    return replace(candidate, masks=tuple(masks)) if changed else None


def with_decay(
    candidate: Candidate, shape: ScoreShape, predicate: MaskPredicate, interpreter: Interpreter
) -> Candidate:
    """The candidate with what its decays say about each key/value head.

    Raises:
        OpaqueError: they are not powers of the distance, or heads that share keys differ.
    """
    decays = [value for value, kind in candidate.masks if kind == "decay"]
    form = candidate.linear
    if not decays or form is None:
        return candidate
    if not predicate.is_causal:
        raise NoDecayError(
            "weights decay towards later keys as well: no operator of ours does that"
        )
    offset = shape.kv_len - shape.query_len if predicate.alignment == "end" else ZERO
    distance = position("i", shape.query_len) + offset - position("j", shape.kv_len)
    causal = AtLeastZero(distance)
    heads, sizes = [0.0] * candidate.sizes.num_heads, candidate.sizes
    for value in decays:
        terms = decay_elements(interpreter, value, shape)
        for head in range(sizes.num_heads):
            term = terms[head % len(terms)]
            rates = set()
            for row in assignments(atoms(term)):
                power = exponent(term, row) if is_feasible({**row, causal: 1}) else None
                if power is not None:
                    rates.add(rate_of(power, distance))
            if len(rates) != 1:
                raise NoDecayError("weights decay by more than the distance")
            heads[head] += rates.pop()
    group = sizes.num_heads // sizes.num_kv_heads
    shared = [heads[number : number + group] for number in range(0, len(heads), group)]
    if any(len(set(rates)) > 1 for rates in shared):
        raise NoDecayError("query heads that share keys decay at different rates")
    log_decay = tuple(rates[0] for rates in shared)
    if not any(log_decay):
        return candidate
    return replace(candidate, linear=replace(form, log_decay=log_decay))
