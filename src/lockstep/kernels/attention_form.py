"""How attention's operands are stored: the one record that says which scales belong to the codes at hand.

Next: `reference_attention.py`, the loop that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lockstep.numerics.formats import ScaleKind

PAGE = 64
"""Tokens of a page on a GPU, and keys of a step of attention there: a part of the definition of its bits."""
CHUNK = 2048
"""Keys of one chunk on a GPU: a part of the definition too, since it fixes where states are joined."""
WIDENED = 1024
"""Pages of e4m3 codes that a prefill on a GPU makes FP16 pages of, at most: 256 MiB for 8 heads of 128."""


@dataclass(frozen=True)
class AttentionForm:
    """k_scale_G, v_scale_G: [KV heads] FP32, what the codes of keys and values are multiplied by; None for BF16 keys and
    values. query_scale: kind of the scale that every query row and head gets, in which case probabilities are e4m3 too and
    both products are of codes; None for queries and probabilities in BF16. FP8 queries need FP8 keys and values.
    """

    k_scale_G: Tensor | None = None
    v_scale_G: Tensor | None = None
    query_scale: ScaleKind | None = None

    def __post_init__(self) -> None:
        assert (self.k_scale_G is None) == (self.v_scale_G is None), "keys and values are stored alike"
        assert self.query_scale is None or self.k_scale_G is not None, "FP8 queries meet FP8 keys"


PLAIN = AttentionForm()
"""Everything in BF16."""
