"""Weights dequantised as the libraries do that define their formats, bit for bit in the dtype of each."""

import hashlib

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.ops.quantize.gguf import KINDS, WHOLE, dequantized, whole
from layerzero.ops.quantize.schemes import scheme_of
from layerzero.ops.quantize.weight_format import packed

OUTPUTS, INPUTS = 64, 256


def weight(text, outputs=OUTPUTS, inputs=INPUTS):
    of = lz.WeightFormat.of(text)
    fields = scheme_of(of).random(of, outputs, inputs, torch.Generator().manual_seed(3))
    return lz.QuantizedWeight(of, (outputs, inputs), *fields)


def same_bits(mine, theirs):
    assert mine.dtype == theirs.dtype
    assert mine.shape == theirs.shape
    assert torch.equal(mine, theirs), (mine - theirs).abs().max()


def blocks_of(kind):
    """Bytes that are the same everywhere; scales in float16 are numbers of order 0.1."""
    places = torch.arange(24 * KINDS[kind].size)
    data = ((places * 197 + (places >> 5) * 31 + 7) % 256).to(torch.uint8).view(24, -1)
    for place in KINDS[kind].halves:
        data[:, place + 1] = data[:, place + 1] % 8 + 0x28 + 128 * (data[:, place] % 2)
    return data


DIGESTS = {
    "Q4_0": "fb4f6b80a22e87d9",
    "Q4_1": "db864f782c28f86a",
    "Q5_0": "7e918f66feac7eff",
    "Q5_1": "6d347beb2eeeba1b",
    "Q8_0": "9cc46cabdd512713",
    "Q2_K": "b6ddd7f82ccb3dad",
    "Q3_K": "3ae4926833f68e08",
    "Q4_K": "692b15d722075a2e",
    "Q5_K": "0650cc0917a9a785",
    "Q6_K": "5a513dbac7946440",
    "IQ4_NL": "06877cb823c3fd02",
    "MXFP4": "467941956c865f17",
}
"""The first letters of the SHA-256 of what gguf.dequantize 0.19.0 gives for these bytes, as little-endian float32."""


@at_once("kind", KINDS)
def test_the_blocks_of_gguf_are_what_gguf_reads(kind):
    numbers = dequantized(blocks_of(kind), kind, torch.float32)
    assert hashlib.sha256(bytes(numbers.view(torch.uint8).flatten().tolist())).hexdigest()[:16] == DIGESTS[kind]


@at_once("kind", KINDS)
def test_gguf_itself_gives_the_same_numbers(kind):
    gguf = pytest.importorskip("gguf")
    for data in (blocks_of(kind), weight(f"gguf:{kind}", inputs=512).fields.data):
        theirs = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
        same_bits(dequantized(data, kind, torch.float32), torch.from_numpy(theirs.copy()))


@at_once("kind", WHOLE)
def test_blocks_that_are_codes_and_scales_are_the_same_numbers(kind):
    data = blocks_of(kind).view(6, -1)
    bits, codes, scale, offset = whole(data, kind)
    numbers = (codes.float() - (1 << bits - 1)).view(*scale.shape, -1) * scale.unsqueeze(-1)
    numbers = numbers if offset is None else numbers + offset.unsqueeze(-1)
    torch.testing.assert_close(numbers.flatten(1), dequantized(data, kind, torch.float32), rtol=1e-5, atol=1e-4)


@at_once("bits", [2, 3, 4, 8])
@at_once("order", ["", ",permuted=True"])
@at_once("zeros", ["stored", "minus_one"])
def test_gptqmodel_gives_the_same_numbers(bits, order, zeros):
    torch_linear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    correct = pytest.importorskip("gptqmodel.utils.model_dequant")._correct_gptq_v1_qzeros
    mine = weight(f"gptq:bits={bits},group=32,zeros={zeros}{order}")
    module = torch_linear(bits, 32, sym=False, desc_act=bool(order), in_features=INPUTS, out_features=OUTPUTS)
    data, scale, zero, index, _ = mine.fields
    module.qweight, module.scales = data, scale
    module.qzeros = zero if zeros == "stored" else correct(zero, bits)
    module.g_idx = torch.arange(INPUTS, dtype=torch.int32) // 32 if index is None else index
    module.post_init()
    same_bits(mine.dequantized(), module.dequantize_weight().t())


def test_autoawq_gives_the_same_numbers():
    dequantize_gemm = pytest.importorskip("awq.utils.packing_utils").dequantize_gemm
    mine = weight("awq:bits=4,group=64,zeros=stored")
    same_bits(mine.dequantized(), dequantize_gemm(mine.fields.data, mine.fields.zero, mine.fields.scale, 4, 64).t())


PACKED = {128: "8b85b3faa4155a00", -1: "f1108503ffb52441"}
"""By size of group, the SHA-256 of B and s as ``Layer.pack`` of IST-DASLab's marlin writes them of these numbers."""


@at_once("group", PACKED)
def test_a_weight_lies_as_marlin_packs_it(group):
    places, groups = torch.arange(256 * 256).view(256, 256), 2 if group > 0 else 1
    codes = (places * 197 + (places >> 8) * 31 + (places >> 3) * 7) % 16
    scale = ((torch.arange(256 * groups) % 61 + 32).half() / 4096).view(256, groups)
    plain = lz.QuantizedWeight.from_compressed_tensors(
        packed(codes.to(torch.uint8), 4), scale, (256, 256), group_size=group
    )
    data, scale, *_ = lz.repack(plain, "marlin").fields
    held = b"".join(bytes(each.view(torch.uint8).flatten().tolist()) for each in (data, scale))
    assert hashlib.sha256(held).hexdigest()[:16] == PACKED[group]
    again = lz.QuantizedWeight.from_marlin(data, scale, group_size=group)
    same_bits(again.dequantized(), plain.dequantized())


@at_once("bits", [2, 3, 4, 5, 6, 7, 8])
@at_once("zeros", ["none", "stored", "signed"])
@at_once("group", [0, 64])
def test_compressed_tensors_gives_the_same_numbers(bits, zeros, group):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    mine = weight(f"compressed-tensors:bits={bits},group={group},zeros={zeros}")
    data, scale, zero, _, _ = mine.fields
    if zeros == "stored":
        zero = helpers.unpack_from_int32(zero, bits, scale.shape, packed_dim=0)
    strategy = "group" if group else "channel"
    args = quantization.QuantizationArgs(
        num_bits=bits, strategy=strategy, group_size=group or None, symmetric=zero is None
    )
    codes = helpers.unpack_from_int32(data, bits, torch.Size(mine.shape))
    same_bits(mine.dequantized(), forward.dequantize(codes, scale, zero, args=args))


def test_compressed_tensors_gives_the_same_nvfp4():
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    mine = weight("nvfp4:over")
    data, scale, _, _, second = mine.fields
    args = quantization.QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    codes = helpers.unpack_fp4_from_uint8(data, *mine.shape)
    given = {"args": args, "global_scale": second.reshape(1), "dtype": torch.bfloat16}
    same_bits(mine.dequantized(torch.bfloat16), forward.dequantize(codes, scale.to(torch.bfloat16), **given))


@at_once("kind", ["nf4", "fp4"])
@at_once("block", [64, 512])
@at_once("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bitsandbytes_gives_the_same_numbers(kind, block, dtype):
    default = pytest.importorskip("bitsandbytes.backends.default.ops")
    functional = pytest.importorskip("bitsandbytes.functional")
    mine = weight(f"{kind}:group={block}")
    code = functional.get_4bit_type(kind, device="cpu")
    compute = getattr(default._dequantize_4bit_compute, "__wrapped__", default._dequantize_4bit_compute)
    theirs = compute(mine.fields.data.reshape(-1), mine.fields.scale, code, block, mine.shape, dtype)
    same_bits(mine.dequantized(dtype), theirs)
