"""Tokens of an answer, from its last bytes; and the bell."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policyline.router.bell import Bell
from policyline.router.usage import TAIL_BYTES, usage


@given(text=st.text(), prompt=st.integers(0, 10**6), completion=st.integers(0, 10**6))
def test_usage_is_found_whatever_was_said(text: str, prompt: int, completion: int) -> None:
    said = {"usage": {"prompt_tokens": prompt, "completion_tokens": completion}}
    claim = '"usage": {"prompt_tokens": 1, "completion_tokens": 2}'
    body = json.dumps({"choices": [{"text": claim + text}], **said}).encode()

    assert usage(body[-TAIL_BYTES:]) == (prompt, completion)


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
def test_bodies(body: bytes, found: tuple[int, int]) -> None:
    assert usage(body) == found


async def test_a_bell_wakes_all_who_wait() -> None:
    bell = Bell()
    waiting = [asyncio.create_task(bell.wait(30)) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    bell.ring()

    assert await asyncio.gather(*waiting) == [True, True, True]
    assert not await bell.wait(0.01)
    assert not await bell.wait(0)
    bell.ring()
