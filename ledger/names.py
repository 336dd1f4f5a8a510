"""Names: the one place that knows how a line and a version number become a policy name."""

from __future__ import annotations

import re

from policyline.ledger.errors import InvalidName

DEFAULT_LINE = "trl-policy"
"""TRL 1.16 names its adapters `trl-policy-v<N>` and offers no option for the prefix."""

_LINE = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")


def policy_name(line: str, version: int) -> str:
    """The name under which an engine serves a version: `<line>-v<version>`."""
    return f"{line}-v{version}"


def parse_policy_name(line: str, name: str) -> int | None:
    """The version number in `name`, or None when `name` is not a canonical name of `line`."""
    prefix = f"{line}-v"
    digits = name[len(prefix) :]
    if not name.startswith(prefix) or not re.fullmatch(r"[1-9][0-9]{0,17}", digits):
        return None
    return int(digits)


def check_line(line: str) -> str:
    """Return `line` unchanged.

    Raises:
        InvalidName: it could not be a directory name, a metrics label and part of a URL at once.
    """
    if not _LINE.fullmatch(line):
        raise InvalidName(
            f"line {line!r} is not usable",
            hint="use lower-case letters, digits, '.', '_' or '-', at most 63 characters",
        )
    return line


def check_label(kind: str, value: str) -> str:
    """Return the run or replica name `value` unchanged; `kind` is "run" or "replica".

    Raises:
        InvalidName: characters that are unsafe in a URL, a label or a file name.
    """
    if not _LABEL.fullmatch(value):
        raise InvalidName(
            f"{kind} {value!r} is not usable",
            hint="use letters, digits, '.', '_' or '-', at most 128 characters",
        )
    return value
