"""One row for each answer, with the token counts that are read from its last bytes."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policyline.router.affinity.affinity import Assignment
from policyline.router.gate import Endpoint, Serve
from policyline.router.metrics import Metrics
from policyline.router.request import Attempt, Call
from policyline.router.rollouts.audit import TAIL_BYTES, Audit, token_counts
from policyline.router.rollouts.spool import Spool


def test_an_answer_is_recorded_once(tmp_path: Path) -> None:
    """Its client may disconnect after the row was written and before the answer's end."""
    endpoint = Endpoint("r0", "1.0", "http://r0", slots=6, acked_seq=1)
    serve = Serve(1, "trl-policy-v1", "sha256:d", "run", (endpoint,))
    unused: Any = None
    first_s = time.monotonic() - 1
    path, arrived_s = "/v1/completions", first_s - 5
    call = Call(unused, path, serve.name, 1, b"", unused, "", arrived_s)
    assignment = Assignment(endpoint, 1, "unmatched")
    attempt = Attempt(call, serve, assignment, sent_s=first_s - 3, first_s=first_s)
    metrics = Metrics()
    with closing(Spool(tmp_path)) as spool:
        audit = Audit(spool, metrics)
        audit.record(attempt, 200, b"")
        audit.record(attempt, 499, b"")
    (batch,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in batch.read_text().splitlines()]
    assert [(row[0], row[5]) for row in rows] == [(call.id, 200)]
    queue_s, first_part_s, rest_s = rows[0][7:10]
    assert (queue_s, first_part_s) == (2, 3)
    assert 1 <= rest_s <= time.monotonic() - first_s
    text = metrics.text()
    assert b"policyline_router_rollouts_recorded_total 1.0" in text
    answers = [
        line for line in text.splitlines() if line.startswith(b"policyline_router_answers_t")
    ]
    assert answers == [b'policyline_router_answers_total{status="200"} 1.0']


@given(text=st.text(), prompt=st.integers(0, 10**6), completion=st.integers(0, 10**6))
def test_counts_are_found_whatever_the_text(text: str, prompt: int, completion: int) -> None:
    counts = {"usage": {"prompt_tokens": prompt, "completion_tokens": completion}}
    fake = '"usage": {"prompt_tokens": 1, "completion_tokens": 2}'
    body = json.dumps({"choices": [{"text": fake + text}], **counts}).encode()

    assert token_counts(body[-TAIL_BYTES:]) == (prompt, completion)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"", (0, 0)),
        (b"data: [DONE]\n\n", (0, 0)),
        (b'{"usage":null}', (0, 0)),
        (b'{"usage":{"prompt_tokens":3}}', (3, 0)),
        (
            b'data: {"usage":{"prompt_tokens":3,"total_tokens":9,"completion_tokens":6,"x":{}}}',
            (3, 6),
        ),
        (b'{"choices":[{"text":"\\"usage\\":{\\"prompt_tokens\\":3}"}]}', (0, 0)),
    ],
)
def test_counts_of_a_body(body: bytes, found: tuple[int, int]) -> None:
    assert token_counts(body) == found
