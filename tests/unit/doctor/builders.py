"""Findings of healthy things, to be spoilt one at a time."""

from __future__ import annotations

from collections.abc import Iterable

from policyline.doctor.engine_facts import EngineFindings, MetricsFacts, ServerConfig
from policyline.doctor.ledger import LedgerFindings
from policyline.doctor.model import Line, Window
from policyline.doctor.storage import StorageFindings
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.roundtrip import RoundTrip
from policyline.ledger.rows import LineRow, RunRow
from policyline.watcher.vllm.answers import EngineAdapter, EngineBaseModel, EngineModels

URL = "http://vllm:8000"
WINDOW = Window(4, "the default")

CONFIG = ServerConfig(
    max_loras=6,
    max_cpu_loras=6,
    max_lora_rank=8,
    has_lora=True,
    data_parallel=1,
    api_servers=1,
    environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": True},
)
METRICS = MetricsFacts(incarnations=("1000.5",) * 4, engines=1, max_loras=6)
MODELS = EngineModels(EngineBaseModel("tiny", "/models/tiny", 256), ())
ENGINE = EngineFindings(
    URL,
    "0.32.0",
    models=MODELS,
    server=CONFIG,
    runtime_lora=True,
    lora_enabled=True,
    cache_access="reads",
    metrics=METRICS,
    paused=False,
    scores_s=(0.02, 0.015),
    unknown_served=False,
    nameless_served=True,
)
STORAGE = StorageFindings(
    "/mnt/a",
    "/mnt/b",
    30.0,
    free_bytes=10 << 30,
    written_s=0.01,
    renamed_s=0.01,
    missing_s=0.02,
    has_events=True,
    reader_writable=False,
)
RUN = RunRow(
    run="grpo-7",
    line="trl-policy",
    state="open",
    epoch=1,
    holder=None,
    claimed_at="",
    max_staleness=2,
    min_ready=1,
    ready_grace_s=5.0,
    candidate_timeout_s=120.0,
    opened_seq=1,
    opened_at="",
    closed_seq=None,
    parent_run=None,
    parent_version=None,
)
LEDGER = LedgerFindings(
    "sqlite:////run.db",
    is_sqlite=True,
    view=LineSnapshot("f" * 32, 3, LineRow("trl-policy", current=7), RUN, ()),
    round_trip=RoundTrip(0.001, 0.001),
)


def with_adapters(*adapters: tuple[str, str]) -> EngineModels:
    """The registry with these names and paths."""
    return EngineModels(MODELS.base, tuple(EngineAdapter(*adapter) for adapter in adapters))


def by_name(lines: Iterable[Line]) -> dict[str, Line]:
    """Each line by its name, of which only `engine.known_problem` may occur again."""
    found = [line for line in lines if line.name != "engine.known_problem"]
    named = {line.name: line for line in found}
    assert len(named) == len(found)
    return named
