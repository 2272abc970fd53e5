"""Derive what a mask subgraph means: a band over positions and a key padding input, or why not.

The derivation is symbolic (see ``expressions``): every element of the mask is a function of atoms
(comparisons of positions, entries of the padding input), and all truth assignments of the atoms
are tried. A mask is accepted only if "visible" is exactly a conjunction of atoms, each of which
is a one-sided limit on ``query position - key position`` or "this key is real". The result holds
for every length and padding at once; probing (``probe``) then checks it against the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from subquad.kernels.operator import UNLIMITED
from subquad.passes.recognise.expressions import (
    Affine,
    Apply,
    AtLeastZero,
    Atom,
    Entry,
    Number,
    OpaqueError,
    Term,
    apply,
    atoms,
    constant,
    evaluate,
    minimum,
    negate,
)
from subquad.passes.recognise.site import MaskPredicate
from subquad.passes.recognise.symbolic import SymbolicTensor

# exp(-9000) is 0 in float32 whatever the other scores, unless they differ by thousands too.
HIDDEN_BELOW = -9.0e3
_MAX_ATOMS = 10


@dataclass(frozen=True)
class MaskTerm:
    """One mask of an attention: boolean (``visible`` or ``hidden``) or ``additive``."""

    tensor: SymbolicTensor
    kind: Literal["visible", "hidden", "additive"]


@dataclass(frozen=True)
class DerivedMask:
    """A predicate and where its padding comes from.

    Attributes:
        predicate: the claim.
        padding_input: name of the graph input ``[batch, kv_len]`` that marks real keys, or "".
        derivation: one sentence for the report.
    """

    predicate: MaskPredicate
    padding_input: str
    derivation: str


def derive_mask(
    masks: Sequence[MaskTerm], query_len: Affine, kv_len: Affine, *, is_causal: bool = False
) -> DerivedMask:
    """Derive the predicate of all masks of one attention together.

    Args:
        masks: each broadcastable to ``[batch, heads, query_len, kv_len]``.
        query_len, kv_len: lengths of the attention, affine in dimension names.
        is_causal: the operator itself hides later keys, aligned at the start (ONNX Attention).

    Raises:
        OpaqueError: the mask is something else; the message says what.
    """
    i, j = Affine.symbol("i"), Affine.symbol("j")
    bounds: dict[str, tuple[Affine, Affine | None]] = {
        "b": (constant(0), None),
        "h": (constant(0), None),
        "i": (constant(0), query_len - constant(1)),
        "j": (constant(0), kv_len - constant(1)),
    }
    visible: list[Term] = [_visibility(mask) for mask in masks]
    if is_causal:
        visible.append(AtLeastZero(i - j))
    term: Term = constant(1)
    for part in visible:
        term = part if term == constant(1) else Apply("And", (term, part))
    term = _simplify(term, bounds)
    literals = _conjunction(term)
    return _interpret(literals, kv_len - query_len, str(term) if masks else "no mask")


def _visibility(mask: MaskTerm) -> Term:
    rank = len(mask.tensor.shape)
    if not 1 <= rank <= 4:
        raise OpaqueError(f"a mask of rank {rank}")
    names = ("b", "h", "i", "j")[4 - rank :]
    index = tuple(
        constant(0) if dim == constant(1) else Affine.symbol(name)
        for name, dim in zip(names, mask.tensor.shape, strict=True)
    )
    term = mask.tensor.at(index)
    if mask.kind == "additive":
        return Apply("_Additive", (term,))
    return term if mask.kind == "visible" else negate(term)


def _truth(term: Term, assignment: Mapping[Atom, bool]) -> bool:
    """Whether the key is visible under one assignment."""
    if isinstance(term, Apply) and term.op == "_Additive":
        value = evaluate(term.args[0], assignment)
        if value == 0:
            return True
        if value <= HIDDEN_BELOW:
            return False
        raise OpaqueError(f"adds {value:g} to scores: a bias, not a mask")
    if isinstance(term, Apply) and term.op == "And":
        return all([_truth(a, assignment) for a in term.args])
    return bool(evaluate(term, assignment))


def _simplify(term: Term, bounds: Mapping[str, tuple[Affine, Affine | None]]) -> Term:
    """Decide atoms that hold, or fail, for every position (``i >= 0``)."""
    if isinstance(term, AtLeastZero):
        low = minimum(term.affine, bounds)
        if low is not None and low >= 0:
            return constant(1)
        high = minimum(term.affine.scaled(-1), bounds)
        if high is not None and high > 0:
            return constant(0)
        return term
    if isinstance(term, Apply):
        args = tuple(_simplify(a, bounds) for a in term.args)
        return Apply(term.op, args) if term.op == "_Additive" else apply(term.op, *args)
    return term


def _conjunction(term: Term) -> dict[Atom, bool]:
    """The literals whose conjunction the term is, for every feasible assignment."""
    variables = atoms(term)
    if len(variables) > _MAX_ATOMS:
        raise OpaqueError(f"a mask over {len(variables)} different conditions")
    table: list[tuple[dict[Atom, bool], bool]] = []
    for values in itertools.product((True, False), repeat=len(variables)):
        assignment = dict(zip(variables, values, strict=True))
        if _feasible(assignment):
            table.append((assignment, _truth(term, assignment)))
    seen = [assignment for assignment, visible in table if visible]
    if not seen:
        raise OpaqueError("the mask hides every key")
    required = {atom: seen[0][atom] for atom in variables if len({row[atom] for row in seen}) == 1}
    for assignment, visible in table:
        if visible != all(assignment[atom] == value for atom, value in required.items()):
            shown = " , ".join(map(str, variables))
            raise OpaqueError(f"the mask is no conjunction of limits and padding; it tests {shown}")
    return required


def _feasible(assignment: Mapping[Atom, bool]) -> bool:
    """Whether comparisons over the same difference can hold together."""
    limits: dict[tuple[tuple[str, Number], ...], list[Number]] = {}
    for atom, value in assignment.items():
        if not isinstance(atom, AtLeastZero):
            continue
        # value: x + c >= 0, so x >= -c; otherwise -x - c - 1 >= 0, so -x >= c + 1.
        affine = atom.affine if value else atom.affine.scaled(-1) - constant(1)
        limits.setdefault(affine.terms, []).append(-affine.constant)
    for terms, lower in limits.items():
        opposite = limits.get(Affine(terms).scaled(-1).terms)
        if opposite is not None and max(lower) > -max(opposite):
            return False
    return True


def _interpret(literals: Mapping[Atom, bool], shift: Affine, text: str) -> DerivedMask:
    left = right = UNLIMITED
    padding = ""
    alignments: set[str] = set()
    for atom, value in literals.items():
        if isinstance(atom, Entry):
            padding = _padding_source(atom, value, padding)
            continue
        limit = atom.affine if value else atom.affine.scaled(-1) - constant(1)
        coefficients = (limit.coefficient("i"), limit.coefficient("j"))
        # (i + offset) - j + right >= 0, or left - (i + offset) + j >= 0
        sign = coefficients[0]
        if coefficients not in ((1, -1), (-1, 1)):
            raise OpaqueError(f"visible only where {limit} >= 0: not a distance of positions")
        rest = limit.without("i", "j").scaled(sign)
        distance, alignment = _without_offset(rest, shift, limit)
        alignments.update(alignment)
        if sign == 1:
            right = distance if right == UNLIMITED else min(right, distance)
        else:
            left = -distance if left == UNLIMITED else min(left, -distance)
    if (right != UNLIMITED and right < 0) or (left != UNLIMITED and left < 0):
        raise OpaqueError("a query that may not see its own position")
    if len(alignments) > 1:
        raise OpaqueError("limits aligned differently at start and end")
    predicate = MaskPredicate(
        window_left=left,
        window_right=right,
        key_padding=bool(padding),
        alignment="start" if alignments == {"start"} else "end",
    )
    return DerivedMask(predicate, padding, f"{predicate.describe()}: from {text}"[:400])


def _padding_source(atom: Entry, value: bool, known: str) -> str:
    if not value:
        raise OpaqueError(f"keys are visible where {atom} is zero")
    indices = [index for index in atom.index if index != constant(0)]
    if indices != [Affine.symbol("b"), Affine.symbol("j")] or len(atom.index) != 2:
        raise OpaqueError(
            f"visibility depends on {atom}, which is not a mask of keys per batch row"
        )
    if known and known != atom.source:
        raise OpaqueError(f"two padding inputs: {known} and {atom.source}")
    return atom.source


def _without_offset(rest: Affine, shift: Affine, limit: Affine) -> tuple[int, set[str]]:
    """Split ``offset + distance`` into the distance and where the offset is aligned."""
    if rest.is_constant:
        # With equal lengths start and end coincide.
        return int(rest.constant), set() if shift == constant(0) else {"start"}
    distance = rest - shift
    if distance.is_constant:
        return int(distance.constant), {"end"}
    raise OpaqueError(
        f"visible only where {limit} >= 0: the offset {rest} is not kv_len - query_len"
    )
