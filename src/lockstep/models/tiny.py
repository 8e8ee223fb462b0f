"""A model folder small enough for a test or a two-minute demo: random weights and one token a character.

It is a real checkpoint: transformers, vLLM and `load_tensors` read it like any other. The same arguments give the same
bytes, since every tensor is drawn from one generator in model order. Next: `decoder.py`.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.errors import CheckpointError
from lockstep.models.checkpoint import save
from lockstep.models.spec import Family, ModelSpec, MoESpec, RopeSpec, expected_tensors

CHARS = string.digits + "+-*/=" + " \n" + string.ascii_letters + ".,:;?!()[]'\"_<>"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>")
_PAD, _BOS, _EOS = range(3)
INIT_STD = 0.02

# <bos><user>1+2=<eos><assistant>3<eos>
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def tiny_spec(
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 128,
    head_dim: int | None = None,
    chars: str = CHARS,
    family: Family = "llama",
    tied: bool = True,
    max_position: int = 1024,
    experts: int | None = None,
    experts_per_token: int | None = None,
    expert_intermediate: int | None = None,
) -> ModelSpec:
    """Shape of a tiny model. `head_dim` defaults to `hidden // heads`; sizes need not be multiples of 128.

    A `qwen3_moe` has 8 experts of half the `intermediate` width, 2 for a token; other families refuse the last three.
    """
    try:
        moe = None
        if family == "qwen3_moe":
            width = expert_intermediate or max(intermediate // 2, 1)
            moe = MoESpec(experts or 8, experts_per_token or 2, width, norm_topk_prob=True)
        elif any((experts, experts_per_token, expert_intermediate)):
            raise ValueError(f"experts do not exist in family {family}: use qwen3_moe")
        return ModelSpec(
            family=family,
            vocab_size=len(SPECIAL) + len(dict.fromkeys(chars)),
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim or hidden // heads,
            rope=RopeSpec(theta=10_000.0),
            max_position=max_position,
            tie_embeddings=tied,
            attention_bias=family == "qwen2",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            moe=moe,
            bos_id=_BOS,
            eos_ids=(_EOS,),
            pad_id=_PAD,
        )
    except ValueError as error:
        raise CheckpointError(str(error), where="tiny model") from error


def random_tensors(spec: ModelSpec, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of `spec` in FP32: norms one, everything else (biases too) normal with deviation 0.02."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in expected_tensors(spec).items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape)
        else:
            yield name, torch.empty(shape).normal_(0.0, INIT_STD, generator=generator)


def _symbol(char: str) -> str:
    """How byte-level tokenizers spell an ASCII character: itself, or moved up by 256 when it is blank or control."""
    code = ord(char)
    return char if 33 <= code <= 126 else chr(256 + code) if code <= 32 else chr(289)


def char_tokenizer(chars: str = CHARS, max_position: int = 1024) -> PreTrainedTokenizerFast:
    """A Hugging Face fast tokenizer with one token a character; any other character is `<unk>`.

    It is a byte-level BPE without merges, since that gives the same ids under every class that transformers may pick.
    """
    strange = [char for char in chars if not char.isascii()]
    if strange:
        why = "a character must be one byte"
        raise CheckpointError(f"characters {strange} are not ASCII", where="tiny model", why=why)
    vocab = {
        token: i for i, token in enumerate((*SPECIAL, *(_symbol(char) for char in dict.fromkeys(chars))))
    }
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=max_position,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny(
    out_dir: str | Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 128,
    head_dim: int | None = None,
    chars: str = CHARS,
    seed: int = 0,
    family: Family = "llama",
    tied: bool = True,
    max_position: int = 1024,
    experts: int | None = None,
    experts_per_token: int | None = None,
    expert_intermediate: int | None = None,
    dtype: torch.dtype = torch.float32,
    overwrite: bool = False,
) -> ModelSpec:
    """Write the folder and return its shape. Raises `CheckpointError` for an impossible shape or a folder in use."""
    spec = tiny_spec(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        head_dim=head_dim,
        chars=chars,
        family=family,
        tied=tied,
        max_position=max_position,
        experts=experts,
        experts_per_token=experts_per_token,
        expert_intermediate=expert_intermediate,
    )
    tokenizer = char_tokenizer(chars, max_position)
    save(out_dir, spec, random_tensors(spec, seed), dtype=dtype, tokenizer=tokenizer, overwrite=overwrite)
    return spec
