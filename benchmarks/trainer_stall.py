"""How long a sync blocks the trainer and pauses generation: TRL's own sync, and policyline.

One adapter, two real vLLM servers that decode steadily, the same TRL trainer class: A) TRL's own
adapter sync through a broadcast proxy (pause, save, load on both, resume); B) policyline. Each
without a bucket, and with an emulated one of which the upload takes 2.5 s. Decoding, which is a
GPU's work, would take every core here, the ones included on which a host with a GPU runs trainer,
proxy, sidecars and the servers' own front ends. In A and B alike requests therefore come at a
steady pace that takes about a quarter of what two cores can decode, and each server is bound to a
core of its own, where its engine core and worker have a lower priority than its front end: A stops
all decoding for its sync and has the cores to itself, B does not. vLLM's CPU build keeps these two
spinning for a second after each message; where they may run anywhere, the four of them wait for
each other's slices, and a load or a probe for up to half a second.
TRAINER_STALL=plain or bucket measures one half alone; TRAINER_STALL_LOAD=full does without the
pace.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.decode_load import DecodeCounts, DecodeLoad
from benchmarks.harness import Bar, Figure, Outcome, log, main
from policyline.cli.ledger.show import summarise
from policyline.engines.child import ChildServer
from policyline.engines.vllm import VllmOptions, VllmServer
from policyline.ledger import Ledger
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.events import VERSION_PUBLISHED
from policyline.ledger.names import DEFAULT_LINE
from policyline.publisher.training import session
from policyline.storage import DirectoryStorage, Staging

ENGINE_START_S = 300.0
SYNCS = 30
BETWEEN_S = 3.0
"""From the end of a sync to the next: training. Longer than a sidecar lets a version linger."""
PERIOD_S = 1.4
"""From one request of a client to its next, if it is answered by then."""
UPLOAD_S = 2.5
RETRY_S = 0.5
LINE = "policy"
"""Of B: A's names are TRL's own, on the same servers."""
NICE = 10
MAX_STALENESS = 4
REPLICAS = ("r0", "r1")


@dataclass(frozen=True, slots=True)
class Measured:
    """One scenario; seconds, one value a sync."""

    blocked: list[float]
    paused: list[float]
    served: list[float]
    """From the beginning of the sync until the last server generates by the version when asked: A,
    which has paused them, when they are resumed; B when the last has acked it."""
    load: DecodeCounts

    def median(self, name: Literal["blocked", "paused", "served"]) -> float:
        """Of one of the lists."""
        values: list[float] = getattr(self, name)
        return statistics.median(values)


class SlowUpload(DirectoryStorage):
    """A bucket that shows a version once its upload has ended."""

    def commit(self, staging: Staging) -> None:
        """Upload, then as on a disk."""
        time.sleep(UPLOAD_S)
        super().commit(staging)


class VersionSink:
    """In place of the rollout worker: passes each version to the decoding client."""

    def __init__(self, load: DecodeLoad) -> None:
        self._load = load
        self.rollout_buffer: Any = None
        self.metrics_queue: Any = None

    def update_model_version(self, version: int) -> None:
        """Called by TRL after each sync."""
        self._load.name(version)


class Bench:
    """Two servers, and the four scenarios on them."""

    def __init__(self, root: Path, servers: list[VllmServer], syncs: int) -> None:
        self._root = root
        self._servers = servers
        self._syncs = syncs

    def trl(self, bucket_s: float) -> Measured:
        """A: TRL's own sync through the broadcast proxy."""
        from trl.experimental.async_grpo import AsyncGRPOTrainer  # noqa: PLC0415 - see _trainer

        script = str(Path(__file__).with_name("broadcast_proxy.py"))
        command = [sys.executable, script, "{port}", *self._urls]
        environment = {"BUCKET_S": str(bucket_s), "RETRY_S": str(RETRY_S)}
        with ExitStack() as stack:
            proxy = stack.enter_context(ChildServer(command, environment=environment))
            proxy.wait_healthy(30)
            load = stack.enter_context(self._decode([proxy.url], DEFAULT_LINE))
            out = self._root / f"a-{bucket_s:g}"
            trainer = _trainer(AsyncGRPOTrainer, self._model, proxy.url, out, VersionSink(load))
            trainer._sync_weight()  # noqa: SLF001 - the thing that is measured
            load.wait_busy()
            begun, blocked, seen = self._sync(trainer, load, lambda: None)
            stalls = _stalls(proxy.url)[-self._syncs :]
            self._unload(DEFAULT_LINE, trainer.model_version)
        return Measured(
            blocked,
            [stall["paused_s"] for stall in stalls],
            [stall["resumed_at"] - at for stall, at in zip(stalls, begun, strict=True)],
            seen,
        )

    def policyline(self, bucket_s: float) -> Measured:
        """B."""
        from policyline.publisher.trl import AsyncGRPOTrainer, PublishTo  # noqa: PLC0415 - see _trainer

        where = self._root / f"b-{bucket_s:g}"
        (where / "storage").mkdir(parents=True)
        url = str(where / "run.db")
        upgrade_url(url)
        pauses = self._pauses()
        to = PublishTo(
            ledger=url, storage=str(where / "storage"), run=f"stall-{bucket_s:g}", line=LINE
        )
        with ExitStack() as stack:
            ledger = stack.enter_context(Ledger(url))
            stack.enter_context(self._sidecars(where, ledger))
            load = stack.enter_context(self._decode(self._urls, LINE))
            stack.enter_context(_uploads(bucket_s))
            trainer = _trainer(
                AsyncGRPOTrainer,
                self._model,
                "http://router",
                where,
                VersionSink(load),
                publish_to=to,
            )
            rank0 = trainer._open({})  # noqa: SLF001 - what train() does first
            stack.callback(rank0.close)
            trainer._rank0 = rank0  # noqa: SLF001 - as above
            trainer._sync_weight()  # noqa: SLF001 - the thing that is measured
            load.wait_busy()
            # each version is awaited, so that none is replaced while it waits
            begun, blocked, seen = self._sync(
                trainer, load, lambda: rank0.progress.wait_served(rank0.progress.submitted)
            )
            acked = _acked(ledger)[-self._syncs :]
            rank0.session.finish()
            phases = summarise(ledger.phases(line=LINE))
            spent = ", ".join(f"{p['phase']} {p['p50_s'] * 1e3:.0f}" for p in phases)
            log(f"  where the time went, p50 ms: {spent}")
            published = _published(ledger)[-self._syncs :]
        self._unload(LINE, self._syncs + 1)  # the next scenario has another ledger
        stopped = self._pauses() - pauses
        log(f"  pauses asked of the servers meanwhile: {stopped}")
        served = [at - start for at, start in zip(acked, begun, strict=True)]
        known = statistics.median(at - start for at, start in zip(published, begun, strict=True))
        log(f"  from a sync to its version in the ledger, p50 {known * 1e3:.0f} ms")
        return Measured(blocked, [float("nan") if stopped else 0.0], served, seen)

    def _sync(
        self, trainer: Any, load: DecodeLoad, wait: Callable[[], None]
    ) -> tuple[list[float], list[float], DecodeCounts]:
        begun, blocked = [], []
        load.begin()
        for _ in range(self._syncs):
            time.sleep(BETWEEN_S)
            begun.append(time.time())
            started = time.perf_counter()
            trainer._sync_weight()  # noqa: SLF001 - the thing that is measured
            blocked.append(time.perf_counter() - started)
            wait()
        return begun, blocked, load.taken()

    @contextmanager
    def _sidecars(self, where: Path, ledger: Ledger) -> Iterator[None]:
        with ExitStack() as stack:
            for replica, server in zip(REPLICAS, self._servers, strict=True):
                command = [sys.executable, "-m", "policyline", "sidecar", "--vllm", server.url]
                command += ["--ledger", str(where / "run.db"), "--line", LINE]
                command += ["--storage", str(where / "storage"), "--replica", replica]
                command += ["--cache", str(where / replica), "--listen", "127.0.0.1:{port}"]
                log_path = where / f"{replica}.log"
                stack.enter_context(ChildServer(command, log_path=log_path))
            deadline = time.monotonic() + 60
            while {r.replica for r in ledger.replicas(LINE)} != set(REPLICAS):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the sidecars have not joined; see {where}")
                time.sleep(0.05)
            yield

    def _decode(self, urls: list[str], line: str) -> DecodeLoad:
        full = os.environ.get("TRAINER_STALL_LOAD") == "full"
        return DecodeLoad(urls, line, len(REPLICAS), period_s=0.0 if full else PERIOD_S)

    @property
    def _urls(self) -> list[str]:
        return [server.url for server in self._servers]

    @property
    def _model(self) -> str:
        return str(self._root / "model")

    def _pauses(self) -> int:
        return sum(server.log_path.read_text().count("POST /pause") for server in self._servers)

    def _unload(self, line: str, newest: int) -> None:
        for server in self._servers:
            for version in range(max(1, newest - MAX_STALENESS - 1), newest + 1):
                name = f"{line}-v{version}"
                _post(f"{server.url}/v1/unload_lora_adapter", {"lora_name": name})


def _trainer(
    kind: Any, model: str, url: str, output: Path, worker: VersionSink, **more: Any
) -> Any:
    """A trainer that has not begun to train: its sync is what is called."""
    import torch  # noqa: PLC0415 - the torch side, only where it is measured
    from datasets import Dataset  # noqa: PLC0415 - as above
    from peft import LoraConfig  # noqa: PLC0415 - as above
    from trl.experimental.async_grpo import AsyncGRPOConfig  # noqa: PLC0415 - as above

    import examples.cpu_stand_in  # noqa: F401, PLC0415 - as above

    torch.set_num_threads(1)  # the servers have the cores; waiting for a second one takes longest
    args = AsyncGRPOConfig(
        output_dir=str(output),
        vllm_server_base_url=url,
        max_staleness=MAX_STALENESS,
        max_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        chat_template_kwargs={},
    )
    prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": "1 plus 1?"}]}])
    return kind(
        model=model,
        args=args,
        train_dataset=prompts,
        reward_funcs=[],
        peft_config=LoraConfig(r=1, lora_alpha=2, target_modules="all-linear"),
        rollout_worker=worker,
        **more,
    )


@contextmanager
def _uploads(bucket_s: float) -> Iterator[None]:
    """Let the session publish to a slow bucket."""
    if not bucket_s:
        yield
        return
    module: Any = session
    original = module.open_storage
    module.open_storage = lambda url: SlowUpload(Path(url))
    try:
        yield
    finally:
        module.open_storage = original


def _acked(ledger: Ledger) -> list[float]:
    """When the last replica acked each version, by version; seconds since the epoch."""
    acked: dict[int, float] = {}
    for row in ledger.residency(LINE):
        if row.acked_at is not None:
            at = datetime.fromisoformat(row.acked_at).timestamp()
            acked[row.version] = max(at, acked.get(row.version, 0.0))
    return [at for _, at in sorted(acked.items())]


def _published(ledger: Ledger) -> list[float]:
    """When each version was in the ledger, by version; seconds since the epoch."""
    events = ledger.events(line=LINE, kinds=[VERSION_PUBLISHED])
    return [datetime.fromisoformat(event.recorded_at).timestamp() for event in events]


def _stalls(proxy: str) -> list[dict[str, float]]:
    with urllib.request.urlopen(f"{proxy}/stalls") as answer:
        found: list[dict[str, float]] = json.load(answer)
    return found


def _post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        urllib.request.urlopen(request).close()
    except urllib.error.HTTPError as error:
        error.close()  # not loaded any more


def measure(quick: bool) -> Outcome:
    syncs = 3 if quick else SYNCS
    buckets = {"plain": [0.0], "bucket": [UPLOAD_S]}.get(
        os.environ.get("TRAINER_STALL", ""), [0.0, UPLOAD_S]
    )
    root = Path(tempfile.mkdtemp(prefix="policyline-stall-"))
    try:
        return _measure(root, syncs, buckets)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _measure(root: Path, syncs: int, buckets: list[float]) -> Outcome:
    log("making a model, starting two vLLM servers")
    command = [sys.executable, "-m", "policyline.demo.tiny_model", "base", str(root / "model")]
    subprocess.run(command, check=True, capture_output=True)
    options = VllmOptions(max_loras=MAX_STALENESS + 2)
    servers = [VllmServer(root / "model", options) for _ in REPLICAS]
    figures: list[Figure] = []
    bars: list[Bar] = []
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda s: s.wait_healthy(ENGINE_START_S), servers))
        for server in servers:  # the first request compiles for up to 20 s
            _post(f"{server.url}/v1/completions", {"prompt": [40, 41], "max_tokens": 4})
        for number, server in enumerate(servers):
            _pin_to_core(server.pid, number)
        bench = Bench(root, servers, syncs)
        for bucket_s in buckets:
            log(f"{syncs} syncs each, bucket {bucket_s:g} s")
            a, b = bench.trl(bucket_s), bench.policyline(bucket_s)
            figures += _figures(a, b, bucket_s)
            bars += _bars(a, b, bucket_s)
    return Outcome(n=syncs, figures=tuple(figures), bars=tuple(bars))


def _pin_to_core(leader: int, number: int) -> None:
    """Lower the priority of a server's decoding, and bind the server to one of the cores.

    Where Linux groups sessions for its scheduler, a process' niceness counts only among those of
    its own session, and the group's between sessions (sched(7), "autogroup").
    """
    cores = sorted(os.sched_getaffinity(0))
    core = cores[number % len(cores)]
    for process in (psutil.Process(leader), *psutil.Process(leader).children(recursive=True)):
        if process.name().startswith("VLLM::"):
            process.nice(NICE)
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})
    group = Path(f"/proc/{leader}/autogroup")
    if group.exists():
        group.write_text(str(NICE))


def _figures(a: Measured, b: Measured, bucket_s: float) -> list[Figure]:
    name = f"bucket {bucket_s:g} s" if bucket_s else "no bucket"
    return [
        Figure(f"{name}: trainer blocked, p50", b.median("blocked"), "s", a.median("blocked")),
        Figure(f"{name}: trainer blocked, longest", max(b.blocked), "s", max(a.blocked)),
        Figure(f"{name}: generation paused, p50", b.median("paused"), "s", a.median("paused")),
        Figure(f"{name}: sync to served by both, p50", b.median("served"), "s", a.median("served")),
        Figure(f"{name}: generated meanwhile", b.load.tokens_per_s, "tok/s", a.load.tokens_per_s),
        Figure(f"{name}: requests failed", b.load.failures, "", a.load.failures),
    ]


def _bars(a: Measured, b: Measured, bucket_s: float) -> list[Bar]:
    name = f"bucket {bucket_s:g} s" if bucket_s else "no bucket"
    most_blocked, most_served = (0.05, 1.0) if bucket_s else (0.5, 1.5)
    return [
        Bar(f"{name}: blocked / A", b.median("blocked") / a.median("blocked"), most_blocked),
        Bar(f"{name}: paused, s", max(b.paused), 0.0),
        Bar(f"{name}: served / A", b.median("served") / a.median("served"), most_served),
    ]


if __name__ == "__main__":
    main("trainer_stall", __doc__.splitlines()[0], measure)
