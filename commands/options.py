"""Options that several commands share, and their types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    # Generic in the stubs, but not at run time in older releases of click.
    _IntsType = click.ParamType[tuple[int, ...]]
    _NamesType = click.ParamType[tuple[str, ...]]
else:
    _IntsType = _NamesType = click.ParamType


class IntList(_IntsType):
    """``128,512`` as a tuple of integers; a list of a configuration file as well."""

    name = "N,N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        try:
            # Not int() of numbers: it would make 512 of 512.7, and 1 of true.
            return tuple(int(part) if isinstance(part, str) else _integer(part) for part in parts)
        except (TypeError, ValueError):
            self.fail(f"{value!r} is no comma-separated list of integers.", param, ctx)


def _integer(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no integer")
    return value


class NameList(_NamesType):
    """``none,left`` as a tuple of names; a list of a configuration file as well."""

    name = "NAME,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            self.fail(f"{value!r} is no comma-separated list of names.", param, ctx)
        return tuple(str(part).strip() for part in parts)


def _read_config(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    """Make the table ``[command]`` of a TOML file the defaults of this command's flags."""
    if value is None:
        return
    import tomllib

    try:
        tables = tomllib.loads(value.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.UsageError(f"{value}: {error}") from error
    group = ctx.find_root().command
    commands = group.commands if isinstance(group, click.Group) else {}
    for name, table in tables.items():
        if name not in commands or not isinstance(table, dict):
            known = ", ".join(f"[{command}]" for command in commands)
            raise click.UsageError(f"{value}: {name!r} is not one of the tables {known}.")
    settings = {_setting(item): item for item in ctx.command.params if item is not param}
    defaults: dict[str, Any] = {}
    for key, setting in tables.get(ctx.command.name or "", {}).items():
        if key not in settings:
            raise click.UsageError(
                f"{value}: [{ctx.command.name}] has no setting {key!r}; known: "
                f"{', '.join(sorted(settings))}."
            )
        multiple = getattr(settings[key], "multiple", False)
        name = settings[key].name or key
        defaults[name] = [setting] if multiple and not isinstance(setting, list) else setting
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _setting(parameter: click.Parameter) -> str:
    """The name of a parameter in a configuration file: that of its flag, without the dashes."""
    return max(parameter.opts, key=len).removeprefix("--")


def common_options(function: Callable[..., None]) -> Callable[..., None]:
    """``--json`` and ``--config``."""
    as_json = click.option(
        "--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else."
    )
    config = click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=_read_config,
        help="TOML file; its table of this command's name holds the same settings as the flags.",
    )
    return config(as_json(function))


def execution_options(function: Callable[..., None]) -> Callable[..., None]:
    """``--provider``, ``--threads`` and ``--kernels``."""
    provider = click.option(
        "--provider",
        default="cpu",
        show_default=True,
        help="cpu, cuda, or another ONNX Runtime provider; refused if it does not really start.",
    )
    threads = click.option(
        "--threads", type=click.IntRange(min=1), help="Threads per operator [default: all cores]."
    )
    kernels = click.option(
        "--kernels",
        type=click.Choice(["auto", "off", "require"]),
        default="auto",
        show_default=True,
        help="Compiled kernels: where the artifact has them, never, or for every attention.",
    )
    return provider(threads(kernels(function)))


require_sites_option = click.option(
    "--require-sites",
    metavar="N|all",
    help="Fail (exit 5) unless this many attentions were recognised.",
)


cache_option = click.option(
    "--cache",
    is_flag=True,
    help="A decoder that carries what earlier tokens left from call to call, for generation.",
)


seed_option = click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of everything random."
)


def planning_options(function: Callable[..., None]) -> Callable[..., None]:
    """What a plan is made for; see ``_plan_request``."""
    options = (
        click.option(
            "--budget",
            multiple=True,
            metavar="NAME=VALUE",
            help="Limit to keep on held-out data: ppl=1%, kl=0.02, recall=95%, top1, cosine, "
            "rel, or metric=module:function,drop=0.5; repeat or separate by commas.",
        ),
        click.option(
            "--minimize",
            type=click.Choice(["latency", "memory", "flops"]),
            default="latency",
            show_default=True,
            help="What the plan saves.",
        ),
        click.option(
            "--lengths",
            type=IntList(),
            default="2048",
            show_default=True,
            help="Tokens per row that matter to you; prices and errors are taken there.",
        ),
        click.option(
            "--batch",
            type=click.IntRange(min=1),
            default=1,
            show_default=True,
            help="Rows at which prices are taken.",
        ),
        click.option(
            "--data",
            multiple=True,
            type=click.Path(path_type=Path),
            help="Inputs to calibrate on; part of them is held out. A text, .jsonl or .npz file, "
            "or a folder of such files; may repeat. Each one, and each subfolder, is a kind of "
            "documents on which the budget must hold.",
        ),
        click.option(
            "--calibration-tokens",
            type=click.IntRange(min=1),
            help="Tokens per length to measure errors on [default: 8192].",
        ),
        click.option(
            "--heldout-tokens",
            type=click.IntRange(min=1),
            help="Tokens per length to judge plans by [default: 16384].",
        ),
        click.option("--methods", type=NameList(), help="Methods the plan may use [default: all]."),
        click.option(
            "--work",
            type=click.Path(path_type=Path),
            help="Folder for intermediate results; a later run goes on from them.",
        ),
        click.option("--threads", type=click.IntRange(min=1), help="Threads per operator."),
    )
    for option in reversed(options):
        function = option(function)
    return function
