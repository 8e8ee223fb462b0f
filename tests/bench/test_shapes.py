"""The generator of shapes: every model's layers, each size once, and the odd ones that tests ask for."""

from __future__ import annotations

import pytest

from lockstep.bench.shapes import (
    CHECKED_ROWS,
    LENGTHS,
    MODELS,
    ROWS,
    attentions,
    heads,
    layer_linears,
    linears,
    mlp_widths,
    norm_widths,
    preset,
)
from lockstep.errors import ConfigError


def test_the_four_products_of_qwen3_8b() -> None:
    sizes = [(shape.inputs, shape.outputs) for shape in layer_linears("qwen3-8b")]
    assert sizes == [(4096, 6144), (4096, 4096), (4096, 24_576), (12_288, 4096)]
    assert [shape.name.split()[-1] for shape in layer_linears("qwen3-8b")] == ["qkv", "o", "gate_up", "down"]


def test_each_size_appears_once_under_all_its_names() -> None:
    shapes = linears()
    assert len({(s.inputs, s.outputs) for s in shapes}) == len(shapes)
    both = next(s for s in shapes if (s.inputs, s.outputs) == (4096, 6144))
    assert both.name == "qwen3-8b qkv, llama-3.1-8b qkv"
    for model in MODELS:
        for shape in layer_linears(model):
            found = [s for s in shapes if (s.inputs, s.outputs) == (shape.inputs, shape.outputs)]
            assert len(found) == 1 and shape.name in found[0].name.split(", ")


def test_ragged_shapes_come_on_request() -> None:
    extra = linears(ragged=True)[len(linears()) :]
    assert extra and all(shape.ragged for shape in extra)
    assert any(shape.inputs % 2 for shape in extra) and any(shape.outputs % 16 for shape in extra)
    assert any(shape.ragged for shape in linears(["smollm2-135m"]))
    assert not any(shape.ragged for shape in linears(["qwen3-8b", "qwen2.5-7b"]))
    assert set(norm_widths(ragged=True)) > set(norm_widths()) >= {4096, 3584, 576}
    assert set(mlp_widths(ragged=True)) > set(mlp_widths()) >= {12_288, 18_944, 1536}


def test_attention_shapes_cover_groups_and_head_sizes() -> None:
    shapes = attentions(extra=True)
    assert {s.head_dim for s in shapes} == {64, 80, 96, 128}
    assert {s.group for s in shapes} >= {1, 2, 3, 4, 7, 8}
    assert all(s.heads == s.group * s.kv_heads for s in shapes)
    assert {s.norm for s in shapes} == {True, False}
    assert shapes[0].name == "qwen3-8b" and shapes[0].row_width == (32 + 2 * 8) * 128


def test_rows_and_lengths_stand_on_both_sides_of_every_boundary() -> None:
    assert set(range(1, 65)) < set(CHECKED_ROWS) and {127, 128, 129, 512, 513, 2048} < set(CHECKED_ROWS)
    assert {1, 64, 128, 256, 1024, 4096, 16_384} <= set(ROWS)
    assert {63, 64, 65, 2047, 2048, 2049, 9000} <= set(LENGTHS)


def test_heads() -> None:
    assert {(s.inputs, s.outputs) for s in heads()} >= {(4096, 151_936), (4096, 128_256), (576, 49_152)}


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"no model shape named 'qwen3-8' -> did you mean qwen3-8b\?"):
        preset("qwen3-8")
    with pytest.raises(ConfigError, match="qwen3-30b-a3b has experts"):
        layer_linears("qwen3-30b-a3b")
