"""What tests of the replay share: a served run, and one call that replays it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policyline.demo.synthetic import write_adapter
from policyline.engines.simulated.server import SimulatedServer
from policyline.ledger import Ledger
from policyline.ledger.manifest import Manifest
from policyline.ledger.names import policy_name
from policyline.publisher import Publisher
from policyline.replay_into.model import Replayed
from policyline.replay_into.run import Replay
from policyline.replay_into.settings import ReplaySettings
from policyline.replay_into.state import StateFile
from policyline.storage import DirectoryStorage
from policyline.watcher.cache import Cache
from tests.integration.watcher.site import CountingClient

VERSIONS = (1, 2, 3, 4, 5)


@dataclass
class Stage:
    """A run to replay, and the messages of the replay."""

    root: Path
    ledger: Ledger
    storage: DirectoryStorage
    messages: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    async def replay(
        self,
        engine: SimulatedServer,
        *,
        state: Path | None = None,
        client: type[CountingClient] = CountingClient,
        on_result: Callable[[Replay, Replayed], None] = lambda _replay, _result: None,
        on_message: Callable[[str], None] = lambda _text: None,
        run: str = "run",
        **settings: Any,
    ) -> dict[int, Replayed]:
        """Replay into a double; the result of each version."""
        cache = Cache(self.root / "cache", self.ledger.ledger_id)
        cache.open()

        def message(text: str) -> None:
            self.messages.append(text)
            on_message(text)

        async with client(engine.url) as asking:
            replay = Replay(
                ReplaySettings(run, **{"engine_back_s": 10.0, **settings}),
                ledger=self.ledger,
                storage=self.storage,
                engine=asking,
                cache=cache,
                state=StateFile(state),
                on_result=lambda result, _number, _total: on_result(replay, result),
                on_message=message,
            )
            try:
                results = await replay.run()
            finally:
                cache.close()
                self.loads += asking.loads
        return {result.version: result for result in results}

    def publish(self, *, run: str, rank: int) -> None:
        """Publish one more version."""
        adapter = write_adapter(self.root / "another", 9, rank=rank)
        with Publisher(self.ledger, self.storage, run=run) as publisher:
            publisher.publish(adapter)

    def copy_here(self, version: int) -> str:
        """Have a local copy, as another process may have made it; its directory's name."""
        row = self.ledger.version("trl-policy", version)
        manifest = Manifest.from_text(row.manifest or "")
        directory = f"{manifest.name}-{manifest.digest[:16]}"
        cache = Cache(self.root / "cache", self.ledger.ledger_id)
        cache.open()
        cache.fetch(self.storage, manifest.name, manifest.files, directory)
        cache.close()
        return directory

    def copies(self) -> list[str]:
        """Local copies that are still there."""
        home = self.root / "cache" / self.ledger.ledger_id
        return sorted(p.name for p in home.iterdir() if not p.name.startswith("."))

    def spoil(self, version: int) -> None:
        """Change one byte of a stored version."""
        weights = self.storage.root / names(version)[0] / "adapter_model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)


def names(*versions: int) -> list[str]:
    """Policy names of the run's line."""
    return [policy_name("trl-policy", version) for version in versions]


def outcomes(results: dict[int, Replayed]) -> list[str]:
    """By version."""
    return [result.outcome for _, result in sorted(results.items())]
