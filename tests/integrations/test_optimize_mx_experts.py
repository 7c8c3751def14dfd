"""``lz.optimize`` on gpt-oss's experts in mxfp4: Transformers' class, whose own code no CPU runs.

Tensors lie as the hub's Triton kernel leaves them on a CPU, by hand: that kernel is loaded from the hub.
"""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import layerzero as lz

pytest.importorskip("transformers", "5.24", reason="needs transformers >= 5.24")

from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations import mxfp4

IDS = torch.tensor([[5, 7, 11, 3, 2, 64, 23]])
CALLS = "lz.moe_experts in mxfp4, swiglu_oai"


def as_kept(data: torch.Tensor) -> Any:
    return SimpleNamespace(storage=SimpleNamespace(data=data.mT))


def keep(experts: nn.Module, name: str, weight: lz.QuantizedWeight) -> None:
    """Put a stack where the module's class has it."""
    assert weight.fields.scale is not None
    experts._parameters.pop(name, None)
    setattr(experts, name, as_kept(weight.fields.data))
    setattr(
        experts,
        f"{name}_precision_config",
        SimpleNamespace(weight_scale=as_kept(weight.fields.scale.view(torch.uint8))),
    )


def models(dtype: torch.dtype) -> tuple[Any, Any]:
    """One with experts in mxfp4, and one with their numbers."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = GptOssConfig(
        **sizes,
        vocab_size=99,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
    )
    plain = GptOssForCausalLM(config).eval()
    for each in plain.parameters():
        nn.init.normal_(each, std=0.3)
    plain = plain.to(dtype)
    narrow = copy.deepcopy(plain)
    for layer, other in zip(plain.model.layers, narrow.model.layers, strict=True):
        experts = mxfp4.Mxfp4GptOssExperts(config)
        for name in ("gate_up_proj", "down_proj"):
            own = getattr(layer.mlp.experts, name)
            weight = lz.quantize_weight(own.detach().mT.contiguous(), "mxfp4")
            own.data = weight.dequantized(dtype).mT.contiguous()
            keep(experts, name, weight)
            getattr(experts, f"{name}_bias").data = getattr(layer.mlp.experts, f"{name}_bias").data.clone()
        other.mlp = mxfp4.Mxfp4GptOssMLP(other.mlp.router, experts).eval()
    return narrow, plain


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found.float()


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got - wanted).norm() / wanted.norm()).item()


def served(report: Any) -> list[str]:
    return [each.path for each in report.replaced if each.calls == CALLS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_give_what_experts_with_these_numbers_give(dtype: torch.dtype, unmeasured: None) -> None:
    narrow, plain = models(dtype)
    report = lz.optimize(narrow)
    assert served(report) == [f"model.layers.{number}.mlp.experts" for number in range(2)]
    wanted, stock = logits(copy.deepcopy(plain).float()), logits(plain)
    assert off(logits(narrow), wanted) <= 1.5 * off(stock, wanted) + 1e-5
    report.undo()
    assert not hasattr(narrow.model.layers[0].mlp.experts, "_is_hooked")
    with pytest.raises(NameError, match="triton_kernels_hub"):  # its own code, whose kernels nothing loaded
        logits(narrow)


def test_copies_follow_their_own_numbers_and_files_are_stock(unmeasured: None) -> None:
    narrow, _ = models(torch.float32)
    lz.optimize(narrow)
    before, twin = logits(narrow), copy.deepcopy(narrow)
    assert torch.equal(logits(twin), before)
    for layer in twin.model.layers:
        layer.mlp.experts.down_proj.storage.data.zero_()
        layer.mlp.experts.down_proj_bias.data.zero_()
    for layer in narrow.model.layers:
        layer.mlp.experts.down_proj_bias.data.zero_()
        layer.mlp.experts.down_proj.storage.data = torch.zeros(4, 64, 16, dtype=torch.uint8).mT
    assert torch.equal(logits(narrow), logits(twin))
    assert not torch.equal(logits(narrow), before)
    file = io.BytesIO()
    torch.save(narrow, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for stock in (loaded.model.layers[0].mlp.experts, copy.copy(narrow.model.layers[0].mlp.experts)):
        assert not hasattr(stock, "_is_hooked")
    with pytest.raises(NameError, match="triton_kernels_hub"):
        logits(loaded)


def test_what_is_no_mxfp4_or_computed_by_another_kernel_stays(unmeasured: None) -> None:
    narrow, _ = models(torch.float32)
    first, second = (layer.mlp for layer in narrow.model.layers)
    first.experts.gate_up_proj_precision_config.weight_scale.storage.data = torch.full(
        (4, 3, 64), 127, dtype=torch.uint8
    )
    second.forward = lambda rows: (rows, None)
    third, _ = models(torch.float32)
    third.model.layers[0].mlp.experts._is_hooked = True
    assert served(lz.optimize(third)) == ["model.layers.1.mlp.experts"]
    report = lz.optimize(narrow)
    assert served(report) == []
    why = {each.path: each.why for each in report.left}
    assert "scale: wanted" in why["model.layers.0.mlp.experts"]
    assert "exchanged on the instance" in why["model.layers.1.mlp.experts"]
