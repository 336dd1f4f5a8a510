"""Every verb of watchers, in any order, with memberships that are over as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from policyline.ledger import EngineFacts, Membership
from tests.simulation.ledger.harness import LINES, Harness
from tests.simulation.ledger.publishers import lines, rarely, versions

replicas = st.sampled_from(("r0", "r1"))


@dataclass
class Process:
    """A replica's vLLM process: its incarnations never come back once another has been seen."""

    number: int = 0

    def present(self) -> str:
        return f"{1000 + self.number}.0"

    def restart(self) -> str:
        self.number += 1
        return self.present()


class Watchers(Harness):
    """Rules of watchers."""

    members = Harness.members

    def __init__(self) -> None:
        super().__init__()
        self.processes: dict[tuple[str, str], Process] = {}

    @initialize(target=members)
    def begin_with_a_replica(self) -> Membership:
        """So that more comes of the steps after it."""
        return self.joined(LINES[0], "r0", "same")

    def process(self, line: str, replica: str) -> Process:
        return self.processes.setdefault((line, replica), Process())

    @rule(
        target=members,
        line=lines,
        replica=replicas,
        incarnation=st.sampled_from(("same", "same", "new", "none")),
    )
    def join(self, line: str, replica: str, incarnation: str) -> Membership:
        return self.joined(line, replica, incarnation)

    def joined(self, line: str, replica: str, incarnation: str) -> Membership:
        self.line = line
        known = self.incarnation(line, replica, incarnation)
        member, generation = self.both(
            lambda: self.by().join(line, replica, EngineFacts(known, "build", 6)),
            lambda: self.model.join(line, replica, known),
        )
        assert member == Membership(line, replica, generation)
        return Membership(line, replica, generation)

    def incarnation(self, line: str, replica: str, which: str) -> str | None:
        if which == "none":
            return None
        process = self.process(line, replica)
        return process.restart() if which == "new" else process.present()

    @rule(member=members)
    def leave(self, member: Membership) -> None:
        self.of(member, lambda m: self.by().leave(m, "a test"), self.model.leave)

    def of(
        self,
        member: Membership,
        real: Callable[[Membership], object],
        model: Callable[..., object],
    ) -> None:
        self.line = member.line
        self.both(
            lambda: real(member),
            lambda: model(member.line, member.replica, member.generation),
        )

    @rule(member=members, off=rarely)
    def declare_lost(self, member: Membership, off: bool) -> None:
        self.line = member.line
        there = self.model.line(member.line).replicas[member.replica]
        lost, wanted = self.both(
            lambda: self.by().declare_lost(
                member.line,
                member.replica,
                generation=member.generation,
                counter=there.counter + off,
                reason="a test",
            ),
            lambda: self.model.declare_lost(
                member.line, member.replica, member.generation, there.counter + off
            ),
        )
        assert lost == wanted

    @rule(member=members, which=st.sampled_from(("same", "new", "none")))
    def change_incarnation(self, member: Membership, which: str) -> None:
        known = self.incarnation(member.line, member.replica, which)
        self.of(
            member,
            lambda m: self.by().change_incarnation(m, EngineFacts(known, "build", 6)),
            lambda a, b, c: self.model.change_incarnation(a, b, c, known),
        )

    @rule(member=members, counter=st.integers(1, 9))
    def beat(self, member: Membership, counter: int) -> None:
        self.of(
            member,
            lambda m: self.by().beat(m, counter),
            lambda a, b, c: self.model.beat(a, b, c, counter),
        )

    def digest_of(self, line: str, version: int) -> str:
        there = self.model.line(line).versions.get(version)
        return (there.digest if there else None) or "0" * 64

    @rule(member=members, version=versions)
    def fetched(self, member: Membership, version: int) -> None:
        digest = self.digest_of(member.line, version)
        self.of(
            member,
            lambda m: self.by().fetched(m, version, digest),
            lambda a, b, c: self.model.fetched(a, b, c, version),
        )

    @rule(member=members, version=versions, wrong=st.sampled_from(("", "", "", "digest", "life")))
    def ack(self, member: Membership, version: int, wrong: str) -> None:
        digest = "f" * 64 if wrong == "digest" else self.digest_of(member.line, version)
        incarnation = self.process(member.line, member.replica).present()
        self.acknowledge(member, version, digest, "1.0" if wrong == "life" else incarnation)

    @rule(member=members)
    def ack_the_candidate(self, member: Membership) -> None:
        candidate = self.model.line(member.line).candidate
        if candidate is not None:
            self.ack(member, candidate, "")

    def acknowledge(self, member: Membership, version: int, digest: str, incarnation: str) -> None:
        self.of(
            member,
            lambda m: self.by().ack(
                m,
                version,
                digest=digest,
                incarnation=incarnation,
                build="build",
                probe=(-0.5,),
                phases={"load": 0.1},
            ),
            lambda a, b, c: self.model.ack(
                a, b, c, version, digest=digest, incarnation=incarnation
            ),
        )

    @rule(member=members, version=versions, permanent=st.booleans())
    def load_failed(self, member: Membership, version: int, permanent: bool) -> None:
        digest = self.digest_of(member.line, version)
        self.of(
            member,
            lambda m: self.by().load_failed(
                m, version, digest=digest, reason="a test", permanent=permanent
            ),
            lambda a, b, c: self.model.load_failed(a, b, c, version, permanent),
        )

    @rule(member=members, version=versions)
    def evicted(self, member: Membership, version: int) -> None:
        digest = self.digest_of(member.line, version)
        self.of(
            member,
            lambda m: self.by().evicted(m, version, digest=digest, reason="outside"),
            lambda a, b, c: self.model.evicted(a, b, c, version),
        )

    @rule(member=members, version=versions)
    def report(self, member: Membership, version: int) -> None:
        """Events that change no state."""
        self.of(
            member,
            lambda m: self.by().foreign_adapter_seen(m, "strange", "/x", "a test"),
            self.model.member,
        )
        self.of(
            member,
            lambda m: self.by().probe_mismatch(
                m, version, digest="0" * 64, reference="r0", difference=0.5
            ),
            self.model.member,
        )
