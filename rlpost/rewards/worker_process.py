"""The parent's end of one reward worker: start, send, receive with a deadline, kill and explain. Nothing blocks the event loop."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.rewards.wire import HEADER, Ready, Refused, Setup, encode
from rlpost.types import ConfigError, InfrastructureError

START_TIMEOUT_S = 180.0
"""A user's module may import heavy libraries; a start that takes longer hangs."""

CLOSE_TIMEOUT_S = 1.0
"""How long an idle worker gets to end by itself before it is killed."""

_POLL_S = 1.0
"""How often a silent worker is checked for being alive; its death normally shows at once as a closed socket."""

_SETTLE_S = 0.1
"""Time for what already lies in the socket to be read when a deadline passed while the parent itself was busy."""

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rlpost.rewards.worker import main; main(*map(int, sys.argv[2:]))"
"""Started with -c and the parent's sys.path: the parent's __main__ is not imported again, and names resolve as they do there."""


class Silence(Exception):
    """The worker sent nothing before the deadline."""


class WorkerDied(Exception):
    """The worker's process ended or closed its socket."""


@dataclass(frozen=True)
class Ending:
    """How a worker ended: ``status`` in words, and the traceback that it left, if any."""

    status: str
    traceback: str


class WorkerProcess:
    """One worker. Made by :meth:`start`; ended by :meth:`close` or :meth:`kill`, after which it is of no use."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter, crash_file: Any
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._crash_file = crash_file
        self._reading: asyncio.Task[Any] | None = None
        self._ending: Ending | None = None
        self.ready = Ready(where=(), is_async=())

    @classmethod
    async def start(cls, setup: Setup, directory: Path, output: Path | None) -> WorkerProcess:
        """Start a process in ``directory`` and wait until it loaded all functions.

        What the functions print goes to the file ``output``, or to this process's stderr.
        Raises ConfigError when a function cannot be used, InfrastructureError when the process does not come up.
        """
        ours, theirs = socket.socketpair()
        crash_file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        try:
            process = _spawn(theirs.fileno(), crash_file.fileno(), directory, output)
        finally:
            theirs.close()
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        worker = cls(process, reader, writer, crash_file)
        try:
            await worker.send(encode(setup))
            answer = await worker.receive(START_TIMEOUT_S)
            if isinstance(answer, Refused):
                raise ConfigError(answer.message)
            worker.ready = answer
        except (Silence, WorkerDied) as error:
            hangs = isinstance(error, Silence)
            ending = await worker.kill(dump_traceback=hangs)
            what = f"was not ready after {START_TIMEOUT_S:g} s" if hangs else f"ended while it was starting ({ending.status})"
            functions = ", ".join(config.function for config in setup.configs if config.function)
            raise InfrastructureError(
                f"a reward worker {what}. Importing one of {functions} {'hangs' if hangs else 'ends the process'}; "
                f"what it printed is in {output or 'the output of this process'}.\n{ending.traceback}"
            ) from error
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def send(self, frame: bytes) -> None:
        """Send an encoded message. Raises WorkerDied."""
        self._writer.write(frame)
        try:
            await self._writer.drain()
        except OSError as error:
            raise WorkerDied from error

    async def receive(self, timeout_s: float) -> Any:
        """The next message. Raises Silence after ``timeout_s`` without one, WorkerDied when there will be none."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        while not self._reading.done():
            left = deadline - asyncio.get_running_loop().time()
            # Not wait_for: the read goes on over a time-out, so that half a message is never lost.
            await asyncio.wait({self._reading}, timeout=max(min(left, _POLL_S), _SETTLE_S))
            if self._reading.done():
                break
            if self._has_exited():
                await asyncio.wait({self._reading}, timeout=_SETTLE_S)
                if not self._reading.done():  # a process that the reward started still holds the socket
                    raise WorkerDied
            elif left <= 0:
                raise Silence
        reading, self._reading = self._reading, None
        if isinstance(reading.exception(), WorkerDied):
            await self._wait_for_exit(CLOSE_TIMEOUT_S)  # the socket closes a moment before the exit code can be had
        return reading.result()

    async def close(self) -> None:
        """End the worker within about CLOSE_TIMEOUT_S: it goes by itself when idle, and is killed otherwise."""
        if self._ending is None:
            self._writer.close()
            await self._wait_for_exit(CLOSE_TIMEOUT_S)
        await self.kill()

    async def kill(self, dump_traceback: bool = False) -> Ending:
        """Kill the worker and all processes that it started; returns how it ended.

        ``dump_traceback`` first asks it where it is (SIGUSR1; see worker.main), for a call that hangs.
        """
        if self._ending is not None:
            return self._ending
        if dump_traceback and not self._has_exited():
            self._process.send_signal(signal.SIGUSR1)
            for _ in range(10):
                await asyncio.sleep(0.02)
                if os.fstat(self._crash_file.fileno()).st_size:
                    break
        by_itself = self._has_exited()
        try:
            # Before the process is reaped: until then its id, which is also its group's, cannot be reused.
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._process.kill()
        await self._wait_for_exit(CLOSE_TIMEOUT_S)
        code = self._process.poll()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None
        self._writer.close()
        with self._crash_file:
            self._crash_file.seek(0)
            trace = self._crash_file.read().decode(errors="replace")
        self._ending = Ending(status=_status(code) if by_itself else "killed", traceback=trace)
        return self._ending

    async def _read(self) -> Any:
        try:
            (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            return pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise WorkerDied from error

    def _has_exited(self) -> bool:
        """Whether the process ended, without reaping it (see kill)."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # someone else reaped it
            return True

    async def _wait_for_exit(self, timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        # Polling, as asyncio's child watchers work only where the main thread's loop does, and a driver may run in any thread.
        while not self._has_exited() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _spawn(descriptor: int, crash_descriptor: int, directory: Path, output: Path | None) -> subprocess.Popen[bytes]:
    """A fresh interpreter in a session of its own (so that Ctrl-C reaches only the parent, and killing takes its children along)."""
    path = json.dumps([os.path.abspath(entry) for entry in sys.path])
    arguments: Sequence[str] = [sys.executable, "-c", _BOOT, path, str(descriptor), str(crash_descriptor), str(os.getpid())]
    # Rewards must not take memory of the trainer's GPUs, nor a thread pool for each worker of a busy node.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with open(output or os.devnull, "ab") as log:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log if output else 2,  # never our stdout: that may be read by a program
            stderr=log if output else None,
            pass_fds=(descriptor, crash_descriptor),
            cwd=directory,
            env=environment,
            start_new_session=True,
        )


def _status(code: int | None) -> str:
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
