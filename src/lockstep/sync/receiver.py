"""The reference receiver: assembles a complete new set of working copies beside the old one, then exchanges them at once.

`begin` checks the manifest before anything is allocated, `accept` takes buckets, `commit` installs. Until then nothing of the
decoder has changed; a tensor that is missing, extra, doubled, misshapen, of another type, not finite or not what its digest
says is named and the whole publication refused (vllm 45835, unsloth 6200). After the exchange the decoder's own digest is
taken over what its modules now hold, and compared with the trainer's: right shapes in wrong places are found, and the old
values put back (verl 7986).

Versions go up by one within a session. The first of a session may be any, since a resumed run publishes what it restored;
until it has come the decoder stands at version 0, and an engine over it refuses to sample (TRL 5312).

Next: `load_plan.py` for where tensors go, `remote.py` for who calls this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lockstep.errors import ContractError
from lockstep.models.checkpoint import SCALE_SUFFIX
from lockstep.models.decoder import Decoder
from lockstep.nn.kv_scales import KVScales
from lockstep.sync.budget import free_bytes, next_budget, start_budget
from lockstep.sync.load_plan import Held, LoadPlan, release_masters
from lockstep.sync.manifest import (
    PROTOCOL,
    Entry,
    Manifest,
    check_scales,
    layout_of,
    scales_digest,
    several,
)
from lockstep.sync.receipt import Echo
from lockstep.sync.records import Record
from lockstep.sync.stream import unpack_bucket


class UsesScales(Protocol):
    """An engine over the receiver's decoder; it gets the KV scales of each publication."""

    scales: KVScales | None

    def set_kv_scales(self, scales: KVScales) -> int:
        """Takes them into use and echoes their version."""


@dataclass
class _Pending:
    """A publication on its way."""

    manifest: Manifest
    plan: LoadPlan
    entries: dict[str, Entry]
    staged: dict[str, Held] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Receiver:
    """Fills a decoder from publications; takes the decoder over, its masters are released.

    memory_bytes: what weights, buckets and KV cache may take together, 0 for what is free on the device. kv_bytes: size of
    the KV cache, which is to be made after the first commit.
    """

    def __init__(self, decoder: Decoder, *, memory_bytes: int = 0, kv_bytes: int = 0) -> None:
        self.decoder = decoder
        self.memory_bytes, self.kv_bytes = memory_bytes, kv_bytes
        self.layout = layout_of(decoder)
        self.scales: KVScales | None = None
        self.engine: UsesScales | None = None
        self._pending: _Pending | None = None
        release_masters(decoder)
        decoder.version = 0

    @property
    def version(self) -> int:
        """Weight version in use; 0 until the session's first publication."""
        return self.decoder.version

    @property
    def scale_version(self) -> int:
        """Version of the KV scales in use; 0 without."""
        return 0 if self.scales is None else self.scales.version

    def attach(self, engine: UsesScales) -> None:
        """An engine over the same decoder: it gets the scales in use now, and all later ones."""
        self.engine = engine
        if self.scales is not None:
            self._hand_on(self.scales)

    def check_memory(self, bucket_bytes: int, where: str = "handshake") -> None:
        """Raises CapacityError when a publication over weights in use can't fit beside the KV cache. Against memory measured
        now, only what isn't there yet counts."""
        decoder, held = self.decoder, any(module.packed is not None for _, module in self.decoder.working())
        if self.memory_bytes or not held:
            count, kv, limit = start_budget, self.kv_bytes, self.memory_bytes or free_bytes(self._device)
        else:
            count, kv, limit = next_budget, 0 if self.engine else self.kv_bytes, free_bytes(self._device)
        budget = count(self.layout, decoder.flow, decoder.kernels, bucket=bucket_bytes, kv=kv, limit=limit)
        budget.check(where)

    def open_session(self) -> None:
        """A trainer came: what is held belongs to another session until it has published."""
        self._pending = None
        self.decoder.version, self.scales = 0, None
        if self.engine is not None:
            self.engine.scales = None

    def begin(self, manifest: Manifest) -> None:
        """Takes a publication on. Raises ContractError for a manifest that can't follow what is held or that describes
        another decoder, CapacityError when it doesn't fit; nothing was allocated then."""
        self._pending = None
        label = f"publication v{manifest.version}"
        layout = layout_of(self.decoder)
        problems = self._version_problems(manifest) + self._scale_problems(manifest)
        problems += manifest.layout.differences(layout, "in the manifest", "in the engine")
        if problems:
            raise ContractError(f"{label}: {several(problems)}")
        self.check_memory(manifest.bucket_bytes, label)
        self._pending = _Pending(
            manifest, LoadPlan.of(self.decoder), {e.name: e for e in manifest.layout.entries}
        )

    def accept(self, payload: bytes) -> None:
        """Takes a bucket. What is wrong with it is kept for `commit`, so that a stream is read to its end."""
        pending = self._expect_pending()
        try:
            tensors = unpack_bucket(payload)
        except ContractError as error:
            pending.problems.append(str(error))
            return
        block = pending.manifest.layout.block
        for name in dict.fromkeys(name.removesuffix(SCALE_SUFFIX) for name in tensors):
            entry = pending.entries.get(name)
            if entry is None or (name + SCALE_SUFFIX in tensors and not entry.quantized):
                pending.problems.append(
                    f"{name if entry is None else name + SCALE_SUFFIX}: not in the manifest"
                )
                continue
            if name in pending.staged:
                pending.problems.append(f"{name}: came twice")
                continue
            try:
                record = Record.read(entry, block, tensors)
            except ContractError as error:
                pending.problems.append(str(error))
                pending.staged[name] = None
                continue
            pending.staged[name] = pending.plan.prepare(self.decoder, record)

    def commit(self) -> Echo:
        """Installs a complete publication and says what the decoder holds now.

        Raises ContractError that names every tensor that is missing or wrong; nothing has changed then.
        """
        pending = self._expect_pending()
        self._pending = None
        manifest, label = pending.manifest, f"publication v{pending.manifest.version}"
        missing = [e.name for e in manifest.layout.entries if e.name not in pending.staged]
        problems = pending.problems + [f"{name}: did not come" for name in missing]
        if problems:
            raise ContractError(f"{label}: {several(problems)}; nothing was changed")
        with self._or_back(pending):
            digest = self.decoder.digest()
            if digest != manifest.digest:
                raise ContractError(
                    f"{label}: every tensor arrived, but the decoder's digest is {digest[:12]} and the trainer's "
                    f"{manifest.digest[:12]}: values are in the wrong places; the old ones were put back"
                )
            if manifest.kv_scales is not None:
                self._hand_on(manifest.kv_scales)
        self.decoder.version, self.scales = manifest.version, manifest.kv_scales
        self.decoder.refreshes += 1  # what was cached under this version's number in another session is void
        return Echo(self.version, self.scale_version, digest, scales_digest(self.scales))

    @contextmanager
    def _or_back(self, pending: _Pending) -> Iterator[None]:
        """Exchanges the working copies, and back again should anything go wrong inside."""
        before = pending.plan.install(self.decoder, pending.staged)
        kept = False
        try:
            yield
            kept = True
        finally:
            if not kept:
                pending.plan.install(self.decoder, before)
                if self.engine is not None:
                    self.engine.scales = self.scales

    @property
    def _device(self) -> torch.device:
        return next(self.decoder.parameters()).device

    def _expect_pending(self) -> _Pending:
        if self._pending is None:
            raise ContractError("a bucket or an end came without a manifest that was accepted")
        return self._pending

    def _hand_on(self, scales: KVScales) -> None:
        if self.engine is not None and (used := self.engine.set_kv_scales(scales)) != scales.version:
            raise ContractError(f"the engine uses KV scales v{used}, v{scales.version} were published")

    def _version_problems(self, manifest: Manifest) -> list[str]:
        if manifest.protocol != PROTOCOL:
            return [f"protocol {manifest.protocol}, this side speaks {PROTOCOL}"]
        if manifest.base != self.version:
            held = (
                f"the engine holds version {self.version}"
                if self.version
                else "nothing was published in this session"
            )
            return [f"it follows version {manifest.base}, but {held}"]
        if manifest.version < 1 or (self.version and manifest.version != self.version + 1):
            return [f"version {manifest.version} after {self.version}: versions go up by one, never back"]
        return []

    def _scale_problems(self, manifest: Manifest) -> list[str]:
        scales = manifest.kv_scales
        try:
            check_scales(scales, self.layout)
        except ContractError as error:
            return [str(error)]
        if scales is None:
            return [] if manifest.scale_version == 0 else ["KV scales have a version but no values"]
        if scales.version < self.scale_version:
            return [f"KV scales v{scales.version} after v{self.scale_version}"]
        if scales.version == self.scale_version and scales_digest(scales) != scales_digest(self.scales):
            return [f"KV scales v{scales.version} came with other values than before"]
        return []
