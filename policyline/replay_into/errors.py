"""Errors that end a replay. A fault of one version is a result, not an error.

Each carries `hint`, the remedy; the text of the error ends with it.
"""

from __future__ import annotations

from policyline.errors import ExitCode, PolicylineError


class ReplayError(PolicylineError):
    """Root of the replay's errors."""


class NothingToReplay(ReplayError):
    """The run has no published version in the range."""

    exit_code = ExitCode.USAGE


class NamesInUse(ReplayError):
    """The server serves one of the names already; nothing was changed."""


class ServerInUse(ReplayError):
    """A sidecar of this ledger manages this server, and would unload what the replay loads."""


class ServerPaused(ReplayError):
    """Generation is paused, so no probe would be answered."""


class StateInvalid(ReplayError):
    """The state file cannot be read or written, or belongs to another replay."""

    exit_code = ExitCode.USAGE


class CacheUnseen(ReplayError):
    """The server does not find the local copies under their path."""


class BuildChanged(ReplayError):
    """The server's build is not the one that the replay began with."""


class ServerGone(ReplayError):
    """The server does not answer, and did not within the bound."""

    exit_code = ExitCode.UNREACHABLE
