"""The manifest of a publication: what will arrive, and under which rules it was made.

Its `Layout` is what doesn't change during a run: precision, scale format, block size, ties, and every tensor by exact module
path with role, shape, type and whether it is quantized. Both sides make theirs from their own decoder, and they are compared
tensor by tensor at the handshake and again on every publication: a set of quantized tensors that differs (verl 7519), or a
side that switched to power-of-two scales (prime-rl 3112), stops before the first weight is sent. The rest belongs to one version:
version and base, KV scales, a digest for every tensor and one for the whole.

Next: `records.py`, which makes what the entries describe.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from lockstep.errors import ContractError
from lockstep.models.checkpoint import listing
from lockstep.models.decoder import Decoder
from lockstep.nn.kv_scales import KVScales
from lockstep.numerics.formats import E4M3
from lockstep.sync.roles import ROLES, Role, slots

PROTOCOL = 1
"""Version of everything that goes over the wire; both sides must have the same."""


@dataclass(frozen=True)
class Entry:
    """One tensor. dtype: of the codes when quantized, else of the values. digest: SHA-256 of its record (`Record.digest`),
    empty in a layout."""

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    quantized: bool
    digest: str = ""

    @property
    def numel(self) -> int:
        """Values."""
        return math.prod(self.shape)

    def scale_shape(self, block: tuple[int, int]) -> tuple[int, int]:
        """Shape of its scales: one for each block, ragged ones included."""
        rows, columns = self.shape
        return -(-rows // block[0]), -(-columns // block[1])


@dataclass(frozen=True)
class Layout:
    """What both sides must agree on before anything is sent.

    fprop: formats of both operands of the forward GEMM. block: rows and columns of a weight that share a scale, None where
    weights have none. attention: formats of its products. kv_shape: layers and KV heads. ties: pairs of names for one tensor,
    the absent one first.
    """

    fprop: str
    scale: str
    block: tuple[int, int] | None
    activation: str
    attention: str
    kv: str
    kv_shape: tuple[int, int]
    ties: tuple[tuple[str, str], ...]
    entries: tuple[Entry, ...]

    @property
    def quantized(self) -> frozenset[str]:
        """Names of the quantized tensors."""
        return frozenset(e.name for e in self.entries if e.quantized)

    def nbytes(self, entry: Entry) -> int:
        """Bytes of its record on the wire."""
        size = entry.numel * int(getattr(torch, entry.dtype).itemsize)
        if entry.quantized and self.block is not None:
            size += 4 * math.prod(entry.scale_shape(self.block))
        return size

    def differences(self, other: Layout, here: str, there: str) -> list[str]:
        """What the layouts disagree about, in words; `here` and `there` say whose they are."""
        found = [
            f"{f.name} is {getattr(self, f.name)} {here}, {getattr(other, f.name)} {there}"
            for f in fields(self)
            if f.name != "entries" and getattr(self, f.name) != getattr(other, f.name)
        ]
        ours, theirs = ({e.name: e for e in layout.entries} for layout in (self, other))
        both = [name for name in ours if name in theirs]
        for only, side in ((ours.keys() - theirs.keys(), here), (theirs.keys() - ours.keys(), there)):
            if only:
                found.append(f"only {side}: {listing(sorted(only))}")
        for a, b, first, second in ((ours, theirs, here, there), (theirs, ours, there, here)):
            names = [n for n in both if a[n].quantized and not b[n].quantized]
            if names:
                found.append(f"quantized {first} but not {second}: {listing(names)}")
        for what in ("role", "shape", "dtype"):
            for n in both:
                mine, yours = getattr(ours[n], what), getattr(theirs[n], what)
                if mine != yours and (what != "dtype" or ours[n].quantized == theirs[n].quantized):
                    found.append(f"{what} of {n} is {mine} {here}, {yours} {there}")
        return found


@dataclass(frozen=True)
class Manifest:
    """One publication. base: the version the engine holds now, 0 for the first of a session (which may be any version, since
    a resumed run publishes the one it restored). digest: `Decoder.digest` of the whole. bucket_bytes: most bytes of a
    bucket, from which both sides compute the same cut."""

    version: int
    base: int
    scale_version: int
    layout: Layout
    kv_scales: KVScales | None
    digest: str
    bucket_bytes: int
    protocol: int = PROTOCOL

    def to_json(self) -> dict[str, Any]:
        """As plain data; FP32 scales are exact as decimal numbers."""
        scales = self.kv_scales
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        kv = None if scales is None else {"k": scales.k.tolist(), "v": scales.v.tolist()}
        return {**plain, "layout": asdict(self.layout), "kv_scales": kv}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Reads what `to_json` made. Raises ContractError when fields are missing, unknown or of another kind."""
        plain = _fields_of(cls, data, "manifest")
        version = _whole(plain, "scale_version", "manifest")
        return cls(
            **{
                **plain,
                **{n: _whole(plain, n, "manifest") for n in ("version", "base", "bucket_bytes", "protocol")},
                "scale_version": version,
                "layout": layout_from_json(plain["layout"]),
                "kv_scales": _scales_from_json(plain["kv_scales"], version),
            }
        )


def layout_of(decoder: Decoder) -> Layout:
    """The layout of a decoder, from its flow and its modules; needs no weights."""
    flow, spec = decoder.flow, decoder.spec
    described = flow.describe()
    code = str(E4M3).removeprefix("torch.")
    entries = tuple(
        Entry(s.name, s.role, s.shape, code if s.quantized else described["activation"], s.quantized)
        for s in slots(decoder)
    )
    ties = (("lm_head.weight", "model.embed_tokens.weight"),) if spec.tie_embeddings else ()
    return Layout(
        fprop=described["fprop"],
        scale=flow.scale,
        block=flow.fprop.rhs.group,
        activation=described["activation"],
        attention=described["attention"],
        kv="fp8" if flow.kv_fp8 else "bf16",
        kv_shape=(spec.num_layers, spec.num_kv_heads),
        ties=ties,
        entries=entries,
    )


def with_digests(layout: Layout, digests: Mapping[str, str]) -> Layout:
    """The layout with the digest of every record."""
    return replace(layout, entries=tuple(replace(e, digest=digests[e.name]) for e in layout.entries))


def layout_from_json(data: Any) -> Layout:
    """Reads `asdict(layout)` after a trip through JSON. Raises ContractError when it is no layout."""
    plain = _fields_of(Layout, data, "layout")
    try:
        block = None if plain["block"] is None else tuple(int(n) for n in plain["block"])
        entries = tuple(_entry_from_json(e) for e in plain["entries"])
        kv_shape, ties = tuple(int(n) for n in plain["kv_shape"]), tuple(tuple(t) for t in plain["ties"])
    except (TypeError, ValueError) as error:
        raise ContractError(f"the layout can't be read: {error}") from error
    names = [e.name for e in entries]
    if doubled := sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []:
        raise ContractError(f"the layout names tensors twice: {listing(doubled)}")
    return Layout(**{**plain, "block": block, "entries": entries, "kv_shape": kv_shape, "ties": ties})


def check_scales(scales: KVScales | None, layout: Layout) -> None:
    """Raises ContractError unless KV scales are there exactly when the layout has an FP8 cache, and usable."""
    if (scales is not None) != (layout.kv == "fp8"):
        raise ContractError(
            f"the KV cache is {layout.kv}, but {'no' if scales is None else 'there are'} KV scales"
        )
    if scales is not None:
        scales.refuse_unless_usable(*layout.kv_shape)


def several(problems: list[str], limit: int = 12) -> str:
    """The first problems, and how many more there are."""
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return "; ".join(problems[:limit]) + more


def scales_digest(scales: KVScales | None) -> str:
    """SHA-256 over shape and values of KV scales, whatever their version; empty without any."""
    if scales is None:
        return ""
    h = hashlib.sha256(repr(tuple(scales.k.shape)).encode())
    h.update(scales.on_host().numpy().tobytes())
    return h.hexdigest()


def _entry_from_json(data: Any) -> Entry:
    plain = _fields_of(Entry, data, "entry")
    name, role, dtype, shape = plain["name"], plain["role"], plain["dtype"], plain["shape"]
    if not isinstance(name, str) or role not in ROLES or not isinstance(plain["quantized"], bool):
        raise ContractError(f"an entry can't be read: {str(data)[:120]}")
    if not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        raise ContractError(f"{name}: unknown type {dtype!r}")
    sizes = tuple(int(n) for n in shape)
    if any(n < 1 for n in sizes) or (plain["quantized"] and len(sizes) != 2):
        raise ContractError(f"{name}: impossible shape {list(sizes)}")
    return Entry(**{**plain, "shape": sizes})


def _scales_from_json(data: Any, version: int) -> KVScales | None:
    if data is None:
        return None
    try:
        k, v = (torch.tensor(data[x], dtype=torch.float32) for x in ("k", "v"))
    except (KeyError, TypeError, ValueError) as error:
        raise ContractError(f"the KV scales can't be read: {error}") from error
    return KVScales(k, v, version)


def _fields_of(kind: type, data: Any, what: str) -> dict[str, Any]:
    """The mapping's values, when it has exactly the dataclass's fields."""
    wanted = {f.name for f in fields(kind)}
    given = set(data) if isinstance(data, Mapping) else set()
    if given != wanted:
        missing, unknown = sorted(wanted - given), sorted(map(str, given - wanted))
        raise ContractError(f"the {what} can't be read: missing {missing}, unknown {unknown[:8]}")
    return dict(data)


def _whole(plain: Mapping[str, Any], key: str, what: str) -> int:
    value = plain[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ContractError(f"the {what} can't be read: {key} is {value!r}")
    return value
