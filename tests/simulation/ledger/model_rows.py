"""What the model knows: lines, runs, versions and replicas, as dictionaries and no database."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, NoReturn

from policyline.ledger import RunSettings
from policyline.ledger.errors import LedgerError

NOBODY: Final = "nobody"


class No(Exception):
    """The ledger must refuse with this error; for a stale epoch, also by whom it is held."""

    def __init__(self, kind: type[LedgerError], holder: str | None = NOBODY) -> None:
        super().__init__(kind.__name__)
        self.kind = kind
        self.holder = holder


def no(kind: type[LedgerError]) -> NoReturn:
    raise No(kind)


@dataclass
class Run:
    line: str
    epoch: int
    holder: str | None
    rules: RunSettings
    open: bool = True


@dataclass
class Version:
    run: str
    attempt: str
    state: str = "reserved"
    digest: str | None = None
    pin: Literal["", "keep", "serve"] = ""
    became: int | None = None


@dataclass
class Replica:
    generation: int
    incarnation: str | None
    state: str = "joined"
    counter: int = 0


@dataclass
class Reported:
    state: str
    incarnation: str | None = None


@dataclass
class Line:
    next_version: int = 1
    epoch: int = 0
    holder: str | None = None
    """Who the present epoch was given to; None when a rollback made it."""
    open_run: str | None = None
    current: int | None = None
    candidate: int | None = None
    paused: bool = False
    became: int = 0
    phases: int = 0
    versions: dict[int, Version] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    reported: dict[tuple[str, int], Reported] = field(default_factory=dict)
    batches: dict[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)

    def live(self) -> list[str]:
        return [name for name, replica in self.replicas.items() if replica.state == "joined"]

    def acked_by(self, version: int) -> tuple[str, ...]:
        found = []
        for name in sorted(self.live()):
            said = self.reported.get((name, version))
            present = self.replicas[name].incarnation
            if said and said.state == "acked" and present and said.incarnation == present:
                found.append(name)
        return tuple(found)

    def rejected_by(self, version: int) -> list[str]:
        found = []
        for name in self.live():
            said = self.reported.get((name, version))
            if said is not None and said.state == "rejected":
                found.append(name)
        return found

    def make_current(self, version: int) -> None:
        self.became += 1
        self.versions[version].became = self.became
        self.current, self.candidate = version, None
