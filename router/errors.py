"""Errors of the router.

RouterError
├── SpoolUnusable          the rollout spool cannot be written, or another router has it
└── UpstreamFailed         a replica could not be asked, or broke off
    ├── UpstreamUnreachable    nothing of the request was answered
    ├── UpstreamVoided         its ack was voided before anything was answered
    └── UpstreamBroken         the answer broke off in the middle
"""

from __future__ import annotations

from policyline.errors import ExitCode, PolicylineError


class RouterError(PolicylineError):
    """Root of the router's errors."""


class SpoolUnusable(RouterError):
    """Rollouts could not be noted, so none may be answered."""

    exit_code = ExitCode.UNREACHABLE


class UpstreamFailed(RouterError):
    """A replica did not do its part."""


class UpstreamUnreachable(UpstreamFailed):
    """No byte of an answer came: another replica may be asked."""


class UpstreamVoided(UpstreamFailed):
    """The replica may not answer any more and another may: that one is asked."""


class UpstreamBroken(UpstreamFailed):
    """The answer broke off after it had begun."""
