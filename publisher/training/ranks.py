"""What one rank does for all: an error on rank 0 reaches every rank instead of hanging it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from policyline.publisher.errors import OtherRankFailed

T = TypeVar("T")


def on_rank_0(act: Callable[[], T]) -> T | None:
    """Call `act` on rank 0. A collective: every rank calls this.

    Returns:
        Its result on rank 0, None elsewhere.

    Raises:
        Exception: on rank 0, what `act` raised.
        OtherRankFailed: on the others, with its text: an exception may not survive pickling.
    """
    result: T | None = None
    failure: Exception | None = None
    if PartialState().is_main_process:
        try:
            result = act()
        except Exception as error:  # noqa: BLE001 - sent to every rank, then raised
            failure = error
    shared = [None if failure is None else f"{type(failure).__name__}: {failure}"]
    text = broadcast_object_list(shared, from_process=0)[0]
    if failure is not None:
        raise failure
    if text is not None:
        raise OtherRankFailed(f"rank 0 has failed: {text}")
    return result
