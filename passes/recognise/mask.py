"""Derive what a mask subgraph means: a band over positions and a key padding input, or why not.

The derivation is symbolic (see ``expressions``): every element of the mask is a function of atoms
(comparisons of positions, entries of the padding input), and all values of the atoms are tried. A
mask is accepted only if "visible" is exactly a conjunction of atoms, each of which is a one-sided
limit on ``query position - key position`` or "this key is real". The result holds for every length
and padding at once; probing (``probe``) then checks it against the graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import onnx_ir as ir

from subquad.kernels.operator import UNLIMITED
from subquad.passes.recognise.affine import (
    ONE,
    ZERO,
    Affine,
    Number,
    OpaqueError,
    Symbol,
    constant,
    position,
)
from subquad.passes.recognise.decay import exponent, term_of_table
from subquad.passes.recognise.expressions import (
    AtLeastZero,
    Atom,
    Entry,
    Term,
    at_least_zero,
    atoms,
    constants,
    count_functions,
    evaluate,
)
from subquad.passes.recognise.site import MaskPredicate
from subquad.passes.recognise.symbolic import Interpreter
from subquad.passes.recognise.tensors import Index, show

# exp(-9000) is 0 in float32 whatever the other scores, unless they differ by thousands too.
HIDDEN_BELOW = -9.0e3
_MAX_ATOMS = 10
# Evaluations of one operator on one assignment, for one mask.
_MAX_EVALUATIONS = 2_000_000

PaddingTest: TypeAlias = Literal["nonzero", "positive", "one"]
_PADDING_TESTS: tuple[tuple[PaddingTest, Callable[[int], bool]], ...] = (
    ("nonzero", lambda x: x != 0),
    ("positive", lambda x: x > 0),
    ("one", lambda x: x == 1),
)
# Values of an input besides 0 and 1 that are tried, with those the mask compares with.
_OTHER_VALUES = (-1, *range(2, 12), 255)

MaskKind: TypeAlias = Literal["visible", "hidden", "additive", "factor", "decay"]
"""How a mask acts: by its truth, added to scores, or (on weights without a sum) as 0 or 1; a decay
multiplies weights by 0 or by what falls with the distance."""
Mask: TypeAlias = tuple[ir.Value, MaskKind]


@dataclass(frozen=True)
class ScoreShape:
    """Shape of the scores: ``heads`` is None where they have three axes only."""

    batch: Affine
    heads: Affine | None
    query_len: Affine
    kv_len: Affine

    @property
    def axes(self) -> tuple[tuple[str, Affine], ...]:
        named = (("b", self.batch), ("h", self.heads), ("i", self.query_len), ("j", self.kv_len))
        return tuple((name, size) for name, size in named if size is not None)


@dataclass(frozen=True)
class DerivedMask:
    """A predicate and where its padding comes from.

    Attributes:
        predicate: the claim.
        padding_input: name of the graph input ``[batch, kv_len]`` that marks real keys, or "".
        padding_test: which of its values mark a real key.
        derivation: one sentence for the report.
    """

    predicate: MaskPredicate
    padding_input: str
    padding_test: PaddingTest
    derivation: str


def derive_mask(
    interpreter: Interpreter,
    masks: Sequence[Mask],
    shape: ScoreShape,
    *,
    is_causal: bool = False,
) -> DerivedMask:
    """Derive the predicate of all masks of one attention together.

    Args:
        interpreter: reads the graph of the masks.
        masks: each broadcastable to the scores.
        shape: of the scores.
        is_causal: the operator itself hides later keys, aligned at the start (ONNX Attention).

    Raises:
        OpaqueError: the mask is something else; the message says what.
    """
    parts: list[tuple[Term, MaskKind]] = []
    for value, kind in masks:
        if kind == "decay":
            parts += [(term, kind) for term in decay_elements(interpreter, value, shape)]
        else:
            parts.append((_generic_element(interpreter, value, shape), kind))
    if is_causal:
        causal = position("i", shape.query_len) - position("j", shape.kv_len)
        parts.append((at_least_zero(causal), "visible"))
    try:
        literals = _conjunction(parts)
        _check_unread_entries(parts, literals)
        padding_test: PaddingTest = "nonzero"
        entry = next((atom for atom in literals if isinstance(atom, Entry)), None)
        if entry is not None:
            _check_padding(literals, shape)
            padding_test = _padding_test(parts, literals, entry)
    except RecursionError:
        raise OpaqueError("a mask nested too deeply") from None
    return _interpret(literals, shape, padding_test)


def _generic_element(interpreter: Interpreter, value: ir.Value, shape: ScoreShape) -> Term:
    """The mask at query ``i`` and key ``j`` of batch row ``b`` and head ``h``."""
    dims = interpreter.tensor(value).shape
    axes = shape.axes
    if len(dims) > len(axes):
        raise OpaqueError(f"a mask of shape {show(dims)} on scores of {len(axes)} axes")
    index: list[Term] = []
    for (name, size), dim in zip(axes[len(axes) - len(dims) :], dims, strict=True):
        mismatch = dim - size
        if dim != ONE and mismatch.is_constant and mismatch != ZERO:
            raise OpaqueError(f"a mask with {dim} entries where the scores have {size}")
        index.append(ZERO if dim == ONE else position(name, size))
    return _element(interpreter, value, tuple(index))


def decay_elements(interpreter: Interpreter, value: ir.Value, shape: ScoreShape) -> list[Term]:
    """What multiplies the weight of query ``i`` and key ``j``, per head it tells apart."""
    dims, axes = interpreter.tensor(value).shape, shape.axes
    if len(dims) > len(axes):
        raise OpaqueError(f"a factor of shape {show(dims)} on scores of {len(axes)} axes")
    named = list(zip(axes[len(axes) - len(dims) :], dims, strict=True))
    heads = next((dim for (name, _), dim in named if name == "h"), ONE)
    if not heads.is_constant:
        raise OpaqueError(f"a factor for {heads} heads")
    query, key = position("i", shape.query_len), position("j", shape.kv_len)
    terms = []
    for head in range(int(heads.constant)):
        index = tuple(
            ZERO if dim == ONE else constant(head) if name == "h" else position(name, size)
            for (name, size), dim in named
        )
        try:
            terms.append(_element(interpreter, value, index))
        except OpaqueError:
            if value.const_value is None:
                raise
            entry = Entry(f"constant {value.name}", index)
            terms.append(term_of_table(entry, value.const_value.numpy(), query, key))
    return terms


def _element(interpreter: Interpreter, value: ir.Value, index: Index) -> Term:
    try:
        return interpreter.element(value, index)
    except OpaqueError as error:
        raise OpaqueError(f"mask {value.name!r}: {error}") from error


def _visible(parts: Sequence[tuple[Term, MaskKind]], values: Mapping[Atom, Number]) -> bool:
    """Whether the key is visible when the atoms have these values."""
    # No early exit: a bias in the second mask counts where the first hides, too.
    return all([_part_visible(term, kind, values) for term, kind in parts])


def _part_visible(term: Term, kind: MaskKind, values: Mapping[Atom, Number]) -> bool:
    if kind == "decay":
        return exponent(term, values) is not None
    value = evaluate(term, values)
    if kind == "factor":
        if value not in (0, 1):
            raise OpaqueError(f"multiplies weights by {value:g}: no mask")
        return bool(value)
    if kind != "additive":
        return bool(value) == (kind == "visible")
    if value == 0:
        return True
    if value <= HIDDEN_BELOW:
        return False
    raise OpaqueError(f"adds {value:g} to scores: a bias, not a mask")


def zero_or_one(term: Term) -> bool:
    """Whether a term is 0 or 1 whatever its atoms are.

    Raises:
        OpaqueError: its value depends on a position itself.
    """
    variables = atoms(term)
    if len(variables) > _MAX_ATOMS or count_functions(term) << len(variables) > _MAX_EVALUATIONS:
        raise OpaqueError(f"a mask over {len(variables)} different conditions")
    return all(evaluate(term, row) in (0, 1) for row in assignments(variables))


def assignments(variables: Sequence[Atom]) -> list[dict[Atom, Number]]:
    """All values of these atoms that can hold together."""
    rows = itertools.product((1, 0), repeat=len(variables))
    assignments: Iterator[dict[Atom, Number]] = (
        dict(zip(variables, row, strict=True)) for row in rows
    )
    return [assignment for assignment in assignments if is_feasible(assignment)]


def _conjunction(parts: Sequence[tuple[Term, MaskKind]]) -> dict[Atom, bool]:
    """The literals whose conjunction "visible" is, for every feasible assignment."""
    variables = list(dict.fromkeys(atom for term, _ in parts for atom in atoms(term)))
    work = sum(count_functions(term) for term, _ in parts) << len(variables)
    if len(variables) > _MAX_ATOMS or work > _MAX_EVALUATIONS:
        raise OpaqueError(f"a mask over {len(variables)} different conditions")
    table = [(row, _visible(parts, row)) for row in assignments(variables)]
    seen = [row for row, visible in table if visible]
    if not seen:
        raise OpaqueError("the mask hides every key")
    required = {
        atom: bool(seen[0][atom]) for atom in variables if len({row[atom] for row in seen}) == 1
    }
    for row, visible in table:
        if visible != all(bool(row[atom]) == value for atom, value in required.items()):
            shown = "; ".join(map(str, variables))
            raise OpaqueError(f"the mask is no conjunction of limits and padding; it tests {shown}")
    return required


def is_feasible(assignment: Mapping[Atom, Number]) -> bool:
    """Whether comparisons over the same difference can hold together."""
    limits: dict[tuple[tuple[Symbol, Number], ...], list[Number]] = {}
    for atom, value in assignment.items():
        if isinstance(atom, AtLeastZero):
            affine = _limit(atom, bool(value))  # x + c >= 0, so x >= -c
            limits.setdefault(affine.terms, []).append(-affine.constant)
    for terms, lower in limits.items():
        opposite = limits.get(Affine(terms).scaled(-1).terms)
        if opposite is not None and max(lower) > -max(opposite):
            return False
    return True


def _limit(atom: AtLeastZero, value: bool) -> Affine:
    """The expression that is ``>= 0`` where the atom has this value."""
    return atom.affine if value else atom.affine.scaled(-1) - ONE


# --- other values of inputs than 0 and 1 -----------------------------------------------------


def _other_values(parts: Sequence[tuple[Term, MaskKind]]) -> list[int]:
    """Values an input may be told apart by: small ones, and near every constant of the mask."""
    values = dict.fromkeys(_OTHER_VALUES)
    for term, _ in parts:
        for number in constants(term):
            if math.isfinite(number) and abs(number) < 1 << 62:
                values.update(dict.fromkeys(int(number) + step for step in (-1, 0, 1)))
    return [value for value in values if value not in (0, 1)]


def _check_unread_entries(
    parts: Sequence[tuple[Term, MaskKind]], literals: Mapping[Atom, bool]
) -> None:
    """An input read for nothing at 0 and 1 is read for its other values, as token ids are."""
    for entry in dict.fromkeys(atom for term, _ in parts for atom in atoms(term)):
        if isinstance(entry, Entry) and entry not in literals and entry.dtype != "bool":
            raise OpaqueError(f"visibility depends on other values of {entry} than 0 and 1")


# --- padding -------------------------------------------------------------------------------


def _check_padding(literals: Mapping[Atom, bool], shape: ScoreShape) -> None:
    """One input, read at the key's own slot of its batch row."""
    expected = (position("b", shape.batch), position("j", shape.kv_len))
    entries = [(atom, value) for atom, value in literals.items() if isinstance(atom, Entry)]
    for atom, value in entries:
        if atom.index != expected:
            raise OpaqueError(
                f"visibility depends on {atom}, which is not a mask of keys per batch row"
            )
        if not value:
            raise OpaqueError(f"keys are visible where {atom} is zero")
    sources = list(dict.fromkeys(atom.source for atom, _ in entries))
    if len(sources) > 1:
        raise OpaqueError(f"two padding inputs: {' and '.join(sources)}")


def _padding_test(
    parts: Sequence[tuple[Term, MaskKind]], literals: Mapping[Atom, bool], entry: Entry
) -> PaddingTest:
    """Which values of the padding input mark real keys.

    Values for which the mask is no mask (``(1 - x) * -1e4`` at 2) say that only 0 and 1 occur.
    Not so a float that multiplies weights, which may be the weight of a key.
    """
    if entry.dtype == "bool":
        return "nonzero"
    others = [atom for term, _ in parts for atom in atoms(term) if atom != entry]
    rows = assignments(list(dict.fromkeys(others)))
    factors = [part for part in parts if part[1] == "factor" and "float" in entry.dtype]
    matching = list(_PADDING_TESTS)
    for number, row in itertools.product(_other_values(parts), rows):
        try:
            _visible(factors, {**row, entry: number})
        except OpaqueError:
            raise OpaqueError(
                f"the float {entry} multiplies weights, and nothing says that it is 0 or 1"
            ) from None
        try:
            visible = _visible(parts, {**row, entry: number})
        except OpaqueError:
            continue
        rest = all(bool(row[atom]) == value for atom, value in literals.items() if atom != entry)
        matching = [(name, test) for name, test in matching if visible == (rest and test(number))]
    if not matching:
        raise OpaqueError(f"keys are told apart by other values of {entry} than 0 and 1")
    return matching[0][0]


# --- limits --------------------------------------------------------------------------------


def _interpret(
    literals: Mapping[Atom, bool], shape: ScoreShape, padding_test: PaddingTest
) -> DerivedMask:
    padding = ""
    reasons: list[str] = []
    limits: list[Affine] = []
    for atom, value in literals.items():
        if isinstance(atom, Entry):
            padding = atom.source
            reasons.append(f"{atom} is {padding_test}")
        else:
            limits.append(_limit(atom, value))
            reasons.append(str(AtLeastZero(limits[-1])))
    band = _band(limits, shape)
    predicate = MaskPredicate(band.left, band.right, bool(padding), band.alignment)
    where = " and ".join(reasons) if reasons else "every query i sees every key j"
    text = f"{predicate.describe()}: visible where {where}, at every length"
    return DerivedMask(predicate, padding, padding_test, text)


@dataclass(frozen=True)
class _Band:
    left: int
    right: int
    alignment: Literal["start", "end"]


def _band(limits: Sequence[Affine], shape: ScoreShape) -> _Band:
    """All limits as one band, queries aligned to the last keys or to the first."""
    found: list[_Band] = []
    failure: OpaqueError | None = None
    alignments: tuple[tuple[Literal["start", "end"], Affine], ...] = (
        ("end", shape.kv_len - shape.query_len),
        ("start", ZERO),
    )
    for alignment, offset in alignments:
        left = right = UNLIMITED
        try:
            for limit in limits:
                side, distance = _one_sided(limit, shape, offset)
                if side == "right":
                    right = distance if right == UNLIMITED else min(right, distance)
                else:
                    left = distance if left == UNLIMITED else min(left, distance)
        except OpaqueError as error:
            failure = failure or error
            continue
        found.append(_Band(left, right, alignment))
    if not found:
        assert failure is not None
        raise failure
    # Fixed sizes can be read both ways: causal is the more telling one.
    return next((band for band in found if band.right == 0), found[0])


def _one_sided(
    limit: Affine, shape: ScoreShape, offset: Affine
) -> tuple[Literal["left", "right"], int]:
    """``limit >= 0`` as the side it bounds and the distance it allows."""
    query, key = Symbol("i", shape.query_len), Symbol("j", shape.kv_len)
    of_key = limit.coefficient(key)
    # The only query of a decoding step is index 0: nothing is left of it in the term.
    of_query = -of_key if shape.query_len == ONE else limit.coefficient(query)
    shown = AtLeastZero(limit)
    if (of_query, of_key) not in ((1, -1), (-1, 1)):
        raise OpaqueError(f"visible only where {shown}: not a distance of positions")
    # (i + offset) - j + right >= 0, or left - (i + offset) + j >= 0
    rest = limit.without(query, key).scaled(of_query)
    distance = rest - offset
    if not distance.is_constant:
        raise OpaqueError(
            f"visible only where {shown}: the offset {rest} is not kv_len - query_len"
        )
    allowed = int(distance.constant * of_query)
    if allowed < 0:
        raise OpaqueError(f"visible only where {shown}: a query may not see its own position")
    return ("right" if of_query == 1 else "left"), allowed
