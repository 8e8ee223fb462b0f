"""Channels: frames arrive whole, every wait ends, and the error says who is missing and in which phase."""

from __future__ import annotations

import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.sync.messages import hear, refuse, say
from lockstep.sync.transport import (
    Channel,
    Listener,
    TransportError,
    Wait,
    connect,
    parse_address,
    queue_pair,
)

KINDS = ["queue", "unix", "tcp"]
SOON = 0.2


@contextmanager
def pair(kind: str) -> Iterator[tuple[Channel, Channel]]:
    """(trainer's end, engine's end) of a connected channel."""
    if kind == "queue":
        ends = queue_pair()
        yield ends
        for end in ends:
            end.close()
        return
    with tempfile.TemporaryDirectory() as folder:
        listener = Listener(f"unix:{folder}/s" if kind == "unix" else "tcp:127.0.0.1:0")
        wait = Wait.begin("connect", 5)
        here = connect(listener.address, wait, "the engine")
        there = listener.accept(wait, "the trainer")
        yield here, there
        for channel in (here, there):
            channel.close()
        listener.close()


@pytest.mark.parametrize("kind", KINDS)
def test_frames_arrive_whole_and_in_order(kind: str) -> None:
    with pair(kind) as (here, there):
        wait = Wait.begin("test", 5)
        big = bytes(range(256)) * 8192
        sender = threading.Thread(
            target=lambda: [here.send("bucket", big, wait), here.send("control", b"", wait)]
        )
        sender.start()
        assert there.receive(wait, len(big)) == ("bucket", big)
        assert there.receive(wait, 10) == ("control", b"")
        sender.join()
        there.send("bucket", b"back", wait)
        assert here.receive(wait, 10) == ("bucket", b"back")


@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_ends_and_says_who_is_missing_and_when_case_25(kind: str) -> None:
    for which, peer in ((0, "the engine"), (1, "the trainer")):
        with pair(kind) as ends:
            end = ends[which]
            started = time.monotonic()
            with pytest.raises(TransportError) as missing:
                end.receive(Wait.begin("publication v3: echo", SOON), 100)
            assert SOON <= time.monotonic() - started < 5
            line = missing.value.line()
            assert f"{peer} is missing" in line and "phase publication v3: echo" in line and "0.2 s" in line


@pytest.mark.parametrize("kind", KINDS)
def test_sending_to_a_side_that_never_reads_ends_too_case_25(kind: str) -> None:
    with pair(kind) as (here, _):
        wait = Wait.begin("publication v3: bucket 7 of 9", SOON)
        with pytest.raises(TransportError, match=r"bucket 7 of 9: the engine is missing"):
            while True:
                here.send("bucket", bytes(2**20), wait)


@pytest.mark.parametrize("kind", KINDS)
def test_a_side_that_closed_is_named_at_once_case_25(kind: str) -> None:
    with pair(kind) as (here, there):
        there.close()
        started = time.monotonic()
        with pytest.raises(TransportError, match=r"phase handshake: the engine closed the connection"):
            here.receive(Wait.begin("handshake", 60), 100)
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_sent_before_closing_still_arrives(kind: str) -> None:
    with pair(kind) as (here, there):
        wait = Wait.begin("test", 5)
        here.send("control", b"last words", wait)
        here.close()
        assert there.receive(wait, 100) == ("control", b"last words")
        with pytest.raises(TransportError, match="the trainer closed"):
            there.receive(wait, 100)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_larger_than_agreed_is_not_read_case_22(kind: str) -> None:
    with pair(kind) as (here, there):
        here.send("bucket", bytes(101), Wait.begin("test", 5))
        with pytest.raises(TransportError, match="a frame of 101 bytes, at most 100 were agreed"):
            there.receive(Wait.begin("test", 5), 100)


def test_a_length_of_an_exabyte_allocates_nothing_case_22() -> None:
    ours, theirs = socket.socketpair()
    from lockstep.sync.transport import SocketChannel

    theirs.sendall(struct.pack(">4sBQ", b"LKS1", ord("B"), 2**60))
    with pytest.raises(TransportError, match="at most 1,000 were agreed"):
        SocketChannel(ours, "the trainer").receive(Wait.begin("test", 5), 1000)
    theirs.close()


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", struct.pack(">4sBQ", b"LKS1", 7, 0)])
def test_another_program_at_the_other_end_is_recognised(noise: bytes) -> None:
    ours, theirs = socket.socketpair()
    from lockstep.sync.transport import SocketChannel

    theirs.sendall(noise)
    with pytest.raises(TransportError, match="no frame of ours"):
        SocketChannel(ours, "the trainer").receive(Wait.begin("handshake", 5), 1000)
    theirs.close()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_nobody_connects_and_nobody_listens_case_25(kind: str, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        listener = Listener(f"unix:{folder}/s" if kind == "unix" else "tcp:127.0.0.1:0")
        address = listener.address
        with pytest.raises(TransportError, match=r"phase connect: the trainer, expected at .* is missing"):
            listener.accept(Wait.begin("connect", SOON), "the trainer")
        listener.close()
        with pytest.raises(TransportError, match=r"phase connect: the engine, expected at .* is missing"):
            connect(address, Wait.begin("connect", SOON), "the engine")


def test_a_listener_that_comes_late_is_met() -> None:
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/s"
        listeners: list[Listener] = []
        late = threading.Timer(0.2, lambda: listeners.append(Listener(address)))
        late.start()
        connect(address, Wait.begin("connect", 10), "the engine").close()
        late.join()
        listeners[0].close()


def test_a_socket_left_by_the_dead_is_taken_over_and_a_living_one_is_not() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/s"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(path)
        living = Listener(f"unix:{path}")
        with pytest.raises(TransportError, match="another process listens there"):
            Listener(f"unix:{path}")
        living.close()
        assert not Path(path).exists()


@pytest.mark.parametrize(
    "address", ["", "unix:", "tcp:host", "tcp:host:x", "tcp::5", "udp:a:1", "unix:" + "x" * 200]
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(TransportError):
        parse_address(address)


def test_messages_of_another_type_are_refused() -> None:
    here, there = queue_pair()
    wait = Wait.begin("handshake", 5)
    say(here, "hello", wait, x=1)
    assert hear(there, wait, "hello", "bye") == {"type": "hello", "x": 1}
    say(here, "bye", wait)
    with pytest.raises(
        TransportError, match=r"phase handshake: the trainer sent 'bye' where 'hello' was expected"
    ):
        hear(there, wait, "hello")
    for noise in (b"\xff", b"[1]", b"{}"):
        here.send("control", noise, wait)
        with pytest.raises(TransportError, match="was expected"):
            hear(there, wait, "hello")
    here.send("bucket", b"", wait)
    with pytest.raises(TransportError, match="sent 'a bucket' where"):
        hear(there, wait, "hello")


def test_a_refusal_keeps_its_kind_and_says_who() -> None:
    from lockstep.errors import CapacityError, ConfigError, ContractError

    here, there = queue_pair()
    wait = Wait.begin("handshake", 5)
    for error in (CapacityError("too big", fix="shrink"), ConfigError("wrong"), ContractError("not equal")):
        refuse(there, error, wait)
        with pytest.raises(type(error), match=r"the engine refused: (too big -> shrink|wrong|not equal)"):
            hear(here, wait, "hello")
    here.close()
    refuse(there, ConfigError("nobody hears it"), wait)
