"""What doctor examines, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from policyline.ledger.names import DEFAULT_LINE, check_line
from policyline.ledger.settings import MOST, RunSettings
from policyline.setting import Setting, check_bounds, seconds


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be examined; None: not given."""

    vllm: Annotated[str | None, Setting("--vllm", "Base URL of a vLLM server.", metavar="URL")] = (
        None
    )
    adapter: Annotated[
        Path | None, Setting("--adapter", "What PEFT saved: can vLLM serve it as it is?")
    ] = None
    storage: Annotated[str | None, Setting("--storage", "Storage as the publisher sees it.")] = None
    sidecar_storage: Annotated[
        Path | None,
        Setting(
            "--sidecar-storage",
            "The same storage as a sidecar sees it: read here what is written to --storage.",
        ),
    ] = None
    cache: Annotated[
        Path | None, Setting("--cache", "The sidecar's --cache: does vLLM read files there?")
    ] = None
    ledger: Annotated[
        str | None,
        Setting(
            "--ledger",
            "Ledger: sqlite:///file.db, a plain path, or postgresql://user@host/name.",
        ),
    ] = None
    line: Annotated[str, Setting("--line", "Line: the prefix of every version's name.")] = (
        DEFAULT_LINE
    )
    max_staleness: Annotated[
        int | None,
        Setting(
            "--max-staleness",
            "Versions before current that stay served. Default: the open run's, else "
            f"{RunSettings().max_staleness}.",
            "versions",
            minimum=0,
            maximum=MOST,
            computed=True,
        ),
    ] = None
    base_model: Annotated[
        str | None,
        Setting("--base-model", "Directory (or hub name) of the base model, as vLLM is given it."),
    ] = None
    api_key: Annotated[
        str | None,
        Setting(
            "--api-key",
            "vLLM's API key. Better in the environment: others see a command's flags.",
            variable="POLICYLINE_VLLM_API_KEY",
        ),
    ] = None
    timeout_s: Annotated[
        float,
        seconds(
            "--timeout",
            "Longest wait for one measurement.",
            variable="POLICYLINE_DOCTOR_TIMEOUT",
            minimum=0.1,
        ),
    ] = 30.0

    def __post_init__(self) -> None:
        check_line(self.line)
        check_bounds(self)
