"""zentorch's product with codes: a weight that lies where another one lay gets its own results."""

import math
import os
import random
import subprocess
import sys

import pytest
import torch

import layerzero as lz

KERNEL = "zentorch.codes_linear"
POSTOP, WEIGHTS = "ZENDNNL_ENABLE_POSTOP_CACHE", "ZENDNNL_MATMUL_WEIGHT_CACHE"
SIZES = [(96, 64, 32), (96, 64, 96), (64, 64, 32), (128, 48, 32), (96, 64, 48)]
ASK = """
import sys
import torch
import layerzero as lz
if sys.argv[1] == "imported":
    import zentorch
weight = lz.quantize_weight(torch.randn(64, 96), "int4", group_size=32)
report = lz.explain("quantized_linear", torch.randn(2, 96).bfloat16(), weight)
print([each.message for each in report.reasons("zentorch.codes_linear")])
"""


def drawn(turn: int) -> tuple[torch.Tensor, lz.QuantizedWeight]:
    draw = random.Random(turn)
    inputs, outputs, group = draw.choice(SIZES)
    weight = lz.quantize_weight(torch.randn(outputs, inputs), "int4", group_size=group)
    return torch.randn(draw.choice([1, 2, 5, 17]), inputs).bfloat16(), weight


def test_a_weight_at_the_address_of_another_gets_its_own_results():
    torch.manual_seed(1)
    report = lz.explain("quantized_linear", *drawn(0))
    if reasons := report.reasons(KERNEL):
        pytest.skip("; ".join(each.message for each in reasons))
    lz.lock("quantized_linear", KERNEL)
    wrong = []
    for turn in range(600):
        rows, weight = drawn(turn)
        for _ in range(4):  # so that weights come to lie where others lay, not always where the last one did
            torch.full((random.Random(turn).randint(16, 5000),), math.nan)
        wanted = rows.float() @ weight.dequantized().float().T
        far = (lz.quantized_linear(rows, weight).float() - wanted).abs().max() / wanted.abs().max()
        wrong += [] if far < 0.02 else [turn]
        del weight
    assert not wrong


def test_a_format_whose_codes_do_not_lie_in_rows_gets_its_own_results():
    torch.manual_seed(1)
    rows, weight = torch.randn(3, 48).bfloat16(), lz.quantize_weight(torch.randn(64, 48), "marlin:bits=4")
    assert not weight.codes.numbers.is_contiguous()
    if reasons := lz.explain("quantized_linear", rows, weight).reasons(KERNEL):
        pytest.skip("; ".join(each.message for each in reasons))
    lz.lock("quantized_linear", KERNEL)
    wanted = rows.float() @ weight.dequantized().float().T
    torch.testing.assert_close(lz.quantized_linear(rows, weight).float(), wanted, rtol=0.02, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "name"), [("set", POSTOP), ("set", WEIGHTS), ("imported", None), ("alone", None)])
def test_it_is_refused_where_it_may_remember_weights(how, name):
    if how == "imported":
        pytest.importorskip("zentorch")
    environment = {each: value for each, value in os.environ.items() if each not in (POSTOP, WEIGHTS)}
    environment |= {} if name is None else {name: "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK, how], env=environment, capture_output=True, text=True, check=True
    )
    assert (f"{name or POSTOP} must be 0" in done.stdout) is (how != "alone"), done.stdout
