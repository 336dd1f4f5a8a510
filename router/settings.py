"""Settings of one router."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from policyline.errors import SettingsInvalid
from policyline.ledger.names import DEFAULT_LINE, check_line
from policyline.setting import Setting, check_bounds, parse_address, seconds


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of one router."""

    line: Annotated[str, Setting("--line", "Line: the prefix of every version's name.")] = (
        DEFAULT_LINE
    )
    listen: Annotated[
        str,
        Setting(
            "--listen",
            "Where clients come; port 0 takes a free one and logs it.",
            variable="POLICYLINE_ROUTER_LISTEN",
            metavar="HOST:PORT",
        ),
    ] = "127.0.0.1:8080"
    """Where the command listens; who embeds a router calls `Router.listen`."""
    spool: Annotated[
        Path,
        Setting(
            "--spool",
            "Directory for rollouts that the ledger does not have yet, on a local disk; one router "
            "uses it. Default: ~/.cache/policyline/spool-PORT.",
            computed=True,
        ),
    ] = Path("policyline-spool")
    alias: Annotated[
        str,
        Setting(
            "--alias",
            "Model name that means current, for harnesses with one fixed name. A session keeps the "
            "version that it began with (header x-policyline-session, or the field user).",
        ),
    ] = DEFAULT_LINE
    pin_ttl_s: Annotated[
        float,
        seconds("--pin-ttl", "A session without a request for so long is forgotten."),
    ] = 3600.0
    """Its next request means current."""
    ready_wait_s: Annotated[
        float,
        seconds(
            "--ready-wait",
            "How long a request waits for a version that is not acked yet, or for a slot.",
            minimum=0,
        ),
    ] = 30.0
    spill: Annotated[
        int,
        Setting(
            "--spill",
            "How many more requests than the least loaded replica the holder of a prefix may have.",
            "requests",
            minimum=0,
        ),
    ] = 16
    """Two groups of eight. In `benchmarks/routing.py` 8 spills 1 % of the requests, 6 already
    3 %."""
    max_blocks: Annotated[
        int,
        Setting(
            "--max-blocks",
            "Prefix blocks that are remembered, of all versions: about 150 bytes each.",
            "blocks",
            minimum=1,
        ),
    ] = 400_000
    min_ready: Annotated[
        int,
        Setting(
            "--min-ready",
            "Replicas that must serve current for /health to be 200.",
            "replicas",
            minimum=1,
            variable="POLICYLINE_ROUTER_MIN_READY",
        ),
    ] = 1
    max_in_flight: Annotated[
        int,
        Setting(
            "--max-in-flight", "Requests at once; more are answered 503.", "requests", minimum=1
        ),
    ] = 4096
    max_body_bytes: Annotated[
        int,
        Setting("--max-body", "A longer request is answered 413.", "bytes", minimum=1),
    ] = 64 << 20
    connect_timeout_s: Annotated[
        float,
        seconds("--connect-timeout", "Longest wait for a connection to a replica."),
    ] = 3.0
    read_timeout_s: Annotated[
        float,
        seconds(
            "--read-timeout",
            "Longest time without a byte from a replica; without streaming, of a whole generation.",
        ),
    ] = 600.0
    drain_timeout_s: Annotated[
        float,
        seconds(
            "--drain-timeout",
            "How long requests in flight may go on after SIGTERM.",
            minimum=0,
        ),
    ] = 60.0
    poll_interval_s: Annotated[
        float,
        seconds(
            "--poll-interval",
            "Longest time between two reads of the ledger.",
            variable="POLICYLINE_ROUTER_POLL_INTERVAL",
        ),
    ] = 2.0
    ship_interval_s: Annotated[
        float,
        seconds("--ship-interval", "Time between two batches of rollouts to the ledger."),
    ] = 1.0
    mark_s: Annotated[
        float,
        seconds(
            "--retry-denied-after",
            "How long a vLLM that denied an acked version is not asked for it, unless its sidecar "
            "acks again.",
        ),
    ] = 10.0

    def __post_init__(self) -> None:
        check_line(self.line)
        check_bounds(self)
        parse_address("--listen", self.listen)
        if not self.alias:
            raise SettingsInvalid("--alias is empty")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`."""
        return parse_address("--listen", self.listen)
