"""What the ledger should say, written down a second time: dictionaries, no database.

Each verb either changes the model or raises `No` with the error that the ledger must raise. Nothing
here is taken from the ledger's own code but its words.
"""

from __future__ import annotations

from typing import Literal

from policyline.ledger import RunSettings
from policyline.ledger.errors import (
    Conflict,
    NotFound,
    Refused,
    StaleEpoch,
    StaleGeneration,
)
from tests.simulation.ledger.model_rows import Line, No, Replica, Reported, Run, Version, no


class Model:
    """All lines and runs."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.lines: dict[str, Line] = {}
        self.reserved: dict[tuple[str, int, str], int] = {}
        self.requests: set[str] = set()

    def line(self, name: str) -> Line:
        return self.lines.setdefault(name, Line())

    # publishers

    def open_run(
        self,
        run: str,
        line: str,
        holder: str,
        rules: RunSettings,
        *,
        parent: str | None,
        take: bool,
    ) -> int:
        there = self.runs.get(run)
        if there is not None:
            if there.line != line or not there.open or (there.holder and not take):
                no(Refused)
            there.holder = holder
        else:
            if parent is not None and parent not in self.runs:
                no(NotFound)
            former = self.runs.get(self.line(line).open_run or "")
            if former and former.holder and not take:
                no(Refused)
            if former:
                former.open, former.holder = False, None
            there = self.runs[run] = Run(line, 0, holder, rules)
            self.line(line).candidate = None
        row = self.line(line)
        row.open_run, row.holder = run, holder
        row.epoch += 1
        there.epoch = row.epoch
        self.follow(line)
        return row.epoch

    def release(self, run: str, epoch: int) -> None:
        if self.runs[run].epoch == epoch:
            self.runs[run].holder = None

    def close_run(self, run: str, take: bool) -> None:
        there = self.runs.get(run) or no(NotFound)
        if not there.open:
            return
        if there.holder and not take:
            no(Refused)
        there.open, there.holder = False, None
        row = self.line(there.line)
        row.open_run = row.candidate = None

    def check_epoch(self, run: str, epoch: int) -> None:
        there = self.runs[run]
        if not there.open or there.epoch != epoch:
            row = self.line(there.line)
            raise No(StaleEpoch, None if row.epoch == epoch else row.holder)

    def reserve(self, run: str, epoch: int, attempt: str, version: int | None) -> int:
        self.check_epoch(run, epoch)
        line = self.runs[run].line
        row = self.line(line)
        earlier = self.reserved.get((line, epoch, attempt))
        if earlier is not None:
            if version not in {None, earlier}:
                no(Conflict)
            return earlier
        number = row.next_version if version is None else version
        if number < 1:
            no(Refused)
        if number in row.versions:
            no(Conflict)
        if number < row.next_version:
            no(Refused)
        row.versions[number] = Version(run, attempt)
        row.next_version = number + 1
        self.reserved[line, epoch, attempt] = number
        return number

    def publish(
        self, run: str, epoch: int, version: int, attempt: str, digest: str, *, same: bool
    ) -> bool:
        """Whether it is new. `same`: byte for byte the manifest that is published already."""
        line = self.runs[run].line
        there = self.line(line).versions[version]
        if there.digest is not None:
            return False if same else no(Conflict)
        self.check_epoch(run, epoch)
        if (there.state, there.run, there.attempt) != ("reserved", run, attempt):
            no(Refused)
        there.state, there.digest = "published", digest
        self.line(line).phases += 1
        self.follow(line)
        return True

    def reject(self, run: str, epoch: int, version: int) -> None:
        self.check_epoch(run, epoch)
        there = self.line(self.runs[run].line).versions.get(version)
        if there is not None and there.state == "reserved":
            there.state = "rejected"

    # operators

    def published(self, line: str, version: int) -> Version:
        there = self.line(line).versions.get(version)
        return there if there is not None and there.digest is not None else no(NotFound)

    def pin(self, line: str, version: int, pin: Literal["", "keep", "serve"]) -> None:
        self.published(line, version).pin = pin

    def withdraw(self, line: str, version: int) -> None:
        row = self.line(line)
        there = row.versions.get(version)
        if there is None or there.state == "reserved":
            no(NotFound)
        if row.current == version:
            no(Refused)
        if there.state in {"published", "skipped"}:
            self.drop(row, version)
            self.follow(line)

    def drop(self, row: Line, version: int) -> None:
        row.versions[version].state = "withdrawn"
        if row.candidate == version:
            row.candidate = None

    def roll_back(self, line: str, version: int) -> tuple[int, ...]:
        there = self.published(line, version)
        row = self.line(line)
        if there.state != "published" or there.became is None or there.run != row.open_run:
            no(Refused)
        if row.current == version and row.candidate is None:
            no(Refused)
        later = tuple(
            n
            for n, v in sorted(row.versions.items())
            if n > version and v.state in {"published", "skipped"}
        )
        for number in later:
            row.versions[number].state = "withdrawn"
        row.make_current(version)
        row.epoch += 1
        row.holder = None
        self.runs[there.run].epoch, self.runs[there.run].holder = row.epoch, None
        return later

    def pause(self, line: str, paused: bool) -> bool:
        if line not in self.lines or self.lines[line].epoch == 0:
            no(NotFound)
        changed = self.lines[line].paused != paused
        self.lines[line].paused = paused
        return changed

    def settle(self, line: str, candidate: int, grace_over: bool, timed_out: bool) -> bool:
        if self.line(line).candidate != candidate:
            return False
        return self.follow(line, grace_over=grace_over, timed_out=timed_out)

    def record(self, line: str, batch: str, rollouts: tuple[tuple[str, int], ...]) -> None:
        if not rollouts:
            return
        earlier = self.line(line).batches.get(batch)
        if earlier is not None:
            if earlier != rollouts:
                no(Conflict)
            return
        if self.requests & {request for request, _ in rollouts}:
            no(Conflict)
        self.requests |= {request for request, _ in rollouts}
        self.line(line).batches[batch] = rollouts

    # watchers

    def join(self, line: str, replica: str, incarnation: str | None) -> int:
        former = self.line(line).replicas.get(replica)
        generation = 1 + (former.generation if former else 0)
        self.line(line).replicas[replica] = Replica(generation, incarnation)
        self.follow(line)
        return generation

    def member(self, line: str, replica: str, generation: int) -> Replica:
        there = self.line(line).replicas[replica]
        if there.generation != generation or there.state != "joined":
            no(StaleGeneration)
        return there

    def leave(self, line: str, replica: str, generation: int) -> None:
        there = self.line(line).replicas[replica]
        if there.generation == generation and there.state != "left":
            there.state = "left"
            self.follow(line)

    def declare_lost(self, line: str, replica: str, generation: int, counter: int) -> bool:
        there = self.line(line).replicas.get(replica)
        wanted = (generation, counter, "joined")
        if there is None or (there.generation, there.counter, there.state) != wanted:
            return False
        there.state = "lost"
        self.follow(line)
        return True

    def change_incarnation(
        self, line: str, replica: str, generation: int, incarnation: str | None
    ) -> None:
        there = self.member(line, replica, generation)
        if there.incarnation != incarnation:
            there.incarnation = incarnation
            self.follow(line)

    def beat(self, line: str, replica: str, generation: int, counter: int) -> None:
        self.member(line, replica, generation).counter = counter

    def fetched(self, line: str, replica: str, generation: int, version: int) -> None:
        there = self.member(line, replica, generation)
        said = self.line(line).reported.get((replica, version))
        serves = said is not None and said.state == "acked"
        if not serves or said is None or said.incarnation != there.incarnation:
            self.line(line).reported[replica, version] = Reported("fetched")

    def ack(
        self,
        line: str,
        replica: str,
        generation: int,
        version: int,
        *,
        digest: str,
        incarnation: str,
    ) -> None:
        there = self.member(line, replica, generation)
        published = self.line(line).versions.get(version)
        if published is None or published.digest != digest or there.incarnation != incarnation:
            no(Refused)
        self.line(line).reported[replica, version] = Reported("acked", incarnation)
        self.line(line).phases += 1
        self.follow(line)

    def load_failed(
        self, line: str, replica: str, generation: int, version: int, permanent: bool
    ) -> None:
        self.member(line, replica, generation)
        self.line(line).reported[replica, version] = Reported("rejected" if permanent else "failed")
        self.follow(line)

    def evicted(self, line: str, replica: str, generation: int, version: int) -> None:
        self.member(line, replica, generation)
        self.line(line).reported[replica, version] = Reported("evicted")

    # readiness

    def follow(self, line: str, *, grace_over: bool = False, timed_out: bool = False) -> bool:
        """Move candidate and current as far as they go; whether they moved."""
        row, moved = self.line(line), False
        while row.open_run is not None:
            run = self.runs[row.open_run]
            if row.candidate is None:
                if not self.name_candidate(row):
                    break
            else:
                acked, live = row.acked_by(row.candidate), row.live()
                enough = run.rules.min_ready is not None and len(acked) >= run.rules.min_ready
                if live and len(acked) == len(live):
                    row.make_current(row.candidate)
                elif live and len(row.rejected_by(row.candidate)) == len(live):
                    self.drop(row, row.candidate)
                elif grace_over and enough:
                    row.make_current(row.candidate)
                elif timed_out:
                    self.drop(row, row.candidate)
                else:
                    break
                grace_over = timed_out = False
            moved = True
        return moved

    def name_candidate(self, row: Line) -> bool:
        waiting = sorted(
            number
            for number, version in row.versions.items()
            if version.run == row.open_run
            and version.state == "published"
            and version.became is None
        )
        if not waiting or waiting[-1] < (row.current or 0):
            return False
        for skipped in waiting[:-1]:
            row.versions[skipped].state = "skipped"
        row.candidate = waiting[-1]
        return True

    # what readers see

    def desired(self, line: str) -> list[tuple[int, str]]:
        """(version, role) in the order in which to load."""
        row = self.line(line)
        roles: dict[int, str] = {}
        if row.current is not None:
            roles[row.current] = "current"
        if row.candidate is not None:
            roles[row.candidate] = "candidate"
        for number in self.window(row):
            roles.setdefault(number, "window")
        for number, version in sorted(row.versions.items(), reverse=True):
            if version.pin == "serve" and version.state != "withdrawn":
                roles.setdefault(number, "pinned")
        return list(roles.items())

    def window(self, row: Line) -> list[int]:
        """The former currents of current's run that are still good, from new to old."""
        if row.current is None:
            return []
        here = row.versions[row.current]
        former = [
            (version.became, number)
            for number, version in row.versions.items()
            if version.run == here.run
            and version.state == "published"
            and version.became is not None
            and version.became < (here.became or 0)
        ]
        most = self.runs[here.run].rules.max_staleness
        return [number for _, number in sorted(former, reverse=True)[:most]]
