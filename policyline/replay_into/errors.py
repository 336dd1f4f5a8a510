"""Errors that end a replay; what is wrong with one version is a result, not an error.

    ReplayError
    ├── NothingToReplay     the run has no version in the range
    ├── NamesHeld           the server serves a name already
    ├── ServerInUse         a sidecar of this ledger serves with this server
    ├── ServerPaused        the server answers no request
    ├── StateInvalid        a state file that cannot be read, or of another replay
    ├── CacheUnseen         the server does not see the local copies
    ├── BuildChanged        the server is another build than the one that began
    └── ServerGone          the server does not answer (any more)

Each carries `hint`, the remedy; the text of the error ends with it.
"""

from __future__ import annotations

from policyline.errors import ExitCode, PolicylineError


class ReplayError(PolicylineError):
    """Root of the replay's errors."""


class NothingToReplay(ReplayError):
    """The run has no published version in the range."""

    exit_code = ExitCode.USAGE


class NamesHeld(ReplayError):
    """The server serves a name already; it was left alone."""


class ServerInUse(ReplayError):
    """A sidecar of this ledger serves with this server, and would fight over the names."""


class ServerPaused(ReplayError):
    """Generation is paused, so that no probe would be answered."""


class StateInvalid(ReplayError):
    """The state file cannot be read or written, or belongs to another replay."""

    exit_code = ExitCode.USAGE


class CacheUnseen(ReplayError):
    """The server finds no files where the local copies are."""


class BuildChanged(ReplayError):
    """The server is another build than the one that the replay began with."""


class ServerGone(ReplayError):
    """The server does not answer, and did not come back in time."""

    exit_code = ExitCode.UNREACHABLE
