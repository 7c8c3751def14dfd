"""Tables of angles against Transformers' own initialisers, kind by kind, and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.backends.rotary import joined, table_and_places

ROPE = pytest.importorskip("transformers.modeling_rope_utils")
DIM, LONG = 64, 4096

KINDS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 512},
    "yarn betas": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.8,
        "mscale_all_dim": 0.6,
    },
    "yarn attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 0.9,
    },
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": 1024,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": {
        "original_max_position_embeddings": 512,
        "short_factor": [1.0 + 0.01 * n for n in range(DIM // 2)],
        "long_factor": [1.0 + 0.5 * n for n in range(DIM // 2)],
    },
}


def scaled(kind):
    return {"rope_type": kind.split()[0], "rope_theta": 500000.0, **KINDS[kind]}


def theirs(scaling, seq_len):
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        head_dim=DIM,
        max_position_embeddings=LONG,
        rope_parameters=dict(scaling),
    )
    return ROPE.ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"), seq_len=seq_len)


@at_once("seq_len", [None, 100, 3 * LONG])
@at_once("kind", KINDS)
def test_frequencies_are_those_of_transformers(kind, seq_len):
    wanted, factor = theirs(scaled(kind), seq_len)
    got, own = lz.rope_frequencies(DIM, scaling=scaled(kind), max_positions=LONG, seq_len=seq_len)
    torch.testing.assert_close(got, wanted.double(), rtol=2e-6, atol=0.0)
    assert own == pytest.approx(factor, rel=1e-12)


def test_the_plain_table_by_hand():
    cos, sin = lz.rope_table(50, 8)
    for position in (0, 1, 49):
        for pair in range(4):
            angle = position * 10000.0 ** (-pair / 4)
            assert cos[position, pair] == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[position, pair] == pytest.approx(math.sin(angle), abs=1e-7)


def test_far_positions_keep_their_angles():
    cos, _ = lz.rope_table(200_001, 4)
    assert cos[200_000, 1] == pytest.approx(math.cos(200_000 / 100.0), abs=1e-7)


def test_both_lie_in_one_tensor_that_kernels_read_without_a_copy():
    cos, sin = lz.rope_table(7, 6, dtype=torch.float16)
    table = joined(cos, sin)
    assert table.shape == (7, 6)
    assert table.data_ptr() == cos.data_ptr()
    assert torch.equal(table, torch.cat((cos, sin), -1))
    assert joined(cos.clone(), sin) is None
    assert joined(sin, cos) is None


def test_a_table_off_16_bytes_is_not_read_as_it_lies():
    """vLLM's norm and rotation in one copies 16 bytes at a time from it."""
    for start in range(1, 5):
        table = torch.zeros(5 + 7 * 8)[start : start + 7 * 8].view(7, 8)
        halves = table[:, :4], table[:, 4:]
        assert (joined(*halves) is None) is (start != 4)
        rows, places = table_and_places(*halves, torch.tensor([3, 1]), 1, 2, torch.int64)
        assert rows.data_ptr() % 16 == 0
        assert torch.equal(rows[places], table[[3, 1]])


def test_the_attention_factor_is_in_both():
    plain, stretched = (lz.rope_table(9, 8, scaling=each) for each in (None, scaled("yarn attention")))
    assert stretched[0][0, 0] == pytest.approx(0.9 * float(plain[0][0, 0]))


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "mrope"}, "wanted a rope_type of default, linear"),
        ({"rope_type": "linear"}, "linear wants factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "linear has factor; got beta_fast"),
        ({"rope_type": "llama3", "factor": 2.0}, "llama3 wants original_max_position_embeddings"),
        ({"rope_type": "longrope", "original_max_position_embeddings": 8, "factor": 2.0}, "4 numbers in short_factor"),
        ({"type": "dynamic", "factor": 2.0}, "dynamic wants original_max_position_embeddings"),
    ],
)
def test_what_a_kind_lacks_or_does_not_know_is_said(scaling, words):
    with pytest.raises(lz.InvalidCallError, match=words):
        lz.rope_frequencies(8, scaling=scaling)


def test_a_width_of_no_pairs_is_refused():
    with pytest.raises(lz.InvalidCallError, match="rotary_dim: wanted an even number above 0, got 7"):
        lz.rope_table(4, 7)


@pytest.mark.parametrize(
    ("numbers", "scaling"),
    [
        ({"rotary_dim": 2}, {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}),
        ({"base": 1.0}, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}),
        ({}, {"rope_type": "linear", "factor": 0.0}),
    ],
)
def test_numbers_that_give_no_angles_are_refused(numbers, scaling):
    with pytest.raises(lz.InvalidCallError, match="rope_frequencies: wanted numbers that give finite angles"):
        lz.rope_frequencies(**({"rotary_dim": 16} | numbers), scaling=scaling, seq_len=64)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"length": -1}, "length: wanted 0 to 2147483647 positions, got -1"),
        ({"length": 1.5}, "length: wanted .* got 1.5"),
        ({"length": None}, "length: wanted .* got None"),
        ({"length": 2**40}, "length: wanted .* got 1099511627776"),
        ({"dtype": torch.int32}, "dtype: wanted a floating dtype, got torch.int32"),
        ({"dtype": "float32"}, "dtype: wanted a floating dtype, got 'float32'"),
        ({"scaling": ["linear"]}, "scaling: wanted a mapping as a config has it, got"),
        ({"scaling": {"rope_type": ["linear"]}}, "scaling: wanted a rope_type of default"),
        ({"seq_len": "long"}, "seq_len: wanted a number of positions above 0 or None, got 'long'"),
        ({"max_positions": 0}, "max_positions: wanted a number of positions above 0 or None, got 0"),
        (
            {"scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": "a", "mscale_all_dim": 1.0}, "max_positions": 8},
            "wanted numbers that give finite angles",
        ),
    ],
)
def test_what_is_no_number_is_refused_by_name(given, words):
    with pytest.raises(lz.InvalidCallError, match=words):
        lz.rope_table(**{"length": 4, "rotary_dim": 8, **given})


def test_a_table_may_be_empty():
    assert lz.rope_table(0, 8)[0].shape == (0, 4)
