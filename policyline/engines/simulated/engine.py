"""The double's engine: scheduler, steps and metrics, as a state machine without I/O or clock.

Imitates vLLM 0.32 (v1/core/sched/scheduler.py, v1/engine/core.py) where its behaviour concerns
adapters. Not imitated: arithmetic, memory pressure, chunked prefill, preemption, and two faults of
the real one: on a CPU, base requests in a batch with adapters get the last adapter; NaN in one
request can spoil its neighbours.
"""

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from policyline.engines.simulated import language
from policyline.engines.simulated.weights import AdapterUnreadable, Weights
from policyline.engines.simulated.worker import Adapter, Worker, WorkerFault

PauseMode = Literal["abort", "wait", "keep"]
FinishReason = Literal["length", "stop", "abort"]

_MAX_CACHED_PREFIXES = 20_000


class EngineDied(Exception):
    """An error inside a step: the engine is gone and everything in flight with it."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The part of vLLM's command line that matters here, with vLLM's names."""

    max_loras: int = 6
    max_cpu_loras: int | None = None
    """None: as many as `max_loras`, vLLM's default."""
    max_lora_rank: int = 8
    max_num_seqs: int = 16
    max_model_len: int = 256
    block_size: int = 128
    """Tokens in one block of the prefix cache; 128 on a CPU, 16 on a GPU."""
    vocab_size: int = 512
    eos_token_id: int = 2

    @property
    def cpu_slots(self) -> int:
        """Places in the CPU cache."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras


@dataclass(slots=True)
class SimulatedRequest:
    """One completion in the engine."""

    adapter: Adapter | None
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    score_prompt: bool = False
    top: int | None = None
    """As vLLM's `logprobs`: the chosen tokens' log-probabilities are kept when not None."""
    token_ids: list[int] = field(default_factory=list)
    token_scores: list[float] = field(default_factory=list)
    prompt_scores: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    context: language.Context | None = None
    dice: random.Random | None = None


class SimulatedEngine:
    """Queues, steps, prefix cache, pause state and metrics of one engine process.

    Args:
        options: as on the command line.
        read: reads an adapter's directory.
        now: unix time in seconds, for the metrics alone.
    """

    def __init__(
        self,
        options: EngineOptions,
        read: Callable[[str], Weights],
        now: Callable[[], float],
    ) -> None:
        self.options = options
        self.worker = Worker(options.max_loras, options.cpu_slots, read)
        self.waiting: list[SimulatedRequest] = []
        self.running: list[SimulatedRequest] = []
        self.paused: PauseMode | None = None
        self.lora_info: OrderedDict[str, float] = OrderedDict()
        """Comma-joined names in the batch, to the time of the last such step. A request that has
        not been in a batch yet is not shown, as in vLLM, whose clients learn of it with its first
        output (v1/metrics/stats.py)."""
        self.shown_running = 0
        self.shown_waiting = 0
        """Numbers of requests after the last step: only steps move metrics."""
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._now = now
        self._prefixes: OrderedDict[tuple[object, ...], language.Context] = OrderedDict()

    def submit(self, request: SimulatedRequest) -> None:
        """Queue a request; a paused engine queues it as well."""
        self.waiting.append(request)

    def withdraw(self, request: SimulatedRequest) -> None:
        """Forget a request whose client has gone."""
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)

    def pause(self, mode: PauseMode) -> list[SimulatedRequest]:
        """Stop generation; return the requests that end by it.

        With `wait`, running requests go on to their end, and the pause is complete when none is
        left. Modes `abort` and `wait` empty the prefix cache.
        """
        self.paused = mode
        if mode != "keep":
            self.reset_prefix_cache()
        if mode != "abort":
            return []
        ended = self.running + self.waiting
        self.running, self.waiting = [], []
        for request in ended:
            request.finish_reason = "abort"
        return ended

    def resume(self) -> None:
        """Go on with generation."""
        self.paused = None

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes."""
        self._prefixes.clear()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        if self.paused is None:
            return bool(self.running or self.waiting)
        return self.paused == "wait" and bool(self.running)

    def step(self) -> list[SimulatedRequest]:
        """Give every request of the batch one token; return those that are finished by it.

        Raises:
            EngineDied: an adapter of the batch was not resident and could not be read again.
        """
        self._admit()
        batch = list(self.running)
        # As in vLLM, adapters of a batch are distinguished by name, not by id.
        adapters = {request.adapter.name: request.adapter for request in batch if request.adapter}
        try:
            for adapter in adapters.values():
                self.worker.add(adapter)
            for request in batch:
                self._advance(request)
        except (AdapterUnreadable, WorkerFault, KeyError) as error:
            raise EngineDied(str(error)) from error
        finished = [request for request in batch if request.finish_reason is not None]
        self.running = [request for request in self.running if request.finish_reason is None]
        self._record()
        return finished

    def _admit(self) -> None:
        """Move waiting requests into the batch, at most `max_loras` adapters in it."""
        if self.paused is not None:
            return
        ids = {request.adapter.id for request in self.running if request.adapter}
        for request in list(self.waiting):
            if len(self.running) >= self.options.max_num_seqs:
                return
            adapter = request.adapter
            if adapter and adapter.id not in ids and len(ids) >= self.options.max_loras:
                continue
            if adapter:
                ids.add(adapter.id)
            self.waiting.remove(request)
            self.running.append(request)

    def _advance(self, request: SimulatedRequest) -> None:
        weights = self.worker.weights(request.adapter.id) if request.adapter else Weights(b"")
        context = request.context
        if context is None:
            context = self._prefill(request, weights)
        scores = language.log_probabilities(context, weights.key, self.options.vocab_size)
        if not weights.finite:
            scores = np.full_like(scores, np.nan)
        token_id = self._choose(request, scores)
        request.token_ids.append(token_id)
        request.token_scores.append(float(scores[token_id]))
        request.context = language.extend(context, [token_id], weights.key)
        if token_id == self.options.eos_token_id and not request.ignore_eos:
            request.finish_reason = "stop"
        elif len(request.token_ids) >= request.max_tokens:
            request.finish_reason = "length"

    @staticmethod
    def _choose(
        request: SimulatedRequest, scores: np.ndarray[tuple[int], np.dtype[np.float64]]
    ) -> int:
        if request.temperature == 0 or np.isnan(scores[0]):
            return int(scores.argmax())
        if request.dice is None:
            request.dice = random.Random(request.seed)  # noqa: S311 - sampling, not a secret
        return language.sample(scores, request.temperature, request.dice.random())

    def _prefill(self, request: SimulatedRequest, weights: Weights) -> language.Context:
        """Read the prompt, from the longest cached prefix on; scoring reads all of it.

        The cache is keyed by the adapter's name and path (v1/core/kv_cache_utils.py), so other
        content under the same name and path is continued from what the old content made of it.
        """
        adapter, prompt, block = request.adapter, request.prompt, self.options.block_size
        owner = (adapter.name, adapter.path) if adapter else None
        context, start = language.EMPTY, 0
        if not request.score_prompt:
            context, start = self._longest_prefix(owner, prompt)
            request.cached_tokens = start
            self.prefix_queries += len(prompt)
            self.prefix_hits += start
        for position in range(start, len(prompt)):
            if request.score_prompt and position > 0:
                scores = language.log_probabilities(context, weights.key, self.options.vocab_size)
                score = float(scores[prompt[position]]) if weights.finite else float("nan")
                request.prompt_scores.append(score)
            context = language.extend(context, [prompt[position]], weights.key)
            if (position + 1) % block == 0:
                self._prefixes[owner, prompt[: position + 1]] = context
                if len(self._prefixes) > _MAX_CACHED_PREFIXES:
                    self._prefixes.popitem(last=False)
        return context

    def _longest_prefix(
        self, owner: tuple[str, str] | None, prompt: tuple[int, ...]
    ) -> tuple[language.Context, int]:
        """Return the context after the longest cached prefix that leaves a token to read."""
        block, start, context = self.options.block_size, 0, language.EMPTY
        for end in range(block, len(prompt), block):
            found = self._prefixes.get((owner, prompt[:end]))
            if found is None:
                break
            context, start = found, end
        return context, start

    def _record(self) -> None:
        """Show this step in the metrics."""
        self.shown_running, self.shown_waiting = len(self.running), len(self.waiting)
        names = [request.adapter.name for request in self.running if request.adapter]
        self.lora_info[",".join(dict.fromkeys(names))] = self._now()
