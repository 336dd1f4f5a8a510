"""Publishing against a real ledger and a real directory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policyline.ledger import Ledger, RunSettings
from policyline.ledger.errors import Conflict, LedgerUnavailable, Refused
from policyline.ledger.manifest import FileEntry, Manifest
from policyline.publisher import (
    BaseModelInvalid,
    CheckFailed,
    MetadataInvalid,
    Publisher,
    PublisherClosed,
)
from policyline.storage import DirectoryStorage, Staging, StorageFull, StorageUnavailable
from tests.integration.publisher.workspace import RUN, Workspace, check_at_rest, versions
from tests.unit.publisher.builders import key, tensors, write_adapter


def test_a_version_is_durable_described_and_in_the_ledger(
    workspace: Workspace, ledger: Ledger
) -> None:
    settings = RunSettings(max_staleness=2)
    with Publisher(ledger, workspace.storage, run=RUN, settings=settings) as publisher:
        published = publisher.publish(workspace.adapter, metadata={"step": 40, "note": "é"})
    assert published.version == 1
    assert published.name == "trl-policy-v1"
    assert published.path == str(workspace.root / "trl-policy-v1")
    assert set(published.phases) == {"save", "digest", "check", "commit", "append"}
    row = versions(ledger)[1]
    assert (row.state, row.digest, row.size_bytes) == (
        "published",
        published.digest,
        published.size_bytes,
    )
    manifest = Manifest.from_text(row.manifest or "")
    assert manifest.metadata == {"step": 40, "note": "é", "zero_init": False}
    assert manifest.adapter == {
        "r": 2,
        "lora_alpha": 4.0,
        "target_modules": ["down_proj", "k_proj", "q_proj"],
        "base_model": "tiny",
        "dtype": "F32",
    }
    assert manifest.anchor.seq == row.reserved_seq
    assert ledger.run(RUN).max_staleness == 2
    assert ledger.run(RUN).holder is None
    assert {p.phase for p in ledger.phases(version=1)} == set(published.phases)
    check_at_rest(ledger, workspace.root)


@pytest.mark.parametrize(
    ("b", "given", "recorded"),
    [(0.0, {}, True), (0.0, {"zero_init": False}, False), (1e-30, {}, False), (1.0, {}, False)],
)
def test_whether_an_adapter_changes_anything_is_read_from_its_bytes(
    workspace: Workspace, ledger: Ledger, b: float, given: dict[str, Any], recorded: bool
) -> None:
    whole = tensors()
    for name, tensor in whole.items():
        if "lora_B" in name:
            tensor.fill(0.0)
    next(t for name, t in reversed(whole.items()) if "lora_B" in name).flat[-1] = b
    adapter = write_adapter(workspace.root.parent / "by-hand", weights=whole)
    with Publisher(ledger, workspace.storage, run=RUN) as publisher:
        publisher.publish(adapter, metadata=given)
    manifest = Manifest.from_text(versions(ledger)[1].manifest or "")
    assert manifest.metadata["zero_init"] is recorded


def test_the_directory_is_only_read(workspace: Workspace, ledger: Ledger) -> None:
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in workspace.adapter.iterdir()}
    with Publisher(ledger, workspace.storage, run=RUN) as publisher:
        publisher.publish(workspace.adapter)
    after = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in workspace.adapter.iterdir()}
    assert before == after


def test_the_same_bytes_again_are_a_new_version(workspace: Workspace, ledger: Ledger) -> None:
    with Publisher(ledger, workspace.storage, run=RUN) as publisher:
        first, second = (publisher.publish(workspace.adapter) for _ in range(2))
    assert (first.version, second.version) == (1, 2)
    assert first.digest == second.digest
    check_at_rest(ledger, workspace.root)


def test_a_named_version_can_be_retried(workspace: Workspace, ledger: Ledger) -> None:
    with Publisher(ledger, workspace.storage, run=RUN) as publisher:
        first = publisher.publish(workspace.adapter, version=7)
        events = ledger.head()
        again = publisher.publish(workspace.adapter, version=7)
        assert ledger.head() == events
        assert (again.version, again.digest, again.path) == (7, first.digest, first.path)
        with pytest.raises(Conflict, match=r"trl-policy-v7 was published .*leave the number out"):
            publisher.publish(workspace.another(5), version=7)
        assert ledger.head() == events
        assert publisher.publish(workspace.adapter).version == 8
    check_at_rest(ledger, workspace.root)


def test_a_number_of_another_run_is_taken_whatever_its_bytes(
    workspace: Workspace, ledger: Ledger
) -> None:
    with Publisher(ledger, workspace.storage, run=RUN) as publisher:
        publisher.publish(workspace.adapter, version=7)
    with (
        Publisher(ledger, workspace.storage, run="run-2") as publisher,
        pytest.raises(Conflict, match="in run 'run-1'"),
    ):
        publisher.publish(workspace.adapter, version=7)


def test_a_rejected_number_is_never_given_again(workspace: Workspace, ledger: Ledger) -> None:
    weights = tensors()
    weights[key(0, "mlp.down_proj", "B")][0, 0] = np.nan
    bad = write_adapter(workspace.adapter.with_name("bad"), weights=weights)
    with Publisher(ledger, workspace.storage, run=RUN) as publisher:
        with pytest.raises(CheckFailed, match="holds NaN or infinity; training has diverged"):
            publisher.publish(bad)
        assert versions(ledger)[1].state == "rejected"
        assert "holds NaN" in versions(ledger)[1].reason
        check_at_rest(ledger, workspace.root)
        with pytest.raises(Conflict, match="trl-policy-v1 is taken: rejected"):
            publisher.publish(workspace.adapter, version=1)
        assert publisher.publish(workspace.adapter).version == 2
    check_at_rest(ledger, workspace.root)


def test_plain_bad_input_costs_no_number(workspace: Workspace, ledger: Ledger) -> None:
    def without_config(directory: Path) -> None:
        (directory / "adapter_config.json").unlink()

    def pickled(directory: Path) -> None:
        (directory / "adapter_model.bin").touch()

    def cut_off(directory: Path) -> None:
        os.truncate(directory / "adapter_model.safetensors", 500)

    def dora(directory: Path) -> None:
        config = json.loads((directory / "adapter_config.json").read_text())
        (directory / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))

    with Publisher(ledger, workspace.storage, run=RUN, max_lora_rank=8) as publisher:
        before = ledger.head()
        for number, damage in enumerate((without_config, pickled, cut_off, dora)):
            directory = workspace.another(number)
            damage(directory)
            with pytest.raises(CheckFailed):
                publisher.publish(directory)
        with pytest.raises(CheckFailed, match="rank 16 is above"):
            publisher.publish(write_adapter(workspace.adapter.with_name("high"), rank=16))
        for metadata in (
            {"loss": math.nan},
            {"x": object()},
            {"x": "\ud800"},
            {1: {2, 3}},
            {"log": "x" * (1 << 20)},
        ):
            with pytest.raises(MetadataInvalid):
                publisher.publish(workspace.adapter, metadata=metadata)  # type: ignore[arg-type]  # what an untyped caller may pass
        assert ledger.head() == before
        assert publisher.publish(workspace.adapter).version == 1
    check_at_rest(ledger, workspace.root)


class TestVersionBefore:
    """A run's versions look alike; what differs is a shard, or another adapter."""

    def publish_and_refuse(
        self, workspace: Workspace, ledger: Ledger, other: Path, says: str
    ) -> None:
        with Publisher(ledger, workspace.storage, run=RUN) as publisher:
            publisher.publish(workspace.adapter)
            before = ledger.head()
            with pytest.raises(CheckFailed, match=says):
                publisher.publish(other)
            assert ledger.head() == before
        # a publisher that knows the version before only from the storage says the same
        with (
            Publisher(ledger, workspace.storage, run=RUN) as publisher,
            pytest.raises(CheckFailed, match=says),
        ):
            publisher.publish(other)

    def test_another_rank(self, workspace: Workspace, ledger: Ledger) -> None:
        other = write_adapter(workspace.adapter.with_name("other"), rank=4)
        self.publish_and_refuse(
            workspace, ledger, other, r"shape \(4, 32\), in trl-policy-v1 it has"
        )

    def test_a_shard(self, workspace: Workspace, ledger: Ledger) -> None:
        shard = write_adapter(workspace.adapter.with_name("shard"), weights=tensors(layers=1))
        self.publish_and_refuse(workspace, ledger, shard, "is missing, trl-policy-v1 has it")

    def test_another_run_may_differ(self, workspace: Workspace, ledger: Ledger) -> None:
        with Publisher(ledger, workspace.storage, run=RUN) as publisher:
            publisher.publish(workspace.adapter)
        with Publisher(ledger, workspace.storage, run="run-2") as publisher:
            publisher.publish(write_adapter(workspace.adapter.with_name("other"), rank=4))

    def test_a_withdrawn_version_counts_no_more(self, workspace: Workspace, ledger: Ledger) -> None:
        other = write_adapter(workspace.adapter.with_name("other"), rank=4)
        with Publisher(ledger, workspace.storage, run=RUN) as publisher:
            publisher.publish(workspace.adapter)
            ledger.withdraw("trl-policy", 1, "a mistake")
            assert publisher.publish(other).version == 2

    def test_a_version_whose_files_are_gone(self, workspace: Workspace, ledger: Ledger) -> None:
        with Publisher(ledger, workspace.storage, run=RUN) as publisher:
            publisher.publish(workspace.adapter)
        workspace.storage.quarantine("trl-policy-v1", "x", "the test takes it away")
        with Publisher(ledger, workspace.storage, run=RUN) as publisher:
            assert publisher.publish(workspace.another(2)).version == 2


def test_fits_the_base_model(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    with pytest.raises(BaseModelInvalid):
        Publisher(ledger, workspace.storage, run=RUN, base_model=base)
    assert ledger.runs() == []
    config = {"model_type": "qwen2", "num_hidden_layers": 1, "hidden_size": 16}
    config |= {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    (base / "config.json").write_text(json.dumps(config))
    with (
        Publisher(ledger, workspace.storage, run=RUN, base_model=base) as publisher,
        pytest.raises(CheckFailed, match=r"layers\.1.*does not exist: .*says 1 layers"),
    ):
        publisher.publish(workspace.adapter)


def test_an_absent_storage_opens_no_run(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(StorageUnavailable, match="does not exist"):
        Publisher(ledger, DirectoryStorage(tmp_path / "unmounted"), run=RUN)
    assert ledger.head()[0] == 0


def test_a_closed_publisher_publishes_nothing(workspace: Workspace, ledger: Ledger) -> None:
    publisher = Publisher(ledger, workspace.storage, run=RUN)
    publisher.close()
    publisher.close()
    with pytest.raises(PublisherClosed, match="of run 'run-1' is closed"):
        publisher.publish(workspace.adapter)


def test_a_live_publisher_is_not_pushed_aside_by_accident(
    workspace: Workspace, ledger: Ledger
) -> None:
    with Publisher(ledger, workspace.storage, run=RUN):
        with pytest.raises(Refused, match="--take-over"):
            Publisher(ledger, workspace.storage, run=RUN)
        with pytest.raises(Refused, match="--take-over"):
            Publisher(ledger, workspace.storage, run="run-2")
    Publisher(ledger, workspace.storage, run=RUN).close()


class FullDirectory(DirectoryStorage):
    """A storage with no room left when it comes to the commit."""

    def commit(self, staging: Staging) -> None:
        raise StorageFull("no space left", path=staging.path)


def test_a_full_disk_leaves_a_hole_and_nothing_else(workspace: Workspace, ledger: Ledger) -> None:
    with (
        Publisher(ledger, FullDirectory(workspace.root), run=RUN) as publisher,
        pytest.raises(StorageFull),
    ):
        publisher.publish(workspace.adapter)
    assert versions(ledger)[1].state == "rejected"
    check_at_rest(ledger, workspace.root)


class Interrupted(DirectoryStorage):
    """The user presses Ctrl-C while the files are written."""

    def commit(self, staging: Staging) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_cleans_up(workspace: Workspace, ledger: Ledger) -> None:
    with (
        Publisher(ledger, Interrupted(workspace.root), run=RUN) as publisher,
        pytest.raises(KeyboardInterrupt),
    ):
        publisher.publish(workspace.adapter)
    assert (versions(ledger)[1].state, versions(ledger)[1].reason) == (
        "rejected",
        "KeyboardInterrupt",
    )
    check_at_rest(ledger, workspace.root)


class Unanswering(Ledger):
    """A ledger whose answer to one append gets lost, before or after it was committed."""

    lose: str = ""

    def publish(self, *args: Any, **kwargs: Any) -> Any:
        lose, self.lose = self.lose, ""
        if lose != "request":
            event = super().publish(*args, **kwargs)
        if lose:
            raise LedgerUnavailable("the connection is gone")
        return event


@pytest.mark.parametrize("lose", ["request", "answer"])
def test_an_append_without_answer_is_settled_by_the_next_publish(
    workspace: Workspace, lose: str
) -> None:
    with (
        Unanswering(workspace.ledger) as ledger,
        Publisher(ledger, workspace.storage, run=RUN) as publisher,
    ):
        ledger.lose = lose
        with pytest.raises(LedgerUnavailable):
            publisher.publish(workspace.adapter, version=1)
        assert publisher.publish(workspace.adapter, version=1).version == 1
        assert publisher.publish(workspace.adapter).version == 2
        check_at_rest(ledger, workspace.root)


@pytest.mark.parametrize("lose", ["request", "answer"])
def test_an_append_without_answer_is_settled_by_the_next_opening(
    workspace: Workspace, lose: str
) -> None:
    with Unanswering(workspace.ledger) as ledger:
        with Publisher(ledger, workspace.storage, run=RUN) as publisher:
            ledger.lose = lose
            with pytest.raises(LedgerUnavailable):
                publisher.publish(workspace.adapter)
        with Publisher(ledger, workspace.storage, run=RUN):
            assert versions(ledger)[1].state == "published"
            check_at_rest(ledger, workspace.root)


class Counting(DirectoryStorage):
    """Counts how often a committed file is read again."""

    heads = 0

    def read_head(self, name: str, file: str, max_bytes: int) -> bytes:
        self.heads += 1
        return super().read_head(name, file, max_bytes)

    def confirm(self, name: str, entries: Sequence[FileEntry]) -> None:
        raise AssertionError("nothing is read again")


def test_a_steady_trainer_reads_nothing_from_the_storage(
    workspace: Workspace, ledger: Ledger
) -> None:
    storage = Counting(workspace.root)
    with Publisher(ledger, storage, run=RUN) as publisher:
        for _ in range(3):
            publisher.publish(workspace.adapter)
    assert storage.heads == 0
