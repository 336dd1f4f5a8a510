"""What the watcher knows and does, as frozen values: desired, observed, memory, actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from policyline.ledger.line_snapshot import Role
from policyline.ledger.rows import ResidencyState

# --- desired: the ledger


@dataclass(frozen=True, slots=True)
class Version:
    """One published version, and what this replica last reported about it."""

    version: int
    name: str
    digest: str
    role: Role | None
    """Why it is desired; None when it is out of the window."""
    reported: ResidencyState | None = None
    """The last state this replica reported; None for none."""
    incarnation: str | None = None
    """The incarnation of its last ack."""
    manifest: str = field(default="", repr=False)
    """Text of the manifest; untrusted."""

    def acked_by(self, incarnation: str | None) -> bool:
        """Whether that incarnation of this replica's engine holds an ack."""
        return (
            self.reported == "acked" and incarnation is not None and self.incarnation == incarnation
        )

    @property
    def copy_name(self) -> str:
        """Directory name of the local copy.

        The digest in the path keeps vLLM's prefix cache, which is keyed by name and path, from
        ever mixing two contents.
        """
        return f"{self.name}-{self.digest[:16]}"


@dataclass(frozen=True, slots=True)
class Desired:
    """The line as the ledger shows it to this replica."""

    line: str
    incarnation: str | None
    """The engine's incarnation according to the ledger."""
    wanted: tuple[Version, ...]
    """The desired set in the order in which to load: current, candidate, window from new to old,
    pinned."""
    out_of_window: tuple[Version, ...] = ()
    """Published by this ledger and not desired; those that were asked about."""
    paused: bool = False
    """Whether generation shall stand still on the whole line."""

    def version(self, number: int) -> Version | None:
        """The version with that number, if it is here."""
        return next((v for v in (*self.wanted, *self.out_of_window) if v.version == number), None)


# --- observed: engine and disk


@dataclass(frozen=True, slots=True)
class Known:
    """A complete observation."""

    incarnation: str
    adapters: Mapping[str, str]
    """Name -> path, of the whole registry."""
    busy: frozenset[str] | None
    """Names with a request in the engine; None when the engine does not report it."""
    home: str
    """Absolute path of the directory that holds our copies."""
    local: frozenset[str] = frozenset()
    """Names of the complete copies in `home`; see `Version.copy_name`."""
    paused: bool | None = None
    """Whether generation stands still; None when the engine does not report it."""
    pause_cause: str = ""
    """Why `paused` is None."""
    unanswered: str = ""
    """A call of this observation that the engine did not answer in time."""
    verified: frozenset[str] | None = None
    """Which of `local` were hashed by this process; None when that does not matter."""
    stale_caches: frozenset[str] = frozenset()
    """Absolute paths of the copies of ledgers that no sidecar serves any more."""
    over_limit: bool = False
    """The local copies take more than they may."""
    adapter_ids: Mapping[int, int] = field(default_factory=dict)
    """Version -> id in the workers' memory, for those of ours whose id is known."""
    base: str = ""
    """Name of the base model."""
    stepped: str = ""
    """Changes when the engine has emitted something."""

    def path(self, version: Version) -> str:
        """Where our copy of a version is, or will be."""
        return f"{self.home}/{version.copy_name}"

    def lists(self, version: Version) -> bool:
        """Whether the engine lists the version with our path (I1: name and digest)."""
        return self.adapters.get(version.name) == self.path(version)


@dataclass(frozen=True, slots=True)
class Unknown:
    """A failed read: of engine, ledger or disk. It never means empty (I10)."""

    cause: str
    gone: bool = False
    """The engine's process is gone for certain, and its acks with it."""
    silent: bool = False
    """The engine gave no answer at all, in time."""


Observed = Known | Unknown


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a plan; durations in seconds."""

    max_loras: int | None
    """Adapter slots; None when the engine does not report it."""
    linger_s: float
    grace_s: float
    poll_interval_s: float
    take_over: bool = False
    probe_interval_s: float = 30.0
    """The longest time without a scored request that was answered."""
    silent_s: float = 30.0
    """How long the engine may give no answer at all before its acks are void."""


# --- actions


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the ledger which incarnation runs now; None when the engine is gone."""

    incarnation: str | None
    why: str


@dataclass(frozen=True, slots=True)
class ReportGone:
    """Tell the ledger that the engine lacks a version that it had acked."""

    target: Version
    why: str


@dataclass(frozen=True, slots=True)
class ReportForeign:
    """Tell the ledger about an adapter under our names that it did not load."""

    name: str
    path: str
    why: str


@dataclass(frozen=True, slots=True)
class RemoveForeign:
    """Unload a foreign adapter that blocks a name (only with take_over)."""

    version: int
    name: str
    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Prove:
    """Have the base model answer a scored request: only that shows that the engine generates."""

    why: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Freeze generation: requests in flight go on after `Resume` as if nothing had been."""

    why: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Have the engine generate again."""

    why: str


@dataclass(frozen=True, slots=True)
class Reject:
    """Give a version up on this replica."""

    target: Version
    why: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Copy a version to the local disk and verify it."""

    target: Version
    why: str
    restores: bool = False
    """The version is acked already, only its files are missing: a failure costs it nothing."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load a version from the local disk, probe it and ack it."""

    target: Version
    why: str


@dataclass(frozen=True, slots=True)
class Ack:
    """Verify, probe and ack a version that the engine holds already."""

    target: Version
    why: str


@dataclass(frozen=True, slots=True)
class Unload:
    """Evict a version from the engine."""

    target: Version
    why: str


@dataclass(frozen=True, slots=True)
class Free:
    """Free the memory of an unloaded version in the workers, so that it pushes out no other."""

    target: Version
    adapter_id: int
    why: str


@dataclass(frozen=True, slots=True)
class Verify:
    """Hash the copy of a served version, which vLLM may read again, once after our start."""

    target: Version
    why: str


@dataclass(frozen=True, slots=True)
class DeleteOrphans:
    """Delete copies that belong to no version of this ledger, by absolute path."""

    paths: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class DeleteLocal:
    """Delete the local copies of versions."""

    targets: tuple[Version, ...]
    why: str


Action = (
    Announce
    | ReportGone
    | ReportForeign
    | RemoveForeign
    | Prove
    | Pause
    | Resume
    | Reject
    | Fetch
    | Load
    | Ack
    | Unload
    | Free
    | Verify
    | DeleteOrphans
    | DeleteLocal
)

PendingReason = Literal[
    "rejected", "no_slot", "back_off", "blocked", "paused", "hung", "engine", "ledger"
]


@dataclass(frozen=True, slots=True)
class Pending:
    """A desired version that is not served yet and has to wait."""

    name: str
    reason: PendingReason
    why: str
    """One line for people, with the remedy where there is one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, in order, and why anything is left undone."""

    actions: tuple[Action, ...]
    reasons: tuple[str, ...]
    """Why something that differs from desired is not acted on."""
    wake_at_s: float
    """The latest monotonic time for the next observation."""
    pending: tuple[Pending, ...] = ()
    """The desired versions that have to wait."""


# --- what came of an action


@dataclass(frozen=True, slots=True)
class Applied:
    """It was done."""


@dataclass(frozen=True, slots=True)
class Retry:
    """It was not done, and may be tried again later."""

    cause: str
    error: str = "check"
    """Kind of error, for the metrics; `check` when what was seen is not what should be."""
    broke: bool = False
    """The engine broke off: if it comes back as another incarnation, it died of this."""
    hung: bool = False
    """The engine did not answer a scored request, and did no step meanwhile."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """It will never work: the version is wrong."""

    cause: str
    error: str


Outcome = Applied | Retry | Rejected
