"""``plan.json``: which method computes which attention, to read, edit and feed back.

Only ``name`` and ``method`` of a site decide anything; all else tells why. A plan holds no
timings, so the same source, data, seed and prices give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.passes.calibrate.fitted import Fitted
from subquad.passes.methods import parse_method
from subquad.passes.plan import DENSE, Assignment, declined_by
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime.errors import UsageError
from subquad.runtime.jsonable import json_ready
from subquad.runtime.npz import read_npz, write_npz
from subquad.runtime.whole_file import whole_file

SCHEMA = "subquad.plan"
SCHEMA_VERSION = 1

_FIT_ERRORS = ("before", "after")
"""Fields of ``Fitted`` that are numbers, one for every head."""


@dataclass(frozen=True)
class SitePlan:
    """What one site shall become.

    Attributes:
        name: of the site.
        method: ``window:size=256,sinks=4``; ``dense`` keeps it exact.
        why: one sentence.
        facts: measured: candidates, errors, prices, statistics; not read back.
        fitted: tensors of ``method``, if it is one that learns.
    """

    name: str
    method: str
    why: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    fitted: Fitted | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        entries = {"name": self.name, "method": self.method, "why": self.why, **self.facts}
        if self.fitted is not None:
            entries["fitted"] = {"method": self.method, **self.fitted.facts()}
        return entries


@dataclass(frozen=True)
class PlanFile:
    """A whole plan.

    Attributes:
        source: name and hash of what was planned for; a plan without a hash fits any source that
            has sites of these names.
        sites: in graph order.
        facts: budget, data, prices, what was measured; not read back.
    """

    source: Mapping[str, Any]
    sites: tuple[SitePlan, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = json_ready(
            {
                "schema": SCHEMA,
                "version": SCHEMA_VERSION,
                "source": dict(self.source),
                "sites": [site.to_json() for site in self.sites],
                **self.facts,
            }
        )
        return result

    @property
    def branches(self) -> list[Mapping[str, Any]]:
        """What was seen of hybrids when their branches were switched off."""
        return [site.facts["branches"] for site in self.sites if "branches" in site.facts]

    def dumps(self) -> str:
        """Stable, sorted JSON."""
        return json.dumps(self.to_json(), indent=1, sort_keys=True, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Write ``path`` and, if a method has fitted tensors, the ``.npz`` file beside it.

        Each appears whole or not at all, the plan last.

        Raises:
            OutputError: a file cannot be written.
        """
        arrays = {
            f"{site.name}/{name}": array
            for site in self.sites
            if site.fitted is not None
            for name, array in site.fitted.tensors.items()
        }
        if arrays:
            write_npz(tensors_path(path), arrays)
        with whole_file(path) as stream:
            stream.write(self.dumps().encode())

    @staticmethod
    def read(path: Path) -> PlanFile:
        """Read and check ``path``, and the file of fitted tensors beside it if one is needed.

        Raises:
            UsageError: no such file, no JSON, another schema, or a field of a wrong kind; says
                which. Or the fitted tensors are missing or not those of the plan.
        """
        try:
            raw = json.loads(path.read_text("utf-8-sig"), object_pairs_hook=_without_twins)
        except OSError as error:
            raise UsageError(f"Plan {path} cannot be read: {error.strerror}.") from error
        # ValueError: no UTF-8, no JSON, a key given twice, a number of thousands of digits.
        # RecursionError: brackets nested deeper than the parser's stack.
        except (ValueError, RecursionError) as error:
            raise UsageError(f"Plan {path} is no valid JSON: {error}.") from error
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            raise UsageError(f'{path} is no plan: expected an object with "schema": "{SCHEMA}".')
        if raw.get("version") != SCHEMA_VERSION:
            raise UsageError(
                f"Plan {path} has version {raw.get('version')!r}, but this subquad reads "
                f"{SCHEMA_VERSION}. Plan again."
            )
        source = raw.get("source", {})
        if not isinstance(source, dict):
            raise UsageError(f"Plan {path}: source must be an object.")
        sites = raw.get("sites")
        if not isinstance(sites, list) or not sites:
            raise UsageError(f"Plan {path}: sites must be a list with one entry per attention.")
        parsed = tuple(_site(item, f"Plan {path}: sites[{i}]") for i, item in enumerate(sites))
        arrays = cache(lambda: read_npz(tensors_path(path)))
        parsed = tuple(_with_tensors(site, path, arrays) for site in parsed)
        names = [site.name for site in parsed]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"Plan {path}: site {name!r} occurs twice.")
        known = ("schema", "version", "source", "sites")
        return PlanFile(source, parsed, {k: v for k, v in raw.items() if k not in known})

    def assignments(
        self,
        sites: Sequence[AttentionSite],
        *,
        source_hash: str,
        strict_causal: bool = False,
    ) -> list[Assignment]:
        """One assignment per site of the model; sites that the plan does not name stay exact.

        A method that declines its site leaves it exact, with the reason.

        Raises:
            UsageError: planned for another source, an unknown site or method, or one that is
                causal in blocks only where that is excluded.
        """
        made_for = self.source.get("hash")
        if made_for is not None and made_for != source_hash:
            raise UsageError(
                f"The plan was made for {self.source.get('name', 'another source')} with hash "
                f"{str(made_for)[:12]}, this source has {source_hash[:12]}. Plan again, or remove "
                '"hash" from the plan\'s "source" to use it all the same.'
            )
        wanted = {site.name: site for site in self.sites}
        unknown = sorted(set(wanted) - {site.name for site in sites})
        if unknown:
            raise UsageError(
                f"The plan names attention {unknown[0]!r}, which this model does not have; it has "
                f"{', '.join(site.name for site in sites[:3])}, ..."
            )
        dense, exact = parse_method(DENSE)
        plan = []
        for site in sites:
            method, params = dense, exact
            if site.name in wanted:
                try:
                    method, params = parse_method(wanted[site.name].method)
                except UsageError as error:
                    raise UsageError(f"Plan, site {site.name}: {error}") from None
            granularity = method.causal_granularity(params)
            if strict_causal and granularity != 1:
                raise UsageError(
                    f"Plan, site {site.name}: method {wanted[site.name].method!r} is causal only "
                    f"in blocks of {granularity} tokens; drop --strict-causal to allow it"
                )
            declined = declined_by(method, site, params)
            if declined is None:
                fitted = wanted[site.name].fitted if site.name in wanted else None
                _require_shapes(method.tensors(site, params), fitted, site.name)
                plan.append(Assignment(site, method, params, fitted=fitted))
            else:
                plan.append(Assignment(site, dense, exact, declined))
        return plan


def _require_shapes(
    start: Mapping[str, NDArray[np.generic]], fitted: Fitted | None, where: str
) -> None:
    for name, array in ({} if fitted is None else fitted.tensors).items():
        if name not in start or array.shape != start[name].shape:
            expected = start[name].shape if name in start else "no such tensor"
            raise UsageError(
                f"Plan, site {where}: the fitted tensor {name} has shape {array.shape}, this model "
                f"needs {expected}. Plan again."
            )


def tensors_path(path: Path) -> Path:
    """Where the fitted tensors of the plan at ``path`` are."""
    return path.with_name(f"{path.stem}.tensors.npz")


def _with_tensors(
    site: SitePlan, path: Path, arrays: Callable[[], Mapping[str, NDArray[Any]]]
) -> SitePlan:
    """``site`` with its fitted tensors, some of ``arrays``; a method that was edited has none."""
    facts = dict(site.facts)
    wanted = facts.pop("fitted", None)
    where = f"Plan {path}, site {site.name}"
    if not isinstance(wanted, dict | None):
        raise UsageError(f"{where}: fitted must be an object, got {wanted!r}.")
    if wanted is None or wanted.get("method") != site.method:
        return replace(site, facts=facts)
    errors = [_numbers(wanted.get(name, []), f"{where}: fitted.{name}") for name in _FIT_ERRORS]
    place = tensors_path(path)
    try:
        of_all = arrays()
    except UsageError as error:
        raise UsageError(
            f"{where}: its fitted tensors cannot be read from {place}: {error}. Keep that file "
            'beside the plan, or remove "fitted" from the site to start without them.'
        ) from error
    own = f"{site.name}/"
    tensors = {
        name.removeprefix(own): array for name, array in of_all.items() if name.startswith(own)
    }
    fitted = Fitted(tensors, *errors)
    if fitted.digest != wanted.get("digest"):
        raise UsageError(f"{where}: {place} does not hold the tensors of this plan. Plan again.")
    return replace(site, facts=facts, fitted=fitted)


def _numbers(value: object, where: str) -> tuple[float, ...]:
    # Numbers that JSON lacks are texts, see ``json_ready``.
    fits = isinstance(value, list) and all(
        isinstance(one, int | float) or one in ("nan", "inf", "-inf") for one in value
    )
    if not isinstance(value, list) or not fits:
        raise UsageError(f"{where} must be a list of numbers, got {value!r}.")
    return tuple(map(float, value))


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a key given twice, nobody could say which was meant."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"an object has the key {name!r} twice")
        result[name] = value
    return result


def _site(item: object, where: str) -> SitePlan:
    if not isinstance(item, dict):
        raise UsageError(f"{where} must be an object with name and method.")
    for key in ("name", "method"):
        if not isinstance(item.get(key), str) or not item[key]:
            raise UsageError(f"{where}.{key} must be a text, got {item.get(key)!r}.")
    why = item.get("why", "")
    if not isinstance(why, str):
        raise UsageError(f"{where}.why must be a text, got {why!r}.")
    facts = {key: value for key, value in item.items() if key not in ("name", "method", "why")}
    try:
        parse_method(item["method"])
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    return SitePlan(item["name"], item["method"], why, facts)
