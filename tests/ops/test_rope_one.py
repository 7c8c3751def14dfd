"""lz.rope_one: what it gives beside lz.rope, layouts, gradients, bad calls."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from drawing import at_once, examples
from layerzero.ops import FUNCTIONS
from layerzero.ops.rope.declare import cos_sin
from layerzero.testing import fuzz


def tensors(batch=2, seq=5, heads=4, width=64, half=32, dtype=torch.float32):
    torch.manual_seed(seq)
    cos, sin = cos_sin(40, half, torch.device("cpu"))
    lead = (batch, seq) if batch else (seq,)
    return torch.randn(*lead, heads, width).to(dtype), cos, sin, torch.randint(0, 40, lead)


@at_once("kernel", ["torch", "vllm", "reference"])
@at_once("interleaved", [False, True])
@at_once("batch, layout", [(None, None), (2, "BSHD"), (2, "BHSD")])
@at_once("width, half", [(64, 32), (80, 16)])
def test_it_is_what_rope_gives_queries(kernel, interleaved, batch, layout, width, half):
    x, cos, sin, positions = tensors(batch, width=width, half=half)
    x = x.transpose(1, 2) if layout == "BHSD" else x
    with lz.prefer(kernel):
        got = lz.rope_one(x, cos, sin, positions, interleaved=interleaved, layout=layout)
        wanted, _ = lz.rope(x, x, cos, sin, positions, interleaved=interleaved, layout=layout)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_key_that_heads_share_is_rotated_alone(path):
    """As latent attention's are: one head, no queries beside it."""
    x, cos, sin, _ = tensors(None, heads=1)
    wanted, _ = lz.rope(x, x, cos, sin)
    torch.testing.assert_close(lz.rope_one(x, cos, sin), wanted, rtol=1e-5, atol=1e-5)


def test_gradients_turn_back():
    x, cos, sin, positions = tensors(dtype=torch.float64)
    x.requires_grad_()
    lz.rope_one(x, cos, sin, positions, layout="BSHD").square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach(), rtol=1e-5, atol=1e-5)  # a rotation keeps lengths


def test_shapes_that_fit_both_layouts_are_an_error():
    x, cos, sin, _ = tensors(heads=5)
    with pytest.raises(lz.InvalidCallError, match=r"rope_one: layout: wanted .*both fit input"):
        lz.rope_one(x, cos, sin)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": None}, "input: wanted a tensor, got NoneType"),
        ({"input": torch.zeros(5, 64)}, "input: wanted .tokens, heads, head dim. or four axes"),
        ({"input": torch.zeros(2, 5, 0, 64)}, "input: wanted heads above 0"),
        ({"cos": torch.zeros(40, 33), "sin": torch.zeros(40, 33)}, "half of 2 to 64 rotated entries"),
        ({"sin": torch.zeros(40, 16)}, "sin: wanted rotary_half 32"),
        ({"positions": torch.full((2, 5), 40)}, r"positions\[0, 0\]: wanted 0 to 39, got 40"),
        ({"positions": torch.zeros(2, 4, dtype=torch.int64)}, "positions: wanted seq 5"),
        ({"layout": "NHD"}, "layout: wanted BSHD or BHSD"),
    ],
)
def test_bad_calls_are_refused(change, words):
    arguments = dict(zip(("input", "cos", "sin", "positions"), tensors(), strict=True)) | {"layout": "BSHD"} | change
    with pytest.raises(lz.InvalidCallError, match=words):
        lz.rope_one(**arguments)


def test_random_calls(monkeypatch):
    monkeypatch.setattr("layerzero.testing.generate.FUNCTIONS_BY_NAME", {"rope_one": FUNCTIONS["rope_one"]})
    report = fuzz.run(examples(60), 9)
    assert report.ok, str(report)


def test_one_tensor_given_to_rope_is_answered_by_the_name_of_the_function_for_one():
    x, table = torch.randn(6, 2, 8), torch.randn(6, 4)
    with pytest.raises(TypeError, match=r"lz\.rope_one\(input, cos, sin\) rotates one tensor"):
        lz.rope(x, table, table)
    assert lz.rope_one(x, table, table).shape == x.shape
