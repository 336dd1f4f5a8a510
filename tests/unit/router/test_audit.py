"""Token counts of an answer, read from its last bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policyline.router.rollouts.audit import TAIL_BYTES, token_counts


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
