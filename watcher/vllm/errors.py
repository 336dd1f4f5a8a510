"""What can go wrong in a call to vLLM, classified by status and body; no I/O here.

    EngineError
    ├── EngineUnreachable      no connection, or it broke before the answer was complete
    ├── EngineTimeout          no answer in time; the call may still take effect later
    ├── EngineHangs            no answer and no step for so long that it may never come
    ├── EngineDead             the API server answers, the engine behind it has died
    ├── EngineUnauthorized     401: API key missing or wrong
    ├── RuntimeLoraDisabled    the server cannot load adapters at run time
    ├── RouteMissing           404 {"detail": "Not Found"}: a development route that is off
    ├── AdapterAlreadyLoaded   the name is in the registry, with this or another path
    ├── AdapterMissing         the name is not in the registry
    ├── AdapterRefused         the adapter is wrong and will be refused again (`reason`)
    ├── RequestRefused         any other 4xx: the request is wrong and will be refused again
    ├── NonFinite              the model answered with NaN or infinity
    └── EngineFault            other 5xx, or an answer that cannot be read; may pass

Statuses and texts: vLLM 0.32, observed. vLLM answers 500 to permanent and transient load
failures alike, and 404 both to a missing route and to a missing adapter, so the text decides.
"""

import json
import re
from typing import Literal

from policyline.errors import ExitCode, PolicylineError

MESSAGE_LIMIT = 256
"""Longest message kept, in characters: vLLM can echo whole requests."""

Route = Literal["load", "unload", "completion", "plain", "dev"]
"""Which answers are possible: see `classify`."""


class EngineError(PolicylineError):
    """A call to the engine failed. Its text does not end with the hint, which is the class's.

    Attributes:
        status: HTTP status, or None when there was no answer.
        message: the engine's text, at most `MESSAGE_LIMIT` characters.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(cut(message))
        self.status = status


class EngineUnreachable(EngineError):
    """No connection, or it broke before the answer was complete."""

    exit_code = ExitCode.UNREACHABLE
    hint = "check that vLLM runs and that the URL is its own"


class EngineTimeout(EngineError):
    """No answer in time. A load may still land afterwards: read the registry before a retry."""

    exit_code = ExitCode.UNREACHABLE


class EngineHangs(EngineError):
    """No answer, and the engine does no step: it serves nobody, whatever its server says."""


class EngineDead(EngineError):
    """The API server answers but its engine has died; vLLM then exits with code 0."""

    exit_code = ExitCode.UNREACHABLE
    hint = "restart vLLM; a restart policy of 'on-failure' does not fire, use 'always'"


class EngineUnauthorized(EngineError):
    """The API key is missing or wrong."""

    hint = "set POLICYLINE_VLLM_API_KEY to the key that vLLM was started with"


class RuntimeLoraDisabled(EngineError):
    """The server cannot load adapters at run time."""

    hint = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"


class RouteMissing(EngineError):
    """The route does not exist: development routes are off, or this is not vLLM."""

    hint = "start vLLM with VLLM_SERVER_DEV_MODE=1 (on a private network only)"


class AdapterAlreadyLoaded(EngineError):
    """The name is in the registry already, with the same or with another path."""


class AdapterMissing(EngineError):
    """The name is not in the registry."""


class AdapterRefused(EngineError):
    """The adapter is wrong; the same files will be refused again.

    Attributes:
        reason: short code: `files_missing`, `not_a_directory`, `no_weights`,
            `weights_unreadable`, `config_unreadable`, `rank`, `modules`, `shape`, `tensors`,
            `unsupported` or `request`.
    """

    def __init__(self, message: str, *, status: int | None = None, reason: str) -> None:
        self.reason = reason
        super().__init__(message, status=status)


class RequestRefused(EngineError):
    """The request itself is wrong (any other 4xx)."""


class NonFinite(EngineError):
    """The model answered with NaN or infinity, which vLLM reports as status 400."""


class EngineFault(EngineError):
    """Another 5xx, or an answer that cannot be read. It may pass."""


_REFUSALS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (reason, re.compile(pattern))
    for reason, pattern in (
        ("files_missing", r"No adapter found for "),
        ("not_a_directory", r"\[Errno 20\]"),
        ("no_weights", r"doesn't contain tensors"),
        ("weights_unreadable", r"Error while deserializing header|header too small"),
        ("weights_unreadable", r"[Hh]eader too large|invalid[ _]header|InvalidHeader"),
        ("rank", r"LoRA rank \d+ is greater than max_lora_rank"),
        ("rank", r"LoRA rank .* must be a positive"),
        ("modules", r"expected target modules in "),
        ("shape", r"The (?:size of tensor|expanded size of the tensor|embedding LoRA size)"),
        ("shape", r"incompatible weight shape|shape mismatch|does not match the shape"),
        ("tensors", r"is unsupported LoRA weight|is missing weight"),
        # vLLM's texts for no tensors at all or a lora_B without its lora_A, and the reverse.
        ("tensors", r"Worker failed with error ''|for \*=: 'NoneType' and 'float'"),
        ("unsupported", r"vLLM does not (?:yet )?support |vLLM only supports modules_to_save"),
        ("unsupported", r"Adapter bias is not supported"),
        ("config_unreadable", r"Missing required configuration fields"),
        # The texts of Python's own JSON parser.
        ("config_unreadable", r"Expecting (?:value|property name|',' delimiter|':' delimiter)"),
        ("config_unreadable", r"Extra data: line|Unterminated string|Invalid control character"),
        ("request", r"must be provided|conflicts with a served base model|validation error"),
    )
)


def classify(route: Route, status: int, body: str) -> EngineError:
    """Return the error that an answer with `status` >= 400 means on `route`.

    `route` is `load` or `unload` (adapter routes), `completion`, `plain` (always there) or
    `dev` (there only in development mode).
    """
    message = error_message(body)
    if status == 401:
        return EngineUnauthorized(message, status=status)
    if "EngineCore encountered an issue" in message or (status == 503 and not message):
        return EngineDead(message or "the engine is dead", status=status)
    if status == 404 and _is_route_missing(body):
        missing = RuntimeLoraDisabled if route in {"load", "unload"} else RouteMissing
        return missing("the server has no such route", status=status)
    if route == "load":
        return _classify_load(status, message)
    return _classify_rest(route, status, message)


def _classify_rest(route: Route, status: int, message: str) -> EngineError:
    if status == 404 and route in {"unload", "completion"}:
        return AdapterMissing(message, status=status)
    if "Out of range float values" in message:
        return NonFinite(message, status=status)
    kind = RequestRefused if status < 500 else EngineFault
    return kind(message, status=status)


def _classify_load(status: int, message: str) -> EngineError:
    if "has already been loaded" in message:
        return AdapterAlreadyLoaded(message, status=status)
    if "LoRA is not enabled" in message:
        return RuntimeLoraDisabled(message, status=status)
    for reason, pattern in _REFUSALS:
        if pattern.search(message):
            return AdapterRefused(message, status=status, reason=reason)
    if status < 500:
        return AdapterRefused(message, status=status, reason="request")
    return EngineFault(message, status=status)


def error_message(body: str) -> str:
    """Return the text of an error body of vLLM or FastAPI; another body is returned as it is."""
    try:
        content = json.loads(body)
    except ValueError:
        return body.strip()
    error = content.get("error", content.get("detail")) if isinstance(content, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return error if isinstance(error, str) else body.strip()


def cut(text: str) -> str:
    """Return `text` in at most `MESSAGE_LIMIT` characters, the end kept: causes come last."""
    if len(text) <= MESSAGE_LIMIT:
        return text
    half = (MESSAGE_LIMIT - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def _is_route_missing(body: str) -> bool:
    try:
        content = json.loads(body)
    except ValueError:
        return True
    return not (isinstance(content, dict) and "error" in content)
