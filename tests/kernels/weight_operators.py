"""Operators of CUDA libraries that multiply with quantised weights: their meanings, to be called on a CPU."""

from __future__ import annotations

import types

import torch

import layerzero as lz
from layerzero.backends import grouped_weights, humming
from layerzero.backends.vllm import grouped_linear as of_vllm
from layerzero.backends.vllm import marlin as of_marlin
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.engine.legality import limit_findings
from layerzero.engine.registry import REGISTRY
from layerzero.ops.linear.weight_formats import FORMATTED
from layerzero.ops.quantize.groups import marlin_places
from layerzero.ops.quantize.schemes import scheme_of
from layerzero.ops.quantize.weight_format import Fields, unpacked

LIBRARIES = {"torch": "2.11.0", "vllm": "0.20.0", "humming-kernels": "0.1.19"}
BF16, F16 = torch.bfloat16, torch.float16


def weight(text, outputs=128, inputs=256, seed=1):
    of = lz.WeightFormat.of(text)
    fields = scheme_of(of).random(of, outputs, inputs, torch.Generator().manual_seed(seed))
    if of.scheme == "fp8" and not of.group:  # with scales in float32 it belongs to another operation
        fields = fields._replace(scale=fields.scale.to(BF16))
    return lz.QuantizedWeight(of, (outputs, inputs), *fields)


def refused(kernel, text, rows=8, outputs=128, inputs=256, dtype=BF16, device="H100"):
    """Why, besides that it never ran."""
    input = torch.empty(rows, inputs, dtype=dtype)
    report = lz.explain("quantized_linear", input, weight(text, outputs, inputs), device=device, libraries=LIBRARIES)
    return {reason.code for reason in report.reasons(kernel)}


def marlin_words(numbers, bits):
    """As csrc/quantization/marlin/gptq_marlin_repack.cu writes them: a loop for each thread."""
    outputs, inputs = numbers.shape
    pack, order = 32 // bits, {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}[bits]
    tiles = outputs // 64
    found = [0] * (outputs * inputs // pack)
    for k_tile in range(inputs // 16):
        for n_tile in range(tiles):
            offset = (k_tile * tiles + n_tile) * 16 * 64 // pack
            for warp in range(4):
                for thread in range(32):
                    column, row = n_tile * 64 + warp * 16 + thread // 4, k_tile * 16 + thread % 4 * 2
                    values = [int(numbers[column + eight, row + place]) for eight in (0, 8) for place in (0, 1, 8, 9)]
                    for word in range(8 // pack):
                        some = values[word * pack : word * pack + pack]
                        joined = sum(some[order[place]] << bits * place for place in range(pack))
                        found[offset + thread * (8 // pack) * 4 + warp * (8 // pack) + word] = joined
    words = torch.tensor(found, dtype=torch.int64).to(torch.uint32).view(torch.int32)
    return words.view(inputs // 16, -1)


def marlin_place(output, groups):
    """Where marlin_utils.py of vllm puts the scale of an output: rows of 8 x 8 transposed, or pairs dealt out."""
    if groups > 1:
        return output // 64 * 64 + output % 8 * 8 + output % 64 // 8
    of_32 = output % 32
    return output // 32 * 32 + of_32 % 8 // 2 * 8 + of_32 // 8 * 2 + of_32 % 2


class Recorded(types.SimpleNamespace):
    """Operators by name, each as torch has it."""

    def __init__(self, **meanings):
        super().__init__(**{name: types.SimpleNamespace(default=meaning) for name, meaning in meanings.items()})


NUMBERS = {of_vllm.BIASED[4]: 4, of_vllm.BIASED[8]: 8, of_vllm.UNSIGNED[4]: 4, of_vllm.UNSIGNED[8]: 8}


def marlin_order(words, bits, outputs, inputs):
    """The codes (N, K) of Marlin's words."""
    flat = unpacked(words, bits, words.shape[1] * 32 // bits).view(inputs // 16, outputs // 64, 1024)
    numbers = torch.empty(flat.shape, dtype=torch.uint8)
    numbers[..., list(marlin_places(bits))] = flat.to(torch.uint8)
    return numbers.view(*flat.shape[:2], 16, 64).permute(1, 3, 0, 2).reshape(outputs, inputs)


def marlin_scales(scale, outputs, groups, second, dtype):
    """The scales (N, G) of Marlin's, which of eight bits are swapped in fours."""
    if scale.dtype.itemsize == 1:
        scale = scale.view(torch.uint8).view(-1, 4)[:, [0, 2, 1, 3]].view(scale.shape)
        if second is None:
            scale = scale.view(torch.float8_e8m0fnu)
        else:
            assert dtype is F16 or bool(((scale == 0) | (scale >= 128)).all())
            scale = (scale.to(torch.int16) << 7).view(F16)
    return scale[:, [marlin_place(output, groups) for output in range(outputs)]].t().float()


def marlin_gemm(a, c, words, bias, scale, a_scale, second, zero, index, order, locks, kind, m, n, k, *flags):
    assert (c, bias, a_scale, index, order) == (None,) * 5
    assert (m, k) == a.shape
    assert flags == (True, False, True, False)
    assert locks.count_nonzero() == 0
    groups, bias_of = len(scale), 8 if a.dtype is F16 else 120
    wide = marlin_scales(scale, n, groups, second, a.dtype).repeat_interleave(k // groups, 1)
    if kind == of_marlin.E4M3:
        numbers = marlin_order(words, 8, n, k).view(torch.float8_e4m3fn).float()
        numbers = numbers if scale.dtype is torch.float8_e8m0fnu else numbers * 2.0**-bias_of
    elif kind == of_marlin.E2M1:
        numbers = e2m1(marlin_order(words, 4, n, k))
        if second is not None:
            assert (second.dtype, second.shape) == (torch.float32, (1,))
            wide = wide * (second * 2.0 ** -(14 if a.dtype is F16 else 126))
    else:
        bits = NUMBERS[kind]
        assert (kind in of_vllm.UNSIGNED.values()) == (zero is not None)
        middle = torch.full((n, groups), float(1 << bits - 1))
        if zero is not None:
            ordered = unpacked(zero, 4, n).float()
            for output in range(n):
                place = marlin_place(output, 2)
                middle[output] = ordered[:, place - place % 8 + (0, 2, 4, 6, 1, 3, 5, 7).index(place % 8)]
        numbers = marlin_order(words, bits, n, k).float() - middle.repeat_interleave(k // groups, 1)
    return (a.float() @ (numbers * wide).t()).to(a.dtype)


def e2m1(codes):
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.cat([table, -table])[codes.long()]


def machete_mm(a, words, kind, out, scale, zero, group, *rest):
    assert (out, *rest) == (None,) * 4
    assert words.stride(0) == 1
    bits = NUMBERS[kind]
    each = a.shape[1] if group == -1 else group
    assert len(scale) * each == a.shape[1]
    numbers = unpacked(words.t().contiguous(), bits, a.shape[1]).float()
    wide = scale.t().float().repeat_interleave(each, 1)
    if zero is None:
        weight = (numbers - (1 << bits - 1)) * wide
    else:
        weight = numbers * wide + zero.t().float().repeat_interleave(each, 1)
    return (a.float() @ weight.t()).to(a.dtype)


def machete_prepack(words, a_type, kind, scale_type):
    assert words.stride(0) == 1
    assert a_type == scale_type
    return words


def gptq_gemm(a, words, zero, scale, index, exllama, version_2, bits):
    assert scale.dtype == F16
    assert index.numel() == 0
    assert exllama
    assert version_2
    of = f"gptq:bits={bits},group={a.shape[1] // len(scale)},zeros=stored"
    made = lz.QuantizedWeight(of, (words.shape[1], a.shape[1]), words, scale, zero)
    return (a.float() @ made.dequantized(torch.float32).t()).to(a.dtype)


def awq_gemm(a, words, scale, zero, parts):
    assert parts == 8
    made = lz.QuantizedWeight.from_awq(words, zero, scale, group_size=a.shape[1] // len(scale))
    return (a.float() @ made.dequantized(torch.float32).t()).to(a.dtype)


def tinygemm_pack(data, tiles):
    assert tiles == 8
    assert data.is_contiguous()
    return data


def tinygemm(a, data, group, pairs):
    codes = torch.stack((data >> 4, data & 15), -1).flatten(1).float()
    scale, zero = (each.t().float().repeat_interleave(group, 1) for each in pairs.unbind(-1))
    return (a.float() @ ((codes - 8) * scale + zero).t()).to(a.dtype)


class Humming:
    """Its functions that are called, with their meaning."""

    def __init__(self):
        self.layers, self.compiled, self.modes = {}, [], set()
        self.schema = types.SimpleNamespace(HummingWeightSchema=types.SimpleNamespace)
        self.transform = types.SimpleNamespace(prepare_layer_config=self.layer, transform_humming_tensors=self.kept)
        kernel = types.SimpleNamespace(prepare_kernels=self.prepare)
        self.kernel = types.SimpleNamespace(humming=types.SimpleNamespace(HummingKernel=kernel))

    def layer(self, outputs, inputs, schema, *, torch_dtype, device):
        assert device.type == "cuda"
        schema.to_str = lambda: str(schema.has_zero_point)
        schema.sizes, schema.dtype = (outputs, inputs), torch_dtype
        self.layers[schema.to_str()] = schema
        return schema

    def prepare(self, text, compute, tuning, device):
        assert tuning is None
        self.compiled.append(text)
        self.modes.add(compute)
        return text

    def kept(self, layer, tensors):
        outputs, inputs = layer.sizes
        groups = inputs // (layer.weight_scale_group_size or inputs)
        assert tensors["weight_scale"].shape == (outputs, groups)
        narrow = {"float8e8m0": torch.float8_e8m0fnu, "float8e4m3": torch.float8_e4m3fn}
        assert tensors["weight_scale"].dtype == narrow.get(layer.bs_dtype, layer.dtype)
        assert tensors["weight"].dtype == torch.int32
        assert ("zero_point" in tensors) == layer.has_zero_point
        assert ("weight_scale_2" in tensors) == (getattr(layer, "weight_scale_2_type", None) == "tensor")
        return tensors

    def launch(self, table, a, words, scale, *rest):
        layer, second, zero, (locks, top, valid) = self.layers[table], rest[0], rest[3], rest[-3:]
        assert (top, valid, rest[1:3], rest[4:-3]) == (1, 0, (None,) * 2, (None,) * 6)
        assert (zero is not None) == layer.has_zero_point
        assert locks.numel() == 2048
        each, middle = a.shape[1] // scale.shape[1], 0.0
        if layer.b_dtype == "float8e4m3":
            numbers = words.view(torch.float8_e4m3fn).float()
        elif layer.b_dtype == "float4e2m1":
            numbers = e2m1(unpacked(words, 4, a.shape[1]))
        else:
            bits = int(layer.b_dtype.removeprefix("uint"))
            numbers, middle = unpacked(words, bits, a.shape[1]).float(), float(1 << bits - 1)
            if zero is not None:
                middle = unpacked(zero.t().contiguous(), bits, len(scale)).t().float().repeat_interleave(each, 1)
        weight = (numbers - middle) * scale.float().repeat_interleave(each, 1) * (1.0 if second is None else second)
        return (a.float() @ weight.t()).to(a.dtype)


def ggml_dequantize(data, kind, outputs, inputs, dtype):
    made = lz.QuantizedWeight.unchecked(
        lz.WeightFormat("gguf", next(name for name, number in of_marlin._KINDS.items() if number == kind)),
        (outputs, inputs),
        Fields(data),
    )
    return made.dequantized(dtype)


def stand_in(monkeypatch):
    """Put every library's operators by their meanings on a CPU; return what stands for humming."""
    vllm = Recorded(
        marlin_gemm=marlin_gemm,
        machete_mm=machete_mm,
        machete_prepack_B=machete_prepack,
        gptq_gemm=gptq_gemm,
        gptq_shuffle=lambda words, order, bits: None,
        awq_gemm=awq_gemm,
        ggml_dequantize=ggml_dequantize,
    )
    for module in (of_vllm, of_marlin):
        monkeypatch.setattr(module, "operators", lambda *_: vllm)
    monkeypatch.setattr(of_vllm, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(grouped_weights.Locks, "now", lambda self: self._captured)
    packets = Recorded(_weight_int4pack_mm=tinygemm, _convert_weight_to_int4pack=tinygemm_pack)
    for name, packet in vars(packets).items():
        monkeypatch.setattr(torch.ops.aten, name, packet)
    library = Humming()
    monkeypatch.setattr(torch.ops, "humming", Recorded(launch_kernel=library.launch), raising=False)
    monkeypatch.setattr(humming, "_library", lambda: library)
    return library


def product(operation, kernel, known, input, bias=None):
    """What a kernel gives for a call on an H100, as its plan would call it."""
    given = {"input": input, "bias": bias, "weight_format": str(known.format), "packed": known.packed}
    given |= {
        name: each for name, each in known.arguments_of("quantized_linear", "weight", {}).items() if each is not None
    }
    operation, declared = FORMATTED[operation], REGISTRY.kernel(kernel)
    facts = FactsBuilder(operation).of_valid({**operation.schema.neutral, **given}, device=Device.named("H100"))
    if any(limit_findings(declared, facts)):
        return None
    required = [given.pop(each.name) for each in operation.schema.required]
    return declared.load(facts)(*required, **{name: each for name, each in given.items() if name in declared.accepts})
