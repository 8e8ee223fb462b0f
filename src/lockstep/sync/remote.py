"""A session between a trainer and an engine that doesn't share its memory: both ends.

    trainer  hello ->            <- hello (or refused)      welcome ->
    then, for each version:
             manifest ->         <- go                      bucket -> ... bucket -> end ->         <- echo
    and      bye ->

The trainer's end is a `RemoteReceiver`: a target for `Publisher`, beside shared memory. The engine's end is `serve`. The
manifest is answered before the first bucket, so both sides are known to be there and the memory to suffice; the stream is then
read to its end whatever is wrong with it, and refused as a whole. On resume nothing special happens: the restored version is
the first that is published, and the engine, which has sampled nothing in this session, waits for no other (prime-rl 3016).

Next: `receiver.py`, what the engine does with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

from lockstep.errors import CapacityError, ContractError, UserError
from lockstep.models.decoder import Decoder
from lockstep.nn.kv_scales import KVScales
from lockstep.sync.handshake import SUPPORTED, Hello, greet_engine, greet_trainer, hello_of
from lockstep.sync.manifest import Manifest, check_scales, layout_of, scales_digest, with_digests
from lockstep.sync.messages import hear, parse, refuse, say
from lockstep.sync.receipt import Echo
from lockstep.sync.receiver import Receiver
from lockstep.sync.records import records
from lockstep.sync.roles import slots
from lockstep.sync.spec import SyncSpec
from lockstep.sync.stream import pack_bucket, payload_limit, plan
from lockstep.sync.transport import Channel, Wait


class RemoteReceiver:
    """The engine at the other end of a channel, as the trainer sees it: something that `Publisher` delivers to.

    decoder: whose working copies the engine is to hold, the trainer's own in a unified flow, else one with the rollout's flow
    that shares the trainer's masters. Made by a handshake; raises as `greet_engine` does.
    """

    def __init__(
        self,
        decoder: Decoder,
        channel: Channel,
        spec: SyncSpec | None = None,
        *,
        supported: Mapping[str, tuple[str, ...]] = SUPPORTED,
    ) -> None:
        self.decoder, self.channel, self.spec = decoder, channel, spec or SyncSpec()
        self.version = 0
        self.scales: KVScales | None = None
        wait = Wait.begin("handshake", self.spec.handshake_timeout_s)
        self.engine: Hello = greet_engine(channel, hello_of(decoder), self.spec.bucket_bytes, wait, supported)

    def deliver(self, version: int, scales: KVScales | None) -> Echo:
        """Sends the decoder's working copies and what KV scales there are, and returns the engine's echo.

        Raises ContractError for a tensor that isn't finite or has another precision than its role (before anything is sent),
        for what the engine refused, and when its echo isn't what was sent; TransportError when it is missing.
        """
        scales = scales if scales is not None else self.scales
        wait = Wait.begin(f"publication v{version}", self.spec.publish_timeout_s)
        manifest = self._manifest(version, scales)
        say(
            self.channel,
            "manifest",
            wait.turn(f"publication v{version}: manifest"),
            manifest=manifest.to_json(),
        )
        hear(self.channel, wait.turn(f"publication v{version}: answer to the manifest"), "go")
        buckets = plan(manifest.layout, manifest.bucket_bytes)
        places = {slot.name: slot for slot in slots(self.decoder)}
        for i, entries in enumerate(buckets, 1):
            payload = pack_bucket(records(self.decoder, [places[e.name] for e in entries]))
            turn = wait.turn(f"publication v{version}: bucket {i} of {len(buckets)}")
            self.channel.send("bucket", payload, turn)
        say(self.channel, "end", wait.turn(f"publication v{version}: end"))
        echo = read_echo(hear(self.channel, wait.turn(f"publication v{version}: echo"), "echo"))
        wanted = Echo(version, manifest.scale_version, manifest.digest, scales_digest(scales))
        if echo != wanted:
            raise ContractError(
                f"publication v{version}: {self.channel.peer} echoes {echo}, {wanted} was sent"
            )
        self.version, self.scales = version, scales
        return echo

    def close(self) -> None:
        """Says goodbye and ends the session."""
        say(self.channel, "bye", Wait.begin("goodbye", self.spec.handshake_timeout_s))
        self.channel.close()

    def _manifest(self, version: int, scales: KVScales | None) -> Manifest:
        layout = layout_of(self.decoder)
        check_scales(scales, layout)
        digests = {record.name: record.digest() for record in records(self.decoder)}
        return Manifest(
            version=version,
            base=self.version,
            scale_version=0 if scales is None else scales.version,
            layout=with_digests(layout, digests),
            kv_scales=scales,
            digest=self.decoder.digest(),
            bucket_bytes=self.spec.bucket_bytes,
        )


def read_echo(message: Mapping[str, object]) -> Echo:
    """An echo from its message. Raises ContractError when it has other fields."""
    given = {k: v for k, v in message.items() if k != "type"}
    if set(given) != set(Echo.__dataclass_fields__):
        raise ContractError(f"the echo has fields {sorted(given)}")
    return Echo(**given)  # type: ignore[arg-type]


def serve(
    channel: Channel,
    receiver: Receiver,
    spec: SyncSpec | None = None,
    *,
    hello: Hello | None = None,
    on_commit: Callable[[Echo], None] | None = None,
    log: Callable[[str], None] = print,
) -> None:
    """The engine's end of a session, until the trainer says goodbye.

    A publication that is refused leaves the old weights in place and the session open. `on_commit` is called after each
    that was taken, before the trainer hears of it: the first time is when to make the KV cache and to `attach` the engine.
    Raises as `greet_trainer` does, and TransportError when the trainer is missing or gone.
    """
    spec = spec or SyncSpec()

    def prepare(bucket_bytes: int) -> None:
        receiver.check_memory(bucket_bytes)
        receiver.open_session()

    wait = Wait.begin("handshake", spec.handshake_timeout_s)
    greet_trainer(channel, hello or hello_of(receiver.decoder), wait, prepare)
    while True:
        idle = Wait.begin(f"waiting for what follows version {receiver.version}", spec.idle_timeout_s)
        message = hear(channel, idle, "manifest", "bye")
        if message["type"] == "bye":
            channel.close()
            return
        wait = Wait.begin("publication", spec.publish_timeout_s)
        try:
            manifest = Manifest.from_json(message.get("manifest") or {})
            echo = _receive(channel, receiver, manifest, wait)
        except (ContractError, CapacityError) as error:
            log(f"refused: {error}")
            refuse(channel, error, wait.turn("refusal"))
            continue
        if on_commit is not None:
            _tell(channel, wait, on_commit, echo)
        log(f"holds v{echo.version}, KV scales v{echo.scale_version}, {echo.digest[:12]}")
        say(channel, "echo", wait.turn(f"publication v{echo.version}: echo"), **asdict(echo))


def _tell(channel: Channel, wait: Wait, on_commit: Callable[[Echo], None], echo: Echo) -> None:
    """Runs the hook; the trainer hears of its failure before it ends the session."""
    try:
        on_commit(echo)
    except (UserError, ContractError) as error:
        refuse(channel, error, wait.turn("refusal"))
        raise


def _receive(channel: Channel, receiver: Receiver, manifest: Manifest, wait: Wait) -> Echo:
    """One publication, from its manifest to the commit."""
    label = f"publication v{manifest.version}"
    receiver.begin(manifest)
    say(channel, "go", wait.turn(f"{label}: answer to the manifest"))
    buckets = plan(manifest.layout, manifest.bucket_bytes)
    limit = max(2**16, max(payload_limit(entries, manifest.layout) for entries in buckets))
    count = 0
    while True:
        turn = wait.turn(
            f"{label}: bucket {count + 1} of {len(buckets)}" if count < len(buckets) else f"{label}: end"
        )
        kind, payload = channel.receive(turn, limit)
        if kind == "control":
            parse(channel.peer, kind, payload, turn, "end")
            return receiver.commit()
        count += 1
        receiver.accept(payload)
