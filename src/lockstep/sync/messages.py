"""Control messages: JSON objects with a `type`, and refusals that keep their kind on the way to the other side.

A side that refuses says so before it stops, so that the other one raises the same error at once, with the name of who refused,
instead of waiting until its deadline.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lockstep.errors import CapacityError, ConfigError, ContractError, UserError
from lockstep.sync.transport import Channel, TransportError, Wait

MAX_CONTROL = 64 * 2**20
"""Bytes of a control message at most; a manifest of 40,000 tensors has 12 MB."""

_KINDS: dict[str, type[UserError]] = {"config": ConfigError, "capacity": CapacityError}


def say(channel: Channel, message: str, wait: Wait, **fields: Any) -> None:
    """Sends a message of this type."""
    text = json.dumps({"type": message, **fields}, allow_nan=False, separators=(",", ":"))
    channel.send("control", text.encode(), wait)


def refuse(channel: Channel, error: UserError | ContractError, wait: Wait) -> None:
    """Tells the other side why this one stops; a channel that is gone already is no further error."""
    line = error.line() if isinstance(error, UserError) else str(error)
    try:
        say(channel, "refused", wait, kind=error.kind, line=line)
    except TransportError:
        return


def hear(channel: Channel, wait: Wait, *wanted: str) -> dict[str, Any]:
    """The next message, one of these types.

    Raises what the other side raised when it refused, TransportError when anything else comes.
    """
    kind, payload = channel.receive(wait, MAX_CONTROL)
    return parse(channel.peer, kind, payload, wait, *wanted)


def parse(peer: str, kind: str, payload: bytes, wait: Wait, *wanted: str) -> dict[str, Any]:
    """See `hear`; the frame is here already."""
    message = _decoded(payload) if kind == "control" else {"type": f"a {kind}"}
    if message.get("type") == "refused":
        raise _refusal(peer, message)
    if message.get("type") not in wanted:
        raise TransportError(
            f"{peer} sent {message.get('type')!r} where {' or '.join(map(repr, wanted))} was expected",
            where=f"phase {wait.phase}",
        )
    return message


def _decoded(payload: bytes) -> dict[str, Any]:
    try:
        message = json.loads(payload)
    except ValueError:
        return {"type": "something that is no JSON"}
    return message if isinstance(message, dict) else {"type": "something that is no JSON object"}


def _refusal(peer: str, message: Mapping[str, Any]) -> UserError | ContractError:
    line = f"{peer} refused: {message.get('line')}"
    kind = _KINDS.get(str(message.get("kind")))
    return ContractError(line) if kind is None else kind(line)
