"""The steps that lie between `publish` and an ack at least, each done and timed by itself."""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from policyline.ledger import Claim, EngineFacts, Ledger, Membership
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.manifest import FileEntry, Manifest, version_digest
from policyline.ledger.names import DEFAULT_LINE
from policyline.ledger.probe import PROBE_TOKENS
from policyline.publisher.check.safetensors_header import first_not_finite
from policyline.publisher.check.source import WEIGHTS_NAME, inspect
from policyline.watcher.vllm.client import EngineClient

COMMITS = ("commit reserved", "commit published", "commit acked")
WHOLE = ("write", "hash", "hash", "copy", "load", "probe", *COMMITS)
"""What lies between `publish` and the ack at least."""
OWN = ("write", "hash", "check", *COMMITS[:2])
"""What `publish` itself must do: it also reads every number, to refuse NaN."""


class StepTimes:
    """Durations of steps that were timed alone, in seconds."""

    def __init__(self) -> None:
        self._samples: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timing(self, step: str) -> Iterator[None]:
        """Time the block as one sample of `step`."""
        begun = time.perf_counter()
        yield
        self._samples[step].append(time.perf_counter() - begun)

    def median(self, step: str) -> float:
        """Median in seconds."""
        return statistics.median(self._samples[step])

    def total(self, steps: tuple[str, ...]) -> float:
        """Sum of the medians, a step that occurs twice counted twice."""
        return sum(self.median(step) for step in steps)


class Alone:
    """Does each mandated step by itself, with the plainest code there is.

    Args:
        folder: on the disk that the pipeline uses.
        engine: a double of its own, so that the measured one's slots are left alone.
        times: where the durations go.
    """

    def __init__(self, folder: Path, engine: EngineClient, times: StepTimes) -> None:
        self._folder = folder
        self._engine = engine
        self._times = times
        self._ledger, self._claim, self._member = _ledger_alone(folder)

    def close(self) -> None:
        """Close the ledger."""
        self._ledger.close()

    async def run(self, adapter: Path, number: int) -> None:
        """Time every step once with the files of `adapter`."""
        contents = _contents(adapter)
        stored = self._folder / f"step-v{number}"
        with self._times.timing("write"):
            _write(contents, self._folder / f".step-v{number}", stored)
        with self._times.timing("hash"):
            digests = {name: _hash(adapter / name) for name in contents}
        local = self._folder / f"copy-v{number}"
        with self._times.timing("copy"):
            _copy(stored, local)
        with self._times.timing("check"):
            _check(adapter)
        await self._serve(local, f"step-v{number}")
        sizes = {name: len(content) for name, content in contents.items()}
        self._commit([FileEntry(name, sizes[name], digests[name]) for name in sorted(contents)])
        shutil.rmtree(stored)
        shutil.rmtree(local)

    async def _serve(self, path: Path, name: str) -> None:
        with self._times.timing("load"):
            await self._engine.load(name, str(path))
        with self._times.timing("probe"):
            await self._engine.score(name, PROBE_TOKENS)
        await self._engine.unload(name)

    def _commit(self, files: list[FileEntry]) -> None:
        with self._times.timing("commit reserved"):
            reservation = self._ledger.reserve(self._claim)
        digest = version_digest(files)
        manifest = Manifest(
            line=reservation.line,
            run=reservation.run,
            version=reservation.version,
            epoch=reservation.epoch,
            attempt=reservation.attempt,
            digest=digest,
            files=tuple(files),
            anchor=reservation.anchor,
        )
        with self._times.timing("commit published"):
            self._ledger.publish(self._claim, manifest)
        with self._times.timing("commit acked"):
            self._ledger.ack(
                self._member,
                reservation.version,
                digest=digest,
                incarnation="1.0",
                build="",
                probe=[-1.0] * (len(PROBE_TOKENS) - 1),
                fetched=True,
            )


def _ledger_alone(folder: Path) -> tuple[Ledger, Claim, Membership]:
    url = str(folder / "alone.db")
    upgrade_url(url)
    ledger = Ledger(url)
    member = ledger.join(DEFAULT_LINE, "r0", EngineFacts("1.0"))
    return ledger, ledger.open_run("alone"), member


def _contents(adapter: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(adapter.iterdir())}


def _write(contents: dict[str, bytes], staging: Path, final: Path) -> None:
    """Write, fsync files and directory, rename, fsync the parent."""
    staging.mkdir()
    for name, content in contents.items():
        with (staging / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    _sync(staging)
    staging.rename(final)
    _sync(final.parent)


def _copy(source: Path, target: Path) -> None:
    """Copy plain files in pieces of 1 MiB, the fastest of Python's ways on this size."""
    target.mkdir()
    for path in source.iterdir():
        with path.open("rb") as reader, (target / path.name).open("wb") as writer:
            while piece := reader.read(1 << 20):
                writer.write(piece)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(adapter: Path) -> None:
    header = inspect(adapter).headers[WEIGHTS_NAME]
    with (
        (adapter / WEIGHTS_NAME).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        assert first_not_finite(content, header) is None
