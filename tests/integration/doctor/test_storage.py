"""The storage measured: on one view, on a slow one, on another one, and on a real FUSE mount."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from policyline.doctor import run
from policyline.doctor.settings import Target
from policyline.doctor.storage import PREFIX, StorageFindings, examine_storage, storage_lines

WITHIN_S = 20.0


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    directory = tmp_path / "storage"
    directory.mkdir()
    return directory


def measure(
    storage: Path, reader: Path | None = None, timeout_s: float = WITHIN_S
) -> StorageFindings:
    return examine_storage(str(storage), reader, timeout_s=timeout_s, stop=threading.Event())


def test_one_local_view(storage: Path) -> None:
    (storage / "trl-policy-v1").mkdir()

    found = measure(storage)

    assert found.failure is None
    for seconds in (found.written_s, found.renamed_s, found.missing_s):
        assert seconds is not None
        assert seconds < 1
    assert (found.has_events, found.torn, found.reader_writable) == (True, 0, None)
    assert (found.free_bytes or 0) > 0
    assert [p.name for p in storage.iterdir()] == ["trl-policy-v1"]


@contextlib.contextmanager
def mirrored(storage: Path, reader: Path, delay_s: float) -> Iterator[None]:
    """Show in `reader` what is in `storage`, each file in two halves, `delay_s` later."""
    stop = threading.Event()

    def mirror() -> None:
        while not stop.wait(0.005):
            for directory in storage.glob(f"{PREFIX}*"):
                if directory.name.endswith("-events"):
                    (reader / directory.name).mkdir(exist_ok=True)
                for file in directory.glob("bytes"):
                    shown = reader / directory.name / "bytes"
                    if shown.exists():
                        continue
                    stop.wait(delay_s)
                    with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                        content = file.read_bytes()
                        shown.parent.mkdir(exist_ok=True)
                        shown.write_bytes(content[: len(content) // 2])
                        stop.wait(delay_s)
                        shown.write_bytes(content)

    reader.mkdir()
    thread = threading.Thread(target=mirror)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_slow_view_that_shows_halves(storage: Path, tmp_path: Path) -> None:
    with mirrored(storage, tmp_path / "reader", delay_s=0.2):
        found = measure(storage, tmp_path / "reader")

    assert found.written_s is not None
    assert found.written_s >= 0.4
    assert found.torn > 0
    assert found.has_two_views
    assert found.reader_writable is True
    assert list(storage.iterdir()) == []


def test_a_second_view_that_is_the_first_one_says_so(storage: Path, tmp_path: Path) -> None:
    other_name = tmp_path / "reader"
    other_name.symlink_to(storage)

    found = measure(storage, other_name)

    assert (found.has_two_views, found.reader_writable) == (True, None)
    assert found.reader_unknown == f"it is the same directory as {storage}"
    (line,) = [li for li in storage_lines(found) if li.name == "storage.sidecar_read_only"]
    assert (line.status, line.value) == ("skip", f"{other_name}: {found.reader_unknown}")
    assert "--sidecar-storage" in line.remedy


def test_another_storage_is_not_the_same(storage: Path, tmp_path: Path) -> None:
    (tmp_path / "reader").mkdir()

    found = measure(storage, tmp_path / "reader", timeout_s=0.2)

    assert (found.failure, found.written_s) == (None, None)
    assert list(storage.iterdir()) == []
    assert list((tmp_path / "reader").iterdir()) == []


def test_a_stop_ends_every_wait_and_leaves_nothing(storage: Path, tmp_path: Path) -> None:
    (tmp_path / "reader").mkdir()
    stop = threading.Event()
    ended: list[StorageFindings] = []
    running = threading.Thread(
        target=lambda: ended.append(
            examine_storage(str(storage), tmp_path / "reader", timeout_s=600.0, stop=stop)
        )
    )
    running.start()
    while not list(storage.iterdir()):
        assert running.is_alive()

    stop.set()
    running.join(WITHIN_S)

    assert not running.is_alive()
    assert (len(ended), list(storage.iterdir())) == (1, [])


@pytest.mark.parametrize(
    ("what", "remedy"), [("nowhere", "mkdir -p"), ("file", "it is a file: name a directory")]
)
def test_no_storage_at_all(tmp_path: Path, what: str, remedy: str) -> None:
    (tmp_path / "file").touch()

    found = measure(tmp_path / what)

    assert found.failure is not None
    assert found.failure.unreachable
    assert remedy in found.failure.hint


def test_a_readers_side_that_is_not_there(storage: Path, tmp_path: Path) -> None:
    found = measure(storage, tmp_path / "nowhere")

    assert found.failure is not None
    assert str(tmp_path / "nowhere") in found.failure.cause
    assert list(storage.iterdir()) == []


NEGATIVE_S = 1.0
CAN_MOUNT = shutil.which("bindfs") is not None and Path("/dev/fuse").exists()


@pytest.fixture
def fuse(storage: Path, tmp_path: Path) -> Iterator[Path]:
    """The storage mounted read-only by FUSE, which remembers a missing path for a second."""
    point = tmp_path / "fuse"
    point.mkdir()
    remember = f"negative_timeout={NEGATIVE_S},entry_timeout={NEGATIVE_S}"
    mounting = subprocess.run(
        ["bindfs", "-r", "-o", remember, storage, point], check=False, capture_output=True
    )
    if mounting.returncode != 0:
        pytest.skip(f"this user may not mount: {mounting.stderr.decode()}")
    try:
        yield point
    finally:
        subprocess.run(["fusermount3", "-u", point], check=True)


@pytest.mark.skipif(not CAN_MOUNT, reason="needs bindfs and /dev/fuse")
def test_a_fuse_mount_remembers_what_was_missing(storage: Path, fuse: Path) -> None:
    found = measure(storage, fuse)

    assert found.missing_s is not None
    assert found.renamed_s is not None
    assert NEGATIVE_S * 0.8 <= found.missing_s < NEGATIVE_S + 2
    assert found.renamed_s < found.missing_s
    assert (found.has_events, found.reader_writable) == (False, False)
    assert list(storage.iterdir()) == []


async def test_the_whole_examination_gives_a_dead_mount_up(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def hangs(*_arguments: object, **_options: object) -> StorageFindings:
        released.wait(WITHIN_S)
        raise OSError("never")

    monkeypatch.setattr(run, "examine_storage", hangs)
    monkeypatch.setattr(run, "_STOP_S", 0.0)
    begun = time.monotonic()

    report = await run.examine(Target(storage=str(storage), timeout_s=0.1), lambda _text: None)
    released.set()

    (line,) = report.lines
    assert (line.status, line.unreachable, report.exit_code) == ("fail", True, 3)
    assert time.monotonic() - begun < WITHIN_S / 2
