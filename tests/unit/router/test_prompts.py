"""Prompts as chains of block hashes: what cannot be read gives no chain, what differs differs."""

from __future__ import annotations

from typing import Any

import pytest

from policyline.router.affinity.prompts import MAX_BLOCKS, TEXT_BLOCK_BYTES, chain_of

BLOCK = 16
LONG = "x" * TEXT_BLOCK_BYTES * 3


def chat(*messages: Any, **content: Any) -> tuple[int, ...]:
    return chain_of({"messages": list(messages), **content}, BLOCK)


@pytest.mark.parametrize(
    "prompt", [[1] * 15 + [{}], [1] + [[2]] * 15, [], None, 7, "short", [1] * 15, [{}] * 16]
)
def test_a_prompt_without_a_readable_block_has_no_chain(prompt: Any) -> None:
    assert chain_of({"prompt": prompt}, BLOCK) == ()


def test_tokens_after_an_unreadable_one_give_no_chain_either() -> None:
    assert chain_of({"prompt": [1] * 32 + [[3]] * 16}, BLOCK) == ()


def test_the_first_of_several_prompts_counts() -> None:
    assert chain_of({"prompt": [[1] * 32, [2] * 32]}, BLOCK) == chain_of({"prompt": [1] * 32}, 16)
    assert chain_of({"prompt": [LONG, "other"]}, BLOCK) == chain_of({"prompt": LONG}, BLOCK)


def test_blocks_beyond_the_bound_are_ignored() -> None:
    chain = chain_of({"prompt": [1] * BLOCK * (MAX_BLOCKS + 9)}, BLOCK)

    assert len(chain) == MAX_BLOCKS


def test_a_message_differs_by_its_tool_calls() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": LONG}}
    plain = {"role": "assistant", "content": LONG}

    assert chat(plain) != chat({"role": "assistant", "content": None, "tool_calls": [call]})
    assert len(chat(plain, tools=[call])) > len(chat(plain))
    assert chat("not a message", 7, plain) == chat(plain)


def test_messages_that_are_no_list_have_no_chain() -> None:
    assert chain_of({"messages": LONG}, BLOCK) == ()
    assert chain_of({"messages": None}, BLOCK) == ()


def test_an_extended_conversation_extends_the_chain() -> None:
    first = {"role": "user", "content": LONG}
    turn = chat(first)
    longer = chat(first, {"role": "assistant", "content": LONG})

    assert longer[: len(turn)] == turn
