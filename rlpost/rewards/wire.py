"""The messages between a reward runner and its worker processes: pickled records with a length in front, over a socket pair.

Only plain records of this module, and in :class:`Batch` the caller's fields, are pickled. Both ends are the same user's
processes on one machine; nothing listens on a network.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlpost.types import FailureKind, RewardItem

HEADER = struct.Struct("!Q")
"""Length of the pickle that follows, in bytes."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Parent to worker, once: what to load. ``configs`` are RewardConfig."""

    configs: Sequence[Any]
    field_names: Sequence[str] | None
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Worker to parent, once: every function is loaded and fits. One entry a function, in the order of the configuration."""

    where: Sequence[str]
    is_async: Sequence[bool]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Worker to parent instead of Ready: a function cannot be used."""

    message: str


@dataclass(frozen=True, kw_only=True)
class CallRequest:
    """One call of function number ``function`` on one item."""

    call_id: int
    function: int
    item: RewardItem


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Parent to worker: calls to make. The worker answers each with Started and then Finished."""

    calls: Sequence[CallRequest]


@dataclass(frozen=True, kw_only=True)
class Started:
    """Worker to parent: this call runs from now on; its deadline begins."""

    call_id: int


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Worker to parent: what a call gave. ``kind`` None is success; else ``value`` is None and ``message`` says why."""

    call_id: int
    value: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    kind: FailureKind | None = None
    message: str = ""
    traceback: str = ""


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """Worker to parent instead of all Started and Finished of a batch: its items could not be unpickled there."""

    traceback: str


def encode(message: Any) -> bytes:
    """A message with its header; raises whatever pickle raises when a field cannot be pickled."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


class BlockingChannel:
    """The worker's end of the socket: plain blocking reads and writes in its main thread."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._stream = self._socket.makefile("rb")

    def send(self, message: Any) -> None:
        """Send one message; raises OSError when the parent is gone."""
        self._socket.sendall(encode(message))

    def receive_bytes(self) -> bytes | None:
        """The next message, still pickled; None when the parent closed its end."""
        header = self._stream.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        (length,) = HEADER.unpack(header)
        body = self._stream.read(length)
        return body if len(body) == length else None
