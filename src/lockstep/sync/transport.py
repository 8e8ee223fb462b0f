"""Channels: how frames get from one side to the other. Two of them, behind one small protocol.

A frame is a kind (control or bucket) and bytes. `queue_pair` joins two threads of a process; `connect` and `Listener` join
processes over a Unix or TCP socket, each frame with a magic word and its length before it. Every wait has a deadline and a
phase, and when it passes the error says who is missing and in which phase, instead of a watchdog's kill minutes later (TRL
2923, verl 3873, AReaL 1439, prime-rl 2337). A receiver states how large a frame may be before it is read.

There is no authentication: use a Unix socket, or TCP on a network of your own. Nothing that arrives is ever executed.

Next: `messages.py` for what control frames say.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from lockstep.errors import UserError

Kind = Literal["control", "bucket"]
_KINDS: dict[int, Kind] = {ord("C"): "control", ord("B"): "bucket"}
_CODES = {kind: code for code, kind in _KINDS.items()}
_HEADER = struct.Struct(">4sBQ")
_MAGIC = b"LKS1"
_QUEUED = 4
"""Frames that an in-process channel holds before the sender waits."""


class TransportError(UserError):
    """The other side is missing, gone, or speaks something else."""

    kind = "transport"


@dataclass(frozen=True)
class Wait:
    """A phase and when it ends, in seconds of `time.monotonic`."""

    phase: str
    seconds: float
    deadline: float

    @classmethod
    def begin(cls, phase: str, seconds: float) -> Wait:
        """A wait that starts now."""
        return cls(phase, seconds, time.monotonic() + seconds)

    def turn(self, phase: str) -> Wait:
        """The next phase under the same deadline."""
        return replace(self, phase=phase)

    @property
    def left(self) -> float:
        """Seconds, never negative."""
        return max(0.0, self.deadline - time.monotonic())

    def missing(self, who: str) -> TransportError:
        """What to raise when the deadline passed."""
        return TransportError(
            f"{who} is missing",
            where=f"phase {self.phase}",
            why=f"nothing came within {self.seconds:g} s",
            fix="see whether it still runs, and why it stopped; raise the time limit if it is only slow",
        )

    def gone(self, who: str, why: str = "") -> TransportError:
        """What to raise when the other side closed the channel."""
        return TransportError(f"{who} closed the connection", where=f"phase {self.phase}", why=why)


class Channel(Protocol):
    """One end of a connection. `peer` names the other side in errors."""

    peer: str

    def send(self, kind: Kind, payload: bytes, wait: Wait) -> None:
        """Hands a frame over. Raises TransportError when the deadline passes or the other side is gone."""

    def receive(self, wait: Wait, limit: int) -> tuple[Kind, bytes]:
        """The next frame, of at most `limit` bytes. Raises TransportError as `send` does, and for a larger frame before any
        of it is read."""

    def close(self) -> None:
        """Ends the connection; the other side's waits end too."""


class _Pipe:
    """A bounded one-way queue of frames."""

    def __init__(self) -> None:
        self.frames: deque[tuple[Kind, bytes]] = deque()
        self.closed = False
        self.changed = threading.Condition()

    def put(self, frame: tuple[Kind, bytes], wait: Wait, peer: str) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.closed or len(self.frames) < _QUEUED, wait.left):
                raise wait.missing(peer)
            if self.closed:
                raise wait.gone(peer)
            self.frames.append(frame)
            self.changed.notify_all()

    def get(self, wait: Wait, peer: str) -> tuple[Kind, bytes]:
        with self.changed:
            if not self.changed.wait_for(lambda: self.closed or bool(self.frames), wait.left):
                raise wait.missing(peer)
            if not self.frames:
                raise wait.gone(peer)
            frame = self.frames.popleft()
            self.changed.notify_all()
            return frame

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class QueueChannel:
    """A channel within the process."""

    def __init__(self, outgoing: _Pipe, incoming: _Pipe, peer: str) -> None:
        self.outgoing, self.incoming, self.peer = outgoing, incoming, peer

    def send(self, kind: Kind, payload: bytes, wait: Wait) -> None:
        """See `Channel`."""
        self.outgoing.put((kind, payload), wait, self.peer)

    def receive(self, wait: Wait, limit: int) -> tuple[Kind, bytes]:
        """See `Channel`."""
        kind, payload = self.incoming.get(wait, self.peer)
        if len(payload) > limit:
            raise _too_large(self.peer, len(payload), limit, wait)
        return kind, payload

    def close(self) -> None:
        """See `Channel`."""
        self.outgoing.close()
        self.incoming.close()


def queue_pair(trainer: str = "the trainer", engine: str = "the engine") -> tuple[QueueChannel, QueueChannel]:
    """(the trainer's end, the engine's end); the names are those in errors."""
    there, back = _Pipe(), _Pipe()
    return QueueChannel(there, back, engine), QueueChannel(back, there, trainer)


class SocketChannel:
    """A channel over a connected stream socket."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.connection, self.peer = connection, peer

    def send(self, kind: Kind, payload: bytes, wait: Wait) -> None:
        """See `Channel`."""
        try:
            self.connection.settimeout(max(wait.left, 1e-6))
            self.connection.sendall(_HEADER.pack(_MAGIC, _CODES[kind], len(payload)))
            self.connection.settimeout(max(wait.left, 1e-6))
            self.connection.sendall(payload)
        except TimeoutError as error:
            self.close()  # half a frame may be on its way: nothing after it could be read
            raise wait.missing(self.peer) from error
        except OSError as error:
            self.close()
            raise wait.gone(self.peer, str(error)) from error

    def receive(self, wait: Wait, limit: int) -> tuple[Kind, bytes]:
        """See `Channel`."""
        magic, code, size = _HEADER.unpack(self._read(_HEADER.size, wait))
        if magic != _MAGIC or code not in _KINDS:
            self.close()
            raise TransportError(
                f"{self.peer} sends something that is no frame of ours",
                where=f"phase {wait.phase}",
                why="another program, or another version of this one, is at the other end",
            )
        if size > limit:
            self.close()
            raise _too_large(self.peer, size, limit, wait)
        return _KINDS[code], bytes(self._read(size, wait))

    def close(self) -> None:
        """See `Channel`."""
        self.connection.close()

    def _read(self, size: int, wait: Wait) -> bytearray:
        data = bytearray(size)
        view, have = memoryview(data), 0
        try:
            while have < size:
                self.connection.settimeout(max(wait.left, 1e-6))
                count = self.connection.recv_into(view[have:])
                if count == 0:
                    self.close()
                    raise wait.gone(self.peer)
                have += count
        except TimeoutError as error:
            self.close()
            raise wait.missing(self.peer) from error
        except OSError as error:
            self.close()
            raise wait.gone(self.peer, str(error)) from error
        return data


def _too_large(peer: str, size: int, limit: int, wait: Wait) -> TransportError:
    what = f"{peer} sends a frame of {size:,} bytes, at most {limit:,} were agreed"
    return TransportError(what, where=f"phase {wait.phase}")


class Listener:
    """Waits at an address, `unix:PATH` or `tcp:HOST:PORT` (port 0 takes a free one), for the other side to connect."""

    def __init__(self, address: str) -> None:
        family, place = parse_address(address)
        self.path = Path(place) if isinstance(place, str) else None
        if self.path is not None:
            _remove_stale(self.path)
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_INET:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind(place)
            self.socket.listen(1)
        except OSError as error:
            self.socket.close()
            raise TransportError("can't listen", where=address, why=str(error)) from error

    @property
    def address(self) -> str:
        """Where to connect to, the port filled in."""
        if self.path is not None:
            return f"unix:{self.path}"
        host, port = self.socket.getsockname()
        return f"tcp:{host}:{port}"

    def accept(self, wait: Wait, peer: str) -> SocketChannel:
        """The connection of the other side, called `peer`. Raises TransportError when nobody comes."""
        self.socket.settimeout(max(wait.left, 1e-6))
        try:
            connection, _ = self.socket.accept()
        except TimeoutError as error:
            raise wait.missing(f"{peer}, expected at {self.address},") from error
        return SocketChannel(_prepared(connection), peer)

    def close(self) -> None:
        """Stops listening; connections stay."""
        self.socket.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def connect(address: str, wait: Wait, peer: str) -> SocketChannel:
    """Connects to a listener, trying again while it isn't there. Raises TransportError when it never comes."""
    family, place = parse_address(address)
    while True:
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(max(wait.left, 1e-6))
        try:
            connection.connect(place)
            return SocketChannel(_prepared(connection), peer)
        except OSError as error:
            connection.close()
            if wait.left == 0.0:
                raise wait.missing(f"{peer}, expected at {address},") from error
        time.sleep(min(0.05, wait.left))


def parse_address(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Family and place of an address. Raises TransportError for anything but the two forms."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        if len(os.fsencode(rest)) > 100:
            why = "the system's limit for such paths is about 100 bytes"
            raise TransportError("the socket's path is too long", where=address, why=why)
        return socket.AF_UNIX, rest
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isdecimal() and int(port) < 65536:
        return socket.AF_INET, (host, int(port))
    raise TransportError("no address", where=address, fix="write unix:PATH or tcp:HOST:PORT")


def _prepared(connection: socket.socket) -> socket.socket:
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection


def _remove_stale(path: Path) -> None:
    """Removes a socket that a dead process left; one that somebody answers at is refused."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        with contextlib.suppress(ConnectionRefusedError):
            probe.connect(str(path))
            raise TransportError("another process listens there", where=f"unix:{path}")
    path.unlink()
