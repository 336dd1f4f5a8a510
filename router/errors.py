"""Errors of the router.

RouterError
├── SpoolUnusable            the rollout spool cannot be written, or another router uses it
└── UpstreamFailed           an attempt at a replica failed
    ├── UpstreamUnreachable      no connection; the request was not sent
    ├── UpstreamAckLost          the replica lost its ack before it answered
    └── UpstreamBroken           no complete answer came after the request was sent
"""

from __future__ import annotations

from policyline.errors import ExitCode, PolicylineError


class RouterError(PolicylineError):
    """Root of the router's errors."""


class SpoolUnusable(RouterError):
    """Rollouts cannot be recorded, so no request may be answered."""

    exit_code = ExitCode.UNREACHABLE


class UpstreamFailed(RouterError):
    """An attempt at a replica failed."""


class UpstreamUnreachable(UpstreamFailed):
    """Nothing was answered, and the request was not sent: another replica may be tried."""


class UpstreamAckLost(UpstreamFailed):
    """The replica lost its ack while another holds one: the request is retried there."""


class UpstreamBroken(UpstreamFailed):
    """The request was sent, and no complete answer came."""
