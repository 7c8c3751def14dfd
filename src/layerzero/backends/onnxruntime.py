"""ONNX Runtime's CPU kernels for attention, norms and GELU, each behind a one-node model that is made on first use.

Inputs are bound by address for the length of one call: no binding, and so no stale pointer, outlives it. Measured with
onnxruntime 1.31.1 on an Intel Xeon, 2 threads, 512 x 1024, 2026-11-21: RMS norm 196 us in float32 and 174 in float16
(torch 265 and 357), layer norm 289 (torch 78). GELU by tanh takes 2.2 to 3.0 times less than torch's in float32 from
16 x 4096 on and 1.4 to 2.6 in bfloat16, casts included; one row takes more (AMD EPYC, one thread, 2026-11-23). In other
operations bfloat16 has no kernels or slow ones; float16 attention and layer norm
are out of tolerance at times, float64 attention gives NaN for a query that sees no key.

MatMulNBits is the one product of codes of four bits that is faster than ``F.linear`` in float32: 0.51, 0.51, 0.66, 0.84
and 0.88 of its time for 1, 4, 16, 128 and 512 rows of 4096 x 4096 in groups of 128 (AMD EPYC Zen 4, one thread, 1.32.0,
2026-11-26). With rows rounded to int8 it takes 0.18, 0.13, 0.21, 0.38 and 0.45, of torch's emulated bfloat16 with AVX2
0.3 for one row. Each weight is a session of its own, which keeps the codes twice, and threads that sleep: 30 weights
with 16 threads of torch made 466. It keeps the number that torch had when it was packed: packed in a thread of one, 64
rows of 4096 x 4096 took 15 ms with two threads, not 8 (Intel Xeon with AMX, 2026-12-01).
``use_per_session_threads=False`` shares them, and they spin for 10 ms after each call.
Library: onnxruntime >= 1.28 and onnx >= 1.18, MIT and Apache-2.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends import grouped_weights
from layerzero.backends.norm_limits import ElementsBelow
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.limits import SquareCausal
from layerzero.ops.linear.packed import Pack
from layerzero.ops.quantize.gguf import WHOLE, whole
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import Codes, in_bytes

ONNXRUNTIME = Backend(
    name="onnxruntime",
    summary="ONNX Runtime's kernels for CPUs",
    import_name="onnxruntime",
    distribution="onnxruntime",
    versions=">=1.28,<2",  # 1.23 to 1.27: NaN for a query that sees no key, and no rows of one number
    tested=("1.28.0", "1.31.1", "1.32.0"),
    conflicts=(
        ("onnxruntime-gpu", "both bring the module onnxruntime, and the one installed last overwrites the other"),
    ),
    requires=("onnx>=1.18",),
    platforms=("cpu",),
    install="pip install onnxruntime onnx",
    homepage="https://onnxruntime.ai",
    flags=("deterministic",),
)

_OPSET = 23  # the first with Attention and RMSNormalization
_IR_VERSION = 10  # what onnx 1.18 writes and onnxruntime 1.28 reads
_NUMPY = {torch.float32: "float32", torch.float16: "float16"}
_KINDS = {torch.float32: 1, torch.float16: 10, torch.uint8: 2}  # of onnx.TensorProto


def _session(*of: Any, **attributes: Any) -> Any:
    """The model of one node, for as many threads as torch has now: a session keeps the number that it began with."""
    return _made(torch.get_num_threads(), *of, **attributes)


@functools.lru_cache(maxsize=64)
def _made(
    threads: int, node: str, inputs: tuple[tuple[str, int], ...], rank: int, dtype: torch.dtype, **attributes: Any
) -> Any:
    """Make such a model with open sizes; sessions are thread safe, and the 64 used last are kept."""
    from onnx import helper

    kind = _KINDS[dtype]

    def described(name: str, axes: int) -> Any:
        return helper.make_tensor_value_info(name, kind, [f"{name}_{axis}" for axis in range(axes)])

    graph = helper.make_graph(
        [helper.make_node(node, [name for name, _ in inputs], ["output"], **attributes)],
        node,
        [described(name, axes) for name, axes in inputs],
        [described("output", rank)],
    )
    return _started(graph, threads)


def _started(graph: Any, threads: int) -> Any:
    import onnxruntime
    from onnx import helper

    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors: open sizes give a warning for each
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # idle threads would starve torch's own
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _run(session: Any, tensors: dict[str, Tensor], output: Tensor) -> Tensor:
    """Bind the addresses, run, and forget them."""
    binding = session.io_binding()
    for name, tensor in tensors.items():
        binding.bind_input(name, "cpu", 0, _NUMPY[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
    binding.bind_output("output", "cpu", 0, _NUMPY[output.dtype], tuple(output.shape), output.data_ptr())
    session.run_with_iobinding(binding)
    return output


def _load_attention(facts: Facts) -> Callable[..., Any]:
    dtype = facts.tensors["query"].dtype

    def run(
        *tensors: Tensor, causal: bool = False, scale: float | None = None, attn_mask: Tensor | None = None
    ) -> Tensor:
        query, key, value = tensors
        named = {"query": query, "key": key, "value": value}
        if attn_mask is not None:  # it takes other ranks and broadcasts differently from torch: give it all four axes
            shape = (*query.shape[:3], key.shape[2])
            named["attn_mask"] = attn_mask.to(dtype).expand(shape).contiguous()
        inputs = tuple((name, 4) for name in named)
        settings = {} if scale is None else {"scale": float(scale)}
        session = _session("Attention", inputs, 4, dtype, is_causal=int(causal), **settings)
        return _run(session, named, query.new_empty((*query.shape[:3], value.shape[3])))

    return run


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    rank, dtype = facts.size("input_ndim"), facts.tensors["input"].dtype

    def run(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        inputs = (("input", rank), ("weight", 1))
        session = _session("RMSNormalization", inputs, rank, dtype, axis=-1, epsilon=float(eps))
        return _run(session, {"input": input, "weight": weight}, torch.empty_like(input))

    return run


def _load_layer_norm(facts: Facts) -> Callable[..., Any]:
    rank, dtype = facts.size("input_ndim"), facts.tensors["input"].dtype

    def run(
        input: Tensor, *, normalized_shape: tuple[int, ...], weight: Tensor, bias: Tensor | None = None, eps: float
    ) -> Tensor:
        axes = len(normalized_shape)
        tensors = {"input": input, "weight": weight} | ({} if bias is None else {"bias": bias})
        inputs = tuple((name, rank if name == "input" else axes) for name in tensors)
        session = _session("LayerNormalization", inputs, rank, dtype, axis=-axes, epsilon=float(eps))
        return _run(session, tensors, torch.empty_like(input))

    return run


def _load_gelu(facts: Facts) -> Callable[..., Any]:
    rank, half = facts.size("input_ndim"), facts.tensors["input"].dtype is torch.bfloat16

    def run(input: Tensor, *, approximate: str) -> Tensor:
        session = _session("Gelu", (("input", rank),), rank, torch.float32, approximate=approximate)
        tensor = input.float() if half else input
        output = _run(session, {"input": tensor}, torch.empty_like(tensor))
        return output.to(input.dtype) if half else output

    return run


_GROUPS = (256, 128, 64, 32, 16)

_OF_A_MODEL = "onnx 1.23.2 writes no model of 2**31 bytes, in which codes and scales lie"


def _codes_below(most: int) -> limit.Limit:
    """Codes and scales that a model holds: with groups of 16, 0.78 bytes a number of four bits and 1.25 of eight."""
    return ElementsBelow(most, ("out_features", "in_features"), _OF_A_MODEL)


def _codes(facts: Facts, accuracy: int = 1) -> tuple[Pack, grouped_weights.Product]:
    """Accuracy 1 computes in float32; 4 rounds each group of a row to int8, and takes bfloat16, too."""
    given, inputs, outputs = facts.tensors["input"].dtype, facts.size("in_features"), facts.size("out_features")
    dtype = torch.float32 if given is torch.bfloat16 else given

    def pack(codes: Codes) -> tuple[Any, int]:
        codes = grouped_weights.regrouped(codes, _GROUPS)
        return made(4, codes.numbers, codes.group, codes.scale, codes.zero_points)

    def made(bits: int, numbers: Tensor, group: int, scale: Tensor, zero: Tensor | None) -> tuple[Any, int]:
        from onnx import helper

        narrow = in_bytes(numbers) if bits == 4 else numbers
        constants = {"numbers": narrow.view(outputs, -1, group * bits // 8), "scale": scale.to(dtype)}
        if zero is not None:
            even = torch.nn.functional.pad(zero, (0, zero.shape[1] % 2))
            constants["zero"] = in_bytes(even)
        tensors = [
            helper.make_tensor(name, _KINDS[each.dtype], each.shape, each.contiguous().numpy().tobytes(), raw=True)
            for name, each in constants.items()
        ]
        sizes = {"K": inputs, "N": outputs, "bits": bits, "block_size": group, "accuracy_level": accuracy}
        node = helper.make_node("MatMulNBits", ["input", *constants], ["output"], domain="com.microsoft", **sizes)
        ends = [
            helper.make_tensor_value_info(*each)
            for each in (("input", _KINDS[dtype], ["rows", inputs]), ("output", _KINDS[dtype], ["rows", outputs]))
        ]
        session = _started(helper.make_graph([node], "codes", ends[:1], ends[1:], tensors), torch.get_num_threads())
        return session, 2 * sum(each.nbytes for each in constants.values())

    def pack_gguf(weight: QuantizedWeight) -> tuple[tuple[Any, int, Tensor | None], int]:
        bits, numbers, scale, offset = whole(weight.fields.data, weight.format.kind)
        group = inputs // scale.shape[1]
        session, size = made(bits, numbers, group, scale, None)
        behind = None if offset is None else offset.t().contiguous()
        return (session, group, behind), size + grouped_weights.bytes_of(behind)

    def product(rows: Tensor, form: Any) -> Tensor:
        output = rows.new_empty((rows.shape[0], outputs), dtype=dtype)
        return _run(form, {"input": rows.to(dtype)}, output).to(given)

    def product_gguf(rows: Tensor, form: tuple[Any, int, Tensor | None]) -> Tensor:
        """The offset of each group times the sum of its part of a row is added behind."""
        session, group, behind = form
        wide = rows.to(torch.float32)
        output = _run(session, {"input": wide}, wide.new_empty((rows.shape[0], outputs)))
        return (output if behind is None else output.addmm_(grouped_weights.group_sums(wide, group), behind)).to(given)

    return (pack, product) if facts["weight_scheme"] != "gguf" else (pack_gguf, product_gguf)


KERNELS = (
    ONNXRUNTIME.kernel(
        "onnxruntime.attention",
        attention.ALL,
        _load_attention,
        limit.dtype("float32"),
        SquareCausal(),
        limit.one_of("attn_mask", "none", "float", foldable=True),
        limit.positive("scale"),  # it takes the root of it
        limit.contiguous("query", "key", "value"),
        layout="BHSD",
        accepts=("causal", "scale", "attn_mask"),
        folds=("causal", "attn_mask", "window", "alibi_slopes"),
        priority=30,
    ),
    ONNXRUNTIME.kernel(
        "onnxruntime.rms_norm",
        "norm.rms",
        _load_rms_norm,
        accepts=("eps",),
        limits=(limit.dtype("float32", "float16"), limit.contiguous("input", "weight")),
        priority=20,
    ),
    ONNXRUNTIME.kernel(
        "onnxruntime.gelu",
        "activation.gelu",
        _load_gelu,
        limit.dtype("float32", "bfloat16"),  # bfloat16 is widened on the way in and rounded once on the way out
        limit.one_of("approximate", "tanh"),  # that by erf takes 1.1 to 1.4 times torch's time
        limit.contiguous("input"),
        accepts=("approximate",),
        priority=20,
    ),
    ONNXRUNTIME.kernel(
        "onnxruntime.layer_norm",
        "norm.layer",
        _load_layer_norm,
        accepts=("normalized_shape", "weight", "bias", "eps"),
        limits=(limit.dtype("float32"), limit.one_of("weight", "float"), limit.contiguous("input", "weight", "bias")),
        priority=30,
    ),
    grouped_weights.grouped(
        "onnxruntime.codes_linear",
        ONNXRUNTIME,
        _codes,
        45,
        limit.dtype("float32", "float16"),
        grouped_weights.IN_FOUR_BITS,
        _codes_below(5 * 2**29),
        *limit.dims("weight_group", "in_features", multiple=16),
    ),
    grouped_weights.grouped(
        "onnxruntime.codes_linear_int8",
        ONNXRUNTIME,
        functools.partial(_codes, accuracy=4),
        55,
        limit.dtype("float32", "float16", "bfloat16"),
        grouped_weights.IN_FOUR_BITS,
        _codes_below(5 * 2**29),
        *limit.dims("weight_group", "in_features", multiple=16),
        operations=grouped_weights.ROUNDING,
    ),
    grouped_weights.grouped(
        "onnxruntime.gguf_linear_int8",
        ONNXRUNTIME,
        functools.partial(_codes, accuracy=4),
        55,
        limit.dtype("float32", "bfloat16"),
        limit.one_of("weight_kind", *WHOLE),
        _codes_below(3 * 2**29),
        operation="gguf",
        operations=grouped_weights.ROUNDING_GGUF,
    ),
)
