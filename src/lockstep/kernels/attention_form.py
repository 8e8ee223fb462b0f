"""How attention's operands are stored: the one record that says which scales belong to the codes at hand.

Next: `reference_attention.py`, the loop that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lockstep.numerics.formats import ScaleKind


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
