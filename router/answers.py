"""The router's own answers: JSON, and errors in the format of OpenAI's API."""

from __future__ import annotations

import math

from aiohttp import web


class HttpRefused(Exception):
    """The request ends with this answer.

    Args:
        status: HTTP status.
        code: names the condition for programs: `policy_not_ready`, ...
        message: explains it to people.
        retry_after_s: after how long a retry may help; None: never.
    """

    def __init__(
        self, status: int, code: str, message: str, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s

    def response(self) -> web.Response:
        """The answer."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        body = {"message": self.message, "type": self.code, "param": None, "code": self.status}
        return web.json_response({"error": body}, status=self.status, headers=headers)
