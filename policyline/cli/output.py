"""Results on stdout: tables for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 200
"""Columns when stdout is no terminal, so that a file or a pager gets whole cells."""

_STEERING: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, changes of direction, and what no encoding has."""


def console() -> Console:
    """Standard output; colours only on a terminal."""
    return Console(
        file=sys.stdout,
        width=None if sys.stdout.isatty() else PIPED_WIDTH,
        highlight=False,
        soft_wrap=False,
    )


def print_json(value: Any) -> None:
    """One JSON document on stdout; dataclasses become objects."""
    sys.stdout.write(json.dumps(value, default=_plain, indent=2, ensure_ascii=False) + "\n")


def print_json_line(value: Any) -> None:
    """One JSON document on one line, for streams."""
    sys.stdout.write(json.dumps(value, default=_plain, ensure_ascii=False) + "\n")


def print_line(text: str) -> None:
    """One line on stdout."""
    sys.stdout.write(visible(text) + "\n")


def visible(text: str) -> str:
    """Text without a character that would steer a terminal: it may come from anywhere."""
    return _STEERING.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout."""
    console().print(make_table(columns, rows))


def make_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table; `None` shows as a dash."""
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(Text("-" if cell is None else visible(str(cell))) for cell in row))
    return table


def print_fields(fields: Mapping[str, object]) -> None:
    """Aligned `name  value` lines on stdout."""
    sys.stdout.write(fields_text(fields))


def fields_text(fields: Mapping[str, object]) -> str:
    """Aligned `name  value` lines."""
    width = max(map(len, fields), default=0)
    return "".join(
        f"{name:<{width}}  {'-' if value is None else visible(str(value))}\n"
        for name, value in fields.items()
    )


def short(digest: str | None) -> str | None:
    """The first 16 hex digits, enough to distinguish versions on a screen."""
    return digest[:16] if digest else None


def clock(recorded_at: str | None) -> str | None:
    """An ISO time without date separators' noise: `2026-01-31 12:00:00.000Z`."""
    if not recorded_at:
        return None
    return recorded_at.replace("T", " ")[:23] + "Z"


def megabytes(size_bytes: int | None) -> str | None:
    """A size in MB with three digits."""
    return None if size_bytes is None else f"{size_bytes / 1e6:.3f}"


def as_fields(value: Any) -> dict[str, Any]:
    """A dataclass as an object, one level deep."""
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return as_fields(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
