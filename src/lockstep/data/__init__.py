"""Prompts: where they come from, in which order they are used, how they are tokenized and packed.

`load(spec)` gives examples, `PromptStream(examples, seed)` their order, `tokenize.encode_all` their tokens (import that one
from its module: it brings transformers along). `pack` fills micro-batches, `targets` feeds the SFT warm start. Read `spec.py`,
then `example.py`.
"""

from lockstep.data.example import Example, batch_columns, fingerprint, load
from lockstep.data.packing import GroupLengths, bin_tokens, fill_ratio, pack
from lockstep.data.sft import Target, targets
from lockstep.data.spec import DataSpec
from lockstep.data.stream import PromptStream

__all__ = [
    "DataSpec",
    "Example",
    "GroupLengths",
    "PromptStream",
    "Target",
    "batch_columns",
    "bin_tokens",
    "fill_ratio",
    "fingerprint",
    "load",
    "pack",
    "targets",
]
