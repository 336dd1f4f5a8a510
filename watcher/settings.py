"""Settings of one sidecar, and of its calls to vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from policyline.errors import SettingsInvalid
from policyline.ledger.names import DEFAULT_LINE, check_label, check_line
from policyline.ledger.probe import PROBE_TOLERANCE
from policyline.setting import Setting, check_bounds, parse_address, seconds
from policyline.watcher.vllm.base_url import check_base_url

MAX_SIZE_BYTES: Final = 8 << 30
"""Of a version: above any adapter."""


@dataclass(frozen=True, slots=True)
class SidecarSettings:
    """Settings of one sidecar."""

    replica: Annotated[
        str,
        Setting(
            "--replica",
            "Name of this vLLM server in the ledger, unique within the line. "
            "Default: HOSTNAME-PORT of --vllm.",
            computed=True,
        ),
    ]
    cache: Annotated[
        Path,
        Setting(
            "--cache",
            "Directory for local copies, on a disk that vLLM reads under the same path. "
            "Default: ~/.cache/policyline/REPLICA.",
            computed=True,
        ),
    ]
    """One sidecar uses it."""
    line: Annotated[str, Setting("--line", "Line: the prefix of every version's name.")] = (
        DEFAULT_LINE
    )
    advertise: Annotated[
        str | None,
        Setting(
            "--advertise",
            "Where routers reach this vLLM, if not at --vllm: the URL of an exposed port.",
            metavar="URL",
        ),
    ] = None
    cache_limit_bytes: Annotated[
        int | None,
        Setting(
            "--cache-limit",
            "The most that local copies may take; what vLLM may read again always stays. "
            "Default: what the disk holds.",
            unit="bytes",
            minimum=1,
        ),
    ] = None
    """A version that does not fit next to what vLLM may read again is not fetched."""
    listen: Annotated[
        str,
        Setting(
            "--listen",
            "Where /healthz /readyz /status /metrics are served; port 0 takes a free one.",
            metavar="HOST:PORT",
        ),
    ] = "127.0.0.1:9109"
    """The four show no secrets, but take no key either. A free port is logged."""
    poll_interval_s: Annotated[
        float,
        seconds(
            "--poll-interval",
            "Longest time between two observations of ledger and vLLM; caps every back-off.",
        ),
    ] = 5.0
    linger_s: Annotated[
        float,
        seconds(
            "--linger",
            "How long a version out of the window stays loaded, for requests on their way.",
            minimum=0,
        ),
    ] = 2.0
    grace_s: Annotated[
        float,
        seconds(
            "--grace",
            "How long the local files of an unloaded version stay after the last request on it.",
            minimum=0,
        ),
    ] = 10.0
    heartbeat_s: Annotated[
        float,
        seconds("--heartbeat", "Time between two heartbeats."),
    ] = 2.0
    ttl_s: Annotated[
        float,
        seconds(
            "--ttl",
            "A replica without a heartbeat for so long is declared lost; at least two heartbeats.",
        ),
    ] = 15.0
    """Seven missed heartbeats."""
    stop_timeout_s: Annotated[
        float,
        seconds("--stop-timeout", "How long the action in hand may go on after SIGTERM."),
    ] = 10.0
    fetch_timeout_s: Annotated[
        float,
        seconds(
            "--fetch-timeout",
            "Longest copy of one version from storage; then others get their turn.",
        ),
    ] = 300.0
    max_size_bytes: Annotated[
        int,
        Setting(
            "--max-size",
            "A version whose manifest claims more is rejected before a byte is copied.",
            unit="bytes",
            minimum=1,
        ),
    ] = MAX_SIZE_BYTES
    probe_tolerance: Annotated[
        float,
        Setting(
            "--probe-tolerance",
            "Largest difference between a probe and the first replica's on the same engine build.",
            unit="nats",
            minimum=0,
        ),
    ] = PROBE_TOLERANCE
    probe_interval_s: Annotated[
        float,
        seconds(
            "--probe-interval",
            "Longest time without a scored request that shows that vLLM generates.",
        ),
    ] = 30.0
    """A call that was not answered in time is followed by such a request at once."""
    probe_timeout_s: Annotated[
        float,
        seconds(
            "--probe-timeout",
            "A vLLM that neither answers a scored request nor does a step for so long hangs.",
        ),
    ] = 30.0
    reference_tolerance: Annotated[
        float,
        Setting(
            "--reference-tolerance",
            "Largest mean difference between a probe and the trainer's own values without a "
            "warning.",
            unit="nats",
            minimum=0,
        ),
    ] = 0.1
    """Noise is up to 0.03, another policy 0.2 and more."""
    replace: Annotated[
        bool, Setting("--replace", "Replace a running sidecar of the same replica.")
    ] = False
    take_over: Annotated[
        bool,
        Setting(
            "--take-over",
            "Remove adapters that another ledger or hand loaded under names of this line.",
            variable="POLICYLINE_TAKE_OVER_ADAPTERS",
        ),
    ] = False

    def __post_init__(self) -> None:
        check_line(self.line)
        check_label("replica", self.replica)
        check_bounds(self)
        parse_address("--listen", self.listen)
        if self.ttl_s < 2 * self.heartbeat_s:
            raise SettingsInvalid(
                f"a ttl of {self.ttl_s:g} s is below two heartbeats of {self.heartbeat_s:g} s",
                hint="raise --ttl or lower --heartbeat",
            )
        if self.advertise is not None:
            try:
                check_base_url(self.advertise)
            except ValueError as error:
                raise SettingsInvalid(f"advertise: {error}") from error

    @property
    def listen_host(self) -> str:
        """The interface of the status server."""
        return parse_address("--listen", self.listen)[0]

    @property
    def listen_port(self) -> int:
        """Its port; 0 takes a free one."""
        return parse_address("--listen", self.listen)[1]


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """Longest wait for a whole answer of vLLM, for each kind of call."""

    connect_s: Annotated[
        float,
        seconds("--engine-connect-timeout", "To open a connection to vLLM."),
    ] = 3.0
    observe_s: Annotated[
        float,
        seconds("--engine-observe-timeout", "vLLM's metrics, registry and version."),
    ] = 5.0
    """They are answered by the API process, in milliseconds."""
    load_s: Annotated[
        float,
        seconds("--engine-load-timeout", "A load: vLLM reads the files between two steps."),
    ] = 60.0
    unload_s: Annotated[
        float,
        seconds("--engine-unload-timeout", "An unload, which waits for a load of the same name."),
    ] = 10.0
    score_s: Annotated[
        float,
        seconds(
            "--engine-score-timeout",
            "A probe, a scored request: the first of a server compiles kernels.",
        ),
    ] = 60.0
    """17 s seen on a CPU for the first one."""
    complete_s: Annotated[
        float,
        seconds(
            "--engine-complete-timeout", "A completion, which may wait for a slot in the batch."
        ),
    ] = 300.0
    control_s: Annotated[
        float,
        seconds(
            "--engine-control-timeout",
            "Pause, resume, residency and prefix cache, which vLLM answers between two steps.",
        ),
    ] = 30.0

    def __post_init__(self) -> None:
        check_bounds(self)
