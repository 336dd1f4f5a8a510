"""Actors: who appends an event, as `user@host:pid`, and whether that process has ended."""

from __future__ import annotations

import getpass
import os
import socket
from pathlib import Path
from typing import Final

_INIT_PID_NAMESPACE: Final = "pid:[4026531836]"
"""PROC_PID_INIT_INO in linux/proc_ns.h: the namespace of a process that is in no container."""


def default_actor() -> str:
    """user@host:pid of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a passwd entry
        user = str(os.getuid())
    return f"{user}@{process_host()}:{os.getpid()}"


def host_and_pid(actor: str) -> tuple[str, str]:
    """Host and process id, as text, of an actor `user@host:pid`."""
    host, _, pid = actor.rpartition("@")[2].rpartition(":")
    return host, pid


def process_host() -> str:
    """The host on which a pid means one process; inside a container with its pid namespace.

    Two containers may share a host's name (host networking) while their pids count separately.
    """
    host = socket.gethostname()
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        return host
    if namespace == _INIT_PID_NAMESPACE:
        return host
    return f"{host}/{namespace.strip('pid:[]')}"


def is_gone(actor: str) -> bool:
    """Whether an actor was a process of this host and has ended; False where nobody can know."""
    host, pid = host_and_pid(actor)
    if host != process_host() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
