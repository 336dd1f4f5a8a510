"""Adds commands to the command line, and makes options of settings dataclasses.

A command's function takes `Options[SidecarSettings]` where it wants settings: every field that is
declared with `policyline.setting.Setting` becomes an option, and `Options.build` makes the
dataclass of what was given. Every command also takes the options of the logs, which work before
its name as well.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from inspect import Parameter
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin

import typer

from policyline.cli.logs import LogFormat, set_up_logs
from policyline.setting import Setting, declared

S = TypeVar("S")

VerboseOption = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        envvar="POLICYLINE_VERBOSE",
        help="More logs on stderr; -vv for all.",
    ),
]
LogFormatOption = Annotated[
    LogFormat | None,
    typer.Option(
        "--log-format",
        envvar="POLICYLINE_LOG_FORMAT",
        help="How logs are written to stderr: text (the default) or json.",
    ),
]
_LOG_OPTIONS = {"context": (typer.Context, Parameter.empty)} | {
    "verbose": (VerboseOption, 0),
    "log_format": (LogFormatOption, None),
}


@dataclass(frozen=True, slots=True)
class Options(Generic[S]):
    """What was given for the settings of one dataclass, by field."""

    kind: type[S]
    given: Mapping[str, Any]

    def build(self, **computed: Any) -> S:
        """The settings.

        Args:
            **computed: fields that are no option, or whose default the command computes.

        Raises:
            SettingsInvalid: a value that cannot work.
        """
        return self.kind(**{**self.given, **computed})


def add_command(
    app: typer.Typer, function: Callable[..., None], example: str, *, name: str | None = None
) -> None:
    """Add a command.

    Args:
        app: where to.
        function: its options are its parameters, and its help is its docstring.
        example: one line, or all the text below the options.
        name: where the function has another.
    """
    epilog = example if "\n" in example else f"Example: {example}"
    app.command(name, epilog=epilog)(_as_command(function))


def _as_command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer is to see it: one parameter for each option."""
    parameters: list[Parameter] = []
    settings: dict[str, type[Any]] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        kind, flags = _settings_of(parameter.annotation)
        if kind is None:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
        else:
            settings[parameter.name] = kind
            parameters += _options_of(parameter.name, kind, flags)
    for name, (annotation, default) in _LOG_OPTIONS.items():
        parameters.append(
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )

    @functools.wraps(function)
    def command(
        *, context: typer.Context, verbose: int, log_format: LogFormat | None, **given: Any
    ) -> None:
        root = context.find_root().params
        set_up_logs(
            max(verbose, root.get("verbose", 0)),
            log_format or root.get("log_format") or LogFormat.TEXT,
        )
        for name, kind in settings.items():
            values = {field: given.pop(f"{name}_{field}") for field in declared(kind)}
            given[name] = Options(kind, values)
        function(**given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _settings_of(annotation: Any) -> tuple[type[Any] | None, Mapping[str, str]]:
    """The dataclass of `Options[...]`, and the fields whose flag differs in this command."""
    flags: Mapping[str, str] = {}
    if get_origin(annotation) is Annotated:
        annotation, *found = get_args(annotation)
        flags = next((one for one in found if isinstance(one, Mapping)), flags)
    return (get_args(annotation)[0] if get_origin(annotation) is Options else None), flags


def _options_of(group: str, kind: type[Any], flags: Mapping[str, str]) -> Iterator[Parameter]:
    by_name = {field.name: field for field in fields(kind)}
    for name, (hint, setting) in declared(kind).items():
        default = _default(by_name[name], setting)
        number = next((one for one in (int, float) if one in {hint, *get_args(hint)}), None)
        option = typer.Option(
            flags.get(name, setting.flag),
            envvar=setting.environment_variable,
            help=f"{setting.help} ({setting.bounds})" if number else setting.help,
            metavar=setting.metavar or (setting.unit.upper() if setting.unit else None),
            show_default=not setting.computed,
            parser=functools.partial(_parse, setting, number) if number else None,
        )
        yield Parameter(
            f"{group}_{name}",
            Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[hint if default is not None else hint | None, option],
        )


def _default(field: Field[Any], setting: Setting) -> Any:
    if setting.computed or field.default is MISSING:
        return None
    return setting.none if setting.none and field.default is None else field.default


def _parse(setting: Setting, number: type[int | float], given: Any) -> Any:
    """A number of the command line; a default is one already.

    Raises:
        typer.BadParameter: with the value and what it must be.
    """
    if not isinstance(given, str):
        return given
    try:
        return setting.parse(given, number)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
