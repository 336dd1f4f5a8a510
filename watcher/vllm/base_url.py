"""The URL of a vLLM server: which text is one. No HTTP library here."""

from __future__ import annotations

from urllib.parse import urlsplit


def check_base_url(url: str) -> str:
    """Return the URL of a server, without a slash at its end.

    It is logged and recorded in the ledger, so it may hold no secret, and errors do not show it.

    Raises:
        ValueError: it is no such URL.
    """
    try:
        parts = urlsplit(url)
        server = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        server = False
    if not server:
        shown = repr(url) if "@" not in url else "(not shown, it may hold a password)"
        raise ValueError(f"not an http(s) URL of an engine: {shown}")
    where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    if "@" in parts.netloc:
        raise ValueError(
            f"the URL of {where} holds a user or password, which would be logged and recorded; "
            "vLLM takes an API key (POLICYLINE_VLLM_API_KEY), which is not"
        )
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        raise ValueError(
            f"{where}{path} is the base URL for clients; the server's is {where}{path[:-3]}"
        )
    if parts.query or parts.fragment:
        raise ValueError(f"the URL of {where} has a query or a fragment")
    return where + path
