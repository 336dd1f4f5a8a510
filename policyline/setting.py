"""How a setting is declared, once: as the annotation of a field of a settings dataclass.

    linger_s: Annotated[float, Setting("--linger", "How long ...", unit="seconds", minimum=0)] = 2.0

The field gives name, type and default; `Setting` the option, the environment variable, the help,
the unit and the bounds. The command makes its options of it (`policyline.cli.command`), and the
dataclass refuses what is out of bounds (`check_bounds`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from policyline.errors import SettingsInvalid

SHORTEST_S = 0.001
"""A time limit or an interval of less is a slip of the pen, and 0 would never end or never wait."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a setting is, apart from name, type and default, which are its field's."""

    flag: str
    """Its option of the command."""
    help: str
    unit: str = ""
    """Of a number: `seconds`, `bytes`, or what is counted."""
    minimum: float | None = None
    maximum: float | None = None
    """Both inclusive; None: no bound."""
    variable: str = ""
    """Environment variable, where it is not made of the flag: `POLICYLINE_LINGER`."""
    none: str = ""
    """The word that stands for None on the command line, where None is a value of its own."""
    metavar: str = ""
    """How the value is shown in the help, where it is no number."""
    computed: bool = False
    """The command computes a default, and the help says what it is."""

    @property
    def environment_variable(self) -> str:
        """The variable that sets it."""
        return self.variable or f"POLICYLINE_{self.flag.lstrip('-').replace('-', '_').upper()}"

    @property
    def bounds(self) -> str:
        """The bounds of a number, in words."""
        if self.maximum is None:
            return f"{self.minimum} or more"
        return f"{self.minimum} to {self.maximum}"

    @property
    def wanted(self) -> str:
        """What a value must be, in words."""
        word = f", or {self.none!r}" if self.none else ""
        return f"a number of {self.unit}, {self.bounds}{word}"

    def allows(self, value: float) -> bool:
        """Whether a number is within the bounds; neither NaN nor an infinite one is."""
        lowest = float("-inf") if self.minimum is None else self.minimum
        highest = float("inf") if self.maximum is None else self.maximum
        return lowest <= value <= highest and abs(value) != float("inf")

    def parse(self, text: str, number: type[int | float]) -> int | float | None:
        """Read a number, or the word that stands for None.

        Raises:
            ValueError: it is neither, or not within the bounds.
        """
        if self.none and text == self.none:
            return None
        try:
            value = number(text)
        except ValueError:
            value = float("nan")
        if not self.allows(value):
            raise ValueError(f"{text!r} is not {self.wanted}")
        return value


def seconds(
    flag: str,
    help: str,  # noqa: A002 - as the field
    minimum: float = SHORTEST_S,
    maximum: float | None = None,
    variable: str = "",
) -> Setting:
    """A duration."""
    return Setting(flag, help, "seconds", minimum, maximum, variable)


def declared(kind: type[Any]) -> Mapping[str, tuple[Any, Setting]]:
    """The settings of a dataclass: field -> its type and its declaration."""
    return {
        name: (hint.__origin__, found)
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for found in getattr(hint, "__metadata__", ())
        if isinstance(found, Setting)
    }


def check_bounds(settings: Any) -> None:
    """Refuse a number that is out of its bounds; for a dataclass's `__post_init__`.

    Raises:
        SettingsInvalid: with the setting, its value and its bounds.
    """
    for name, (_, setting) in declared(type(settings)).items():
        value = getattr(settings, name)
        if isinstance(value, int | float) and not setting.allows(value):
            raise SettingsInvalid(
                f"{name} {value} is not {setting.wanted}", hint=f"change {setting.flag}"
            )


def parse_address(flag: str, text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; an IPv6 host may stand in brackets, no host is this one.

    Raises:
        SettingsInvalid: it has another form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise SettingsInvalid(f"{flag} {text!r} is not HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)
