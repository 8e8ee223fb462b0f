"""The handshake: who is who, and whether they can work together, before any weight is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep import __version__
from lockstep.errors import CapacityError, ConfigError, ContractError
from lockstep.models.decoder import Decoder
from lockstep.numerics.flow import FlowSpec
from lockstep.sync.handshake import SUPPORTED, Hello, greet_engine, greet_trainer, hello_of
from lockstep.sync.messages import hear, say
from lockstep.sync.transport import TransportError, Wait, queue_pair


def shake(
    own: Hello,
    engine: Hello,
    *,
    supported: Any = SUPPORTED,
    prepare: Callable[[int], None] = lambda size: None,
) -> tuple[Hello | Exception, Exception | None]:
    """What either side makes of it: the hello the trainer got or its error, and the engine's error."""
    here, there = queue_pair()
    theirs: list[Exception] = []

    def answer() -> None:
        try:
            greet_trainer(there, engine, Wait.begin("handshake", 5), prepare)
        except Exception as error:
            theirs.append(error)

    thread = threading.Thread(target=answer)
    thread.start()
    got: Hello | Exception
    try:
        got = greet_engine(here, own, 1000, Wait.begin("handshake", 5), supported)
    except Exception as error:
        got = error
    thread.join()
    return got, theirs[0] if theirs else None


def test_equal_sides_agree(wire: SimpleNamespace) -> None:
    for family in ("llama_tied", "qwen3_moe"):
        hello = hello_of(wire.decoder(family))
        got, error = shake(hello, hello)
        assert got == hello and error is None


def test_engine_versions_are_checked_against_the_table_case_02(wire: SimpleNamespace) -> None:
    """By series; another release, another adapter and a lookalike are refused, both versions and the table named."""
    own = hello_of(wire.decoder("qwen2"))
    table = {"reference": ("0.1",), "other": ("1.2", "1.3")}
    for adapter, version in (("other", "1.2"), ("other", "1.3.7"), ("reference", __version__)):
        engine = replace(own, adapter=adapter, engine="thing", version=version)
        assert shake(own, engine, supported=table) == (engine, None)
    for adapter, version in (("other", "1.4.0"), ("other", "1.20"), ("other", "11.2"), ("third", "1.2")):
        engine = replace(own, adapter=adapter, engine="thing", version=version)
        ours, theirs = shake(own, engine, supported=table)
        assert isinstance(ours, ConfigError) and isinstance(theirs, ConfigError)
        for error in (ours, theirs):
            line = str(error)
            assert (
                f"thing {version} through adapter '{adapter}'" in line and f"lockstep {__version__}" in line
            )
            assert "other: 1.2, 1.3" in line, "what is supported"


def test_another_protocol_is_refused_on_both_sides_case_02(wire: SimpleNamespace) -> None:
    own = hello_of(wire.decoder("qwen2"))
    ours, theirs = shake(own, replace(own, protocol=own.protocol + 1))
    assert isinstance(theirs, ConfigError) and isinstance(ours, ConfigError)
    line = str(ours)
    assert "the engine refused" in line, "the engine looks at the protocol before it says more of itself"
    assert f"lockstep {__version__}" in line and "speaks protocol 1" in line and "protocol 2" in line


def test_a_newer_engine_that_answers_all_the_same_is_refused_case_02(wire: SimpleNamespace) -> None:
    """Its hello may have other fields: the protocol is looked at first."""
    own = hello_of(wire.decoder("qwen2"))
    here, there = queue_pair()
    wait = Wait.begin("handshake", 5)
    say(there, "hello", wait, protocol=9, engine="thing", version="4.0", adapter="new", something="else")
    with pytest.raises(
        ConfigError, match=r"thing 4.0 through adapter 'new' speaks protocol 9, lockstep .* protocol 1"
    ):
        greet_engine(here, own, 1, wait)
    assert hear(there, wait, "hello")["protocol"] == 1
    with pytest.raises(ConfigError, match="the trainer refused"):
        hear(there, wait, "welcome")


@pytest.mark.parametrize(
    ("mine", "other", "message"),
    [
        (FlowSpec("fp8"), FlowSpec("fp8", keep_first_bf16=1), "quantized in the trainer but not in the engine: model.layers.0.s"),
        (FlowSpec("bf16"), FlowSpec("fp8"), "quantized in the engine but not in the trainer: model.layers.0.s"),
        (FlowSpec("fp8"), FlowSpec("fp8", "fp8"), "kv is bf16 in the trainer, fp8 in the engine"),
    ],
    ids=["kept layer", "precision", "cache"],
)  # fmt: skip
def test_quantized_sets_must_be_equal_case_05(
    wire: SimpleNamespace, mine: FlowSpec, other: FlowSpec, message: str
) -> None:
    own, engine = (hello_of(wire.decoder("qwen2", flow)) for flow in (mine, other))
    ours, theirs = shake(own, engine)
    assert isinstance(ours, ContractError) and isinstance(theirs, ContractError)
    assert message in str(ours) and message in str(theirs), "both say the same"


def test_one_tensor_more_in_bf16_is_enough_case_05(wire: SimpleNamespace) -> None:
    """An engine whose skip list took mlp.gate_proj of one layer for a router."""
    own = hello_of(wire.decoder("qwen2"))
    name = "model.layers.1.mlp.gate_proj.weight"
    entries = tuple(
        replace(e, quantized=False, dtype="bfloat16") if e.name == name else e for e in own.layout.entries
    )
    ours, _ = shake(own, replace(own, layout=replace(own.layout, entries=entries)))
    assert isinstance(
        ours, ContractError
    ) and f"quantized in the trainer but not in the engine: {name}" in str(ours)


def test_scale_formats_must_be_equal_case_13(wire: SimpleNamespace) -> None:
    own, engine = (hello_of(wire.decoder("qwen2", FlowSpec("fp8", scale=s))) for s in ("fp32", "pow2"))
    ours, _ = shake(own, engine)
    assert isinstance(ours, ContractError) and "scale is fp32 in the trainer, pow2 in the engine" in str(ours)


def test_our_own_decoder_must_be_the_same_model_on_the_same_kernels(wire: SimpleNamespace) -> None:
    own = hello_of(wire.decoder("qwen2"))
    exact = replace(own, kernels="exact")
    ours, _ = shake(own, exact)
    assert isinstance(
        ours, ContractError
    ) and "kernels are reference in the trainer, exact in the engine" in str(ours)
    other = replace(own, model={**own.model, "rms_norm_eps": 1e-5})
    ours, _ = shake(own, other)
    assert isinstance(ours, ContractError) and "model.rms_norm_eps is 1e-06 in the trainer, 1e-05" in str(
        ours
    )
    foreign = replace(exact, adapter="other", version="1.0")
    assert shake(own, foreign, supported={"other": ("1.0",)}) == (foreign, None)


def test_an_engine_without_room_says_so_at_the_start_case_22(wire: SimpleNamespace) -> None:
    decoder: Decoder = wire.decoder("qwen2")
    receiver = wire.receiver(decoder, memory_bytes=1000)
    hello = hello_of(decoder)
    ours, theirs = shake(hello, hello, prepare=receiver.check_memory)
    assert isinstance(ours, CapacityError) and isinstance(theirs, CapacityError)
    assert "the engine refused" in str(ours) and "1,000 are there" in str(ours)


def test_the_engine_counts_the_trainers_buckets_case_22(wire: SimpleNamespace) -> None:
    sizes: list[int] = []
    hello = hello_of(wire.decoder("qwen2"))
    shake(hello, hello, prepare=sizes.append)
    assert sizes == [1000]


def test_a_side_that_does_not_answer_is_named_case_25(wire: SimpleNamespace) -> None:
    hello = hello_of(wire.decoder("qwen2"))
    here, there = queue_pair()
    with pytest.raises(TransportError, match=r"phase handshake: the engine is missing .* within 0.2 s"):
        greet_engine(here, hello, 1, Wait.begin("", 0.2))
    here, there = queue_pair()
    with pytest.raises(TransportError, match=r"phase handshake: the trainer is missing .* within 0.2 s"):
        greet_trainer(there, hello, Wait.begin("", 0.2), lambda size: None)


def test_a_hello_with_other_fields_is_refused(wire: SimpleNamespace) -> None:
    own = hello_of(wire.decoder("qwen2"))
    here, there = queue_pair()
    wait = Wait.begin("handshake", 5)
    fields = asdict(own)
    del fields["kernels"]
    say(there, "hello", wait, **fields)
    with pytest.raises(ConfigError, match="the engine's hello has fields"):
        greet_engine(here, own, 1, wait)
