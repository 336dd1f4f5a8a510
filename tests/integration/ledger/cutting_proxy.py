"""A proxy before Postgres that loses an answer: the commit is done, the client is not told."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
from sqlalchemy.engine import make_url

_SOCKET = ".s.PGSQL.5432"
_CHUNK = 65536


class CuttingProxy:
    """Listens on a Unix socket of its own; `url` leads through it. Use as a context manager.

    Args:
        url: of a database on a server that listens on a Unix socket.
    """

    def __init__(self, url: str) -> None:
        parsed = make_url(url)
        self._upstream = str(Path(str(parsed.query["host"])) / _SOCKET)
        self._place = Path(tempfile.mkdtemp(prefix="plcut", dir="/tmp"))
        self.url = parsed.update_query_dict({"host": str(self._place)}).render_as_string(
            hide_password=False
        )
        self._watch = psycopg.connect(url.replace("postgresql+psycopg", "postgresql"))
        self._watch.autocommit = True
        self._lock = threading.Lock()
        self._armed_at: int | None = None
        self._listener = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> Self:
        self._listener.bind(str(self._place / _SOCKET))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._watch.close()
        shutil.rmtree(self._place)

    def cut_after_the_next_commit(self) -> None:
        """Instead of the first answer that comes once the head has moved, end the connection."""
        with self._lock:
            self._armed_at = self._head()

    def _head(self) -> int:
        row = self._watch.execute("SELECT seq FROM head").fetchone()
        assert row is not None
        return int(row[0])

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed at the end
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._upstream)
                for source, sink, answers in ((client, server, False), (server, client, True)):
                    threading.Thread(
                        target=self._carry, args=(source, sink, answers), daemon=True
                    ).start()

    def _carry(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):  # the other direction has ended
            while (chunk := source.recv(_CHUNK)) and not (answers and self._cuts()):
                sink.sendall(chunk)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        if answers:
            source.close()
            sink.close()

    def _cuts(self) -> bool:
        with self._lock:
            if self._armed_at is None or self._head() == self._armed_at:
                return False
            self._armed_at = None
            return True
