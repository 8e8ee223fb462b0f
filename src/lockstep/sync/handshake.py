"""The handshake: each side says who it is and what it will run, before a byte of a weight is sent.

The trainer compares. Protocol and engine version must be ones it knows (a release that changed an interface broke rollouts
weeks later elsewhere: verl 5683, 6112, 6393); the layouts must agree tensor by tensor; where the engine runs our own decoder,
so must the model and the kernels, since equality bit for bit is promised. The engine checks its memory. Whoever refuses tells
the other.

Next: `remote.py`, both ends of a session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lockstep import __version__
from lockstep.errors import ConfigError, ContractError, UserError
from lockstep.models.decoder import Decoder
from lockstep.sync.manifest import PROTOCOL, Layout, layout_from_json, layout_of
from lockstep.sync.messages import hear, refuse, say
from lockstep.sync.transport import Channel, Wait

REFERENCE = "reference"
"""The adapter whose engine is our own decoder."""

SUPPORTED: Mapping[str, tuple[str, ...]] = {REFERENCE: (__version__.rpartition(".")[0],)}
"""Adapter -> release series of its engine (`0.1` stands for every 0.1.x) whose interface it was tested against. An adapter
adds its line together with its contract test."""


@dataclass(frozen=True)
class Hello:
    """Who speaks. adapter: how the engine is driven. engine, version: what it is. kernels and model are compared where
    the adapter is `reference`."""

    protocol: int
    adapter: str
    engine: str
    version: str
    kernels: str
    model: dict[str, Any]
    layout: Layout

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.engine} {self.version} through adapter {self.adapter!r}"


def hello_of(decoder: Decoder, adapter: str = REFERENCE) -> Hello:
    """The hello of a side that runs our decoder."""
    model = _plain(asdict(decoder.spec))
    return Hello(PROTOCOL, adapter, "lockstep", __version__, decoder.kernels.name, model, layout_of(decoder))


def greet_engine(
    channel: Channel,
    own: Hello,
    bucket_bytes: int,
    wait: Wait,
    supported: Mapping[str, tuple[str, ...]] = SUPPORTED,
) -> Hello:
    """The trainer's part: introduces itself, checks the engine, welcomes it; the engine's hello.

    Raises ConfigError for a version or a setup that can't work together, ContractError for quantized sets or scale
    formats that differ, TransportError when the engine doesn't answer.
    """
    wait = wait.turn("handshake")
    say(channel, "hello", wait, protocol=own.protocol, version=own.version, bucket_bytes=bucket_bytes)
    message = hear(channel, wait, "hello")
    try:
        engine = read_hello(message, own.version)
        check_engine(own, engine, supported)
    except (UserError, ContractError) as error:
        refuse(channel, error, wait)
        raise
    channel.peer = f"the engine ({engine.name})"
    say(channel, "welcome", wait)
    return engine


def greet_trainer(channel: Channel, own: Hello, wait: Wait, prepare: Callable[[int], None]) -> None:
    """The engine's part. `prepare` is called before the trainer hears that the engine is there; it gets the size of the
    trainer's buckets, ends what was before, and raises a CapacityError when buckets, weights and KV cache don't fit.

    Raises ConfigError for another protocol, what the trainer refused, TransportError when it doesn't come.
    """
    wait = wait.turn("handshake")
    message = hear(channel, wait, "hello")
    try:
        if message.get("protocol") != own.protocol:
            raise _protocol_error(
                f"the trainer (lockstep {message.get('version')})", message, own.name, own.protocol
            )
        prepare(int(message.get("bucket_bytes") or 0))
    except UserError as error:
        refuse(channel, error, wait)
        raise
    say(channel, "hello", wait, **_plain(asdict(own)))
    hear(channel, wait, "welcome")


def read_hello(message: Mapping[str, Any], own_version: str) -> Hello:
    """An engine's hello. The protocol is checked first: another one may have other fields."""
    if message.get("protocol") != PROTOCOL:
        who = f"{message.get('engine')} {message.get('version')} through adapter {message.get('adapter')!r}"
        raise _protocol_error(who, message, f"lockstep {own_version}", PROTOCOL)
    wanted = set(Hello.__dataclass_fields__)
    given = {k: v for k, v in message.items() if k != "type"}
    if set(given) != wanted:
        raise ConfigError(
            f"the engine's hello has fields {sorted(given)}",
            where="handshake",
            why=f"{sorted(wanted)} belong there",
        )
    return Hello(**{**given, "layout": layout_from_json(given["layout"])})


def check_engine(own: Hello, engine: Hello, supported: Mapping[str, tuple[str, ...]]) -> None:
    """Raises ConfigError or ContractError when this engine can't be published to; see `greet_engine`."""
    series = supported.get(engine.adapter)
    if series is None or not any(_in_series(engine.version, s) for s in series):
        known = "; ".join(f"{adapter}: {', '.join(s)}" for adapter, s in supported.items())
        raise ConfigError(
            f"{engine.name} is not supported by lockstep {own.version}",
            where="handshake",
            why=f"interfaces known here are {known}",
            fix="install a supported engine version, or a lockstep that knows this one",
        )
    found = own.layout.differences(engine.layout, "in the trainer", "in the engine")
    if engine.adapter == REFERENCE:
        if own.kernels != engine.kernels:
            found.append(f"kernels are {own.kernels} in the trainer, {engine.kernels} in the engine")
        ours, theirs = own.model, engine.model
        keys = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
        found += [f"model.{k} is {ours.get(k)} in the trainer, {theirs.get(k)} in the engine" for k in keys]
    if found:
        more = f"; and {len(found) - 12} more" if len(found) > 12 else ""
        raise ContractError(
            f"handshake: {engine.name} is not set up as the trainer is: {'; '.join(found[:12])}{more}"
        )


def _in_series(version: str, series: str) -> bool:
    return version == series or version.startswith(f"{series}.")


def _protocol_error(who: str, message: Mapping[str, Any], own: str, protocol: int) -> ConfigError:
    return ConfigError(
        f"{who} speaks protocol {message.get('protocol')}, {own} speaks protocol {protocol}",
        where="handshake",
        why=f"protocol {protocol} is the only one supported here",
        fix="run the same lockstep version on both sides",
    )


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    """Tuples as lists, as JSON gives them back."""
    return {k: _listed(v) for k, v in data.items()}


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return _plain(value)
    return [_listed(v) for v in value] if isinstance(value, list | tuple) else value
