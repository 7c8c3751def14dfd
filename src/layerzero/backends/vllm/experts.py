"""vLLM's experts on CUDA: Marlin's products with quantised weights, its permutation around torch's grouped ones.

Arguments follow what ``_moe_C.abi3.so`` registers, their use ``fused_marlin_moe.py`` and ``moe_permute_unpermute.py``;
arguments follow the names in an operator's schema, since those of an act-order index came and went. Tokens are
sorted by ``moe_align_block_size`` into blocks of one expert, which products read in place: six launches for a call, and
no wait for the host. An expert of -1 becomes one behind the last, which a map names as elsewhere; what is not written
then is 0 from the start. Sums over a token's experts are torch's, in float32: ``moe_sum`` adds up in the rows' dtype.
Instantiations are those of csrc/moe/marlin_moe_wna16/generate_kernels.py: codes of 4 and 8 bits with a scale for each
row or for 32, 64 or 128 numbers, zero points with 4 bits alone; e4m3 with a scale for each row or 128 numbers; e2m1
with one for 16 (nvfp4) or 32 (mxfp4, in bfloat16). Outputs come in steps of 128, to which the last product is filled
up. The wheel of 0.20 has PTX alone of codes of 4 and 8 bits, mxfp4 and nvfp4: the driver compiles each once, in 22
to 59 s (H200, 26 November 2026), and keeps it. Conformance there found no wrong result of the permutation and of Marlin
with codes of 4 bits by group, and none with those of 8 bits on an H100 (27 November 2026); that of the others has not
ended.
Library: vllm 0.20, Apache-2.0; torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends.grouped_weights import (
    ALIKE,
    EITHER,
    IN_FOUR_BITS,
    TENSORS,
    UNROTATED,
    Locks,
    before_capture,
    bytes_of,
    made_for,
    of_call,
    regrouped,
)
from layerzero.backends.norm_limits import ElementsBelow
from layerzero.backends.shape_cache import Prepared, driver_cache, launch_lock
from layerzero.backends.vllm import marlin
from layerzero.backends.vllm.grouped_linear import BIASED, UNSIGNED, multiprocessors
from layerzero.backends.vllm.library import VLLM, operators
from layerzero.backends.vllm.rows import IN_32_BITS
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel, Trust
from layerzero.ops.activation.formulas import FUNCTIONS
from layerzero.ops.linear.packed import PackedWeight, belongs
from layerzero.ops.moe.experts import EXPERTS, PACKED_OF, gated
from layerzero.ops.quantize.groups import ROWS_ORDER, marlin_codes, marlin_scale, marlin_zero
from layerzero.ops.quantize.weight import QuantizedWeight

_BLOCKS = (8, 16, 32, 48, 64)
"""Tokens of a block, of which an expert's last is filled up."""

_STEP = 128
"""Outputs of the narrowest tile."""

_LOCKS_EACH = 4
"""Blocks of a multiprocessor that wait for each other."""


class Form(NamedTuple):
    """Marlin's tensors of all experts.

    Shapes: words (E, K / 16, N * bits / 2), scale and zero (E, G, ...), second (E,).
    """

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    second: Tensor | None
    kind: int
    locks: Locks


def _map(experts: int, device: torch.device) -> Tensor:
    """Where each expert is, and -1 for the one that is elsewhere; made once, because a capture cannot make it."""
    found = torch.arange(experts + 1, dtype=torch.int32, device=device)
    found[-1] = -1
    return found


def _order(device: torch.device) -> Tensor:
    """Marlin's order of outputs; made once, because a capture cannot copy it to the device."""
    return torch.tensor(ROWS_ORDER, device=device)


MAPS, ORDERS = Prepared(_map, 1024), Prepared(_order, 64)


def _device(facts: Facts) -> torch.device:
    return torch.device(facts.device.torch_type, facts.device.index or 0)


def _names(operator: Any) -> tuple[str, ...]:
    return tuple(each.name for each in operator._schema.arguments)


def _gate(facts: Facts) -> Callable[[Tensor], Tensor]:
    """What follows the first product. vLLM's gate of gpt-oss drops a NaN, so that torch computes that one."""
    activation: Any = facts["activation"]
    name = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}.get(activation)
    if name is None:
        alpha: Any = facts["alpha"]
        most: Any = facts["limit"]
        return lambda joined: gated(joined, activation, alpha, most, FUNCTIONS)
    operator = getattr(operators("_C.abi3.so", "_C"), name).default

    def run(joined: Tensor) -> Tensor:
        through = joined.new_empty((joined.shape[0], joined.shape[1] // 2))
        operator(through, joined)
        return through

    return run


def block_size(tokens: int, top_k: int, experts: int) -> int:
    """Tokens of a block: as many as an expert has on average, as ``fused_marlin_moe`` chooses."""
    return next((each for each in _BLOCKS if tokens * top_k / experts / each < 0.9), _BLOCKS[-1])


def aligned(operator: Any, ids: Tensor, experts: int, block: int, of_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens in blocks of one expert each: their places, the expert of each block, and how many places there are."""
    count = ids.numel()
    most = count + (experts + 1) * (block - 1)
    if count < experts + 1:
        most = min(count * block, most)
    places, owners = ids.new_empty(most), ids.new_empty(-(-most // block))
    total = ids.new_empty(1)
    more = (None,) * (len(operator._schema.arguments) - 7)  # in vLLM 0.33 places of rows, too
    operator(ids, experts + 1, block, places, owners, total, of_map, *more)
    return places, owners, total


def _load_marlin(facts: Facts, owner: str, pack: Callable[..., tuple[Form, int]]) -> Callable[..., Tensor]:
    library, experts = operators("_moe_C.abi3.so", "_moe_C"), facts.size("experts")
    product, align = library.moe_wna16_marlin_gemm.default, library.moe_align_block_size.default
    names, gate, device, capturing = _names(product), _gate(facts), _device(facts), bool(facts["capturing"])
    of_map, order = MAPS.get(experts, device, capturing=capturing), ORDERS.get(device, capturing=capturing)
    # a product sets how much shared memory its kernel may have, which differs by call. A launch that asks for more than
    # another thread has set meanwhile is dropped without a word (marlin_mm in csrc/moe/marlin_moe_wna16/ops.cu, 0.20.0)
    alone = launch_lock("vllm.marlin_experts", device.index)
    index = (None, None) if "g_idx_or_none" in names else ()
    parallel, whole = (False,) * ("is_ep" in names), (True,) * bool(index)
    tiles = (-1,) * sum(name in names for name in ("thread_k", "thread_n", "blocks_per_sm"))
    dtype, call = facts.tensors["input"].dtype, of_call(owner, facts, _OF_CALL)
    hidden, joined = facts.size("hidden"), facts.size("joined_features")
    filled = -(-hidden // _STEP) * _STEP

    def made(weight: QuantizedWeight) -> tuple[Form, int]:
        made_for(call)
        return pack(weight, dtype)

    def run(
        *tensors: Tensor,
        packed_gate_up: PackedWeight,
        packed_down: PackedWeight,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        input, *_weights, expert_ids, expert_weights = tensors
        first, second = (each.form((owner, dtype), made) for each in (packed_gate_up, packed_down))
        tokens, top_k = expert_ids.shape
        ids = expert_ids.to(torch.int32).contiguous().remainder(experts + 1)
        shares = expert_weights.to(torch.float32).contiguous()
        block = block_size(tokens, top_k, experts)
        blocks = aligned(align, ids, experts, block, of_map)

        def multiplied(rows: Tensor, output: Tensor, form: Form, bias: Tensor | None, *, each: int, last: bool) -> None:
            size = (len(rows), output.shape[1], rows.shape[1])
            given = (
                *(rows, output, form.words, _ordered(bias, output.shape[1], order)),
                *(form.scale, None, form.second, form.zero),
                *(*index, form.locks.now(), *blocks, shares, block, each, last, *parallel, form.kind, *size, *whole),
                *(False, True, False, *tiles),  # no atomics, sums in float32
            )
            with alone:
                product(*given)

        between = input.new_empty(tokens * top_k, joined)
        multiplied(input, between, first, gate_up_bias, each=top_k, last=False)
        output = input.new_zeros(tokens * top_k, filled)
        multiplied(gate(between), output, second, down_bias, each=1, last=True)
        return output.view(tokens, top_k, filled)[..., :hidden].sum(1)

    return run


def _ordered(bias: Tensor | None, outputs: int, order: Tensor) -> Tensor | None:
    """Biases in Marlin's order of outputs, filled up. Shapes: (E, N) → (E, outputs)."""
    if bias is None:
        return None
    if bias.shape[1] != outputs:
        bias = functional.pad(bias, (0, outputs - bias.shape[1]))
    return bias.reshape(-1, len(order)).index_select(1, order).view(len(bias), outputs)


def _stacked(forms: list[tuple[Any, ...]], kind: int) -> tuple[Form, int]:
    words, scale, zero, second = (None if each[0] is None else torch.stack(each) for each in zip(*forms, strict=True))
    assert words is not None
    assert scale is not None
    second = None if second is None else second.reshape(-1)
    locks = Locks(_LOCKS_EACH * multiprocessors(words.device), words.device)
    return Form(words, scale, zero, second, kind, locks), bytes_of(words, scale, zero, second)


def _pack_codes(weight: QuantizedWeight, dtype: torch.dtype) -> tuple[Form, int]:
    """Of codes by group; where one expert has zero points, all of them get some."""
    each = [weight[number].codes for number in range(weight.shape[0])]
    zeros = any(codes.zero_points is not None for codes in each) or each[0].bits < 4
    bits, forms = max(each[0].bits, 4), []
    for own in each:
        codes = own if own.scale.shape[1] == 1 else regrouped(own, (128, 64, 32))
        numbers, scale, zero = codes.numbers, codes.scale, None
        if zeros:
            zero = torch.full_like(scale, codes.middle, dtype=torch.uint8) if codes.zero is None else codes.zero
            zero = marlin_zero(_filled(zero))
        forms.append((marlin_codes(_filled(numbers), bits), marlin_scale(_filled(scale), dtype), zero, None))
    return _stacked(forms, UNSIGNED[4] if zeros else BIASED[bits])


def _filled(rows: Tensor) -> Tensor:
    """Rows filled up with 0 to whole tiles: products with a scale of 0 are 0."""
    missing = -len(rows) % _STEP
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _filled_weight(weight: QuantizedWeight) -> QuantizedWeight:
    data, scale = weight.fields.data, weight.fields.scale
    assert scale is not None
    rows = -(-len(data) // _STEP) * _STEP
    if rows == len(data):
        return weight
    if scale.ndim and len(scale) == len(data):
        scale = _filled(scale.view(torch.uint8)).view(scale.dtype) if scale.itemsize == 1 else _filled(scale)
    fields = weight.fields._replace(data=_filled(data.view(torch.uint8)).view(data.dtype), scale=scale)
    return QuantizedWeight.unchecked(weight.format, (rows, weight.shape[1]), fields)


def _pack_other(weight: QuantizedWeight, dtype: torch.dtype, kind: int, one: Callable[..., Any]) -> tuple[Form, int]:
    """Of float8, MX and NVFP4, made as for a product with one weight."""
    made = [one(_filled_weight(weight[number]), dtype) for number in range(weight.shape[0])]
    return _stacked([(words, scale, None, second) for words, scale, second in made], kind)


_OF_CALL = ("dtype", "gate_up_format", "down_format", "experts", "hidden", "joined_features")

_GATES = limit.one_of("activation", "silu", "gelu", "gelu_tanh", "swiglu_oai")
_EXPERTS = limit.dim("experts", max=991)
"""With one more for those that are elsewhere, in steps of 32, fewer than 1024 can be counted."""

_ROWS = [ElementsBelow(2**32, ("tokens", "top_k", width), IN_32_BITS) for width in ("joined_features", "hidden")]
"""What the gate reads. Whether sums over the experts count further was not run."""


def _compiled(facts: Facts) -> Hashable:
    """One file of PTX for each kind of numbers."""
    return facts.device.sm, facts["dtype"], facts["weight_scheme"], facts["weight_bits"], facts["weight_zeros"]


def _kernel(
    owner: str, pack: Callable[..., Any], *limits: limit.Limit, compiles: bool = True, ran: bool = False
) -> Kernel:
    builds: dict[str, Any] = {"jit": True, "build_key": _compiled, "cache_folder": driver_cache} if compiles else {}
    optional = [name for name in TENSORS if not name.endswith("group_index")]
    return VLLM.kernel(
        owner,
        EITHER if pack is _pack_codes else EITHER[:1],
        functools.partial(_load_marlin, owner=owner, pack=pack),
        _EXPERTS,
        limit.dtype("float16", "bfloat16"),
        _GATES,
        ALIKE,
        UNROTATED,
        limit.contiguous("input", "gate_up_bias", "down_bias"),
        limit.aligned(16, "input"),
        limit.dim("hidden", multiple=64),
        limit.dim("joined_features", multiple=_STEP),
        limit.dim("inner_features", multiple=64),
        *_ROWS,
        *limits,
        *(belongs(packed, of) for packed, of in PACKED_OF.items()),
        before_capture(owner, _OF_CALL),
        device_guard=False,  # operators of _moe_C run on the current device (0.20.0, two H200s, 2026-11-30)
        accepts=(
            *("gate_up_bias", "down_bias", "activation", "alpha", "limit", "gate_up_format", "down_format"),
            *(*optional, *PACKED_OF),
        ),
        workspace_bytes=_workspace,
        priority=60,
        trust=Trust.DECLARED if ran else Trust.UNTRIED,
        **builds,
    )


def _workspace(facts: Facts) -> int:
    return 2 * facts.size("tokens") * facts.size("top_k") * (facts.size("joined_features") + facts.size("hidden"))


def _load_grouped(facts: Facts, owner: str) -> Callable[..., Tensor]:
    library, experts = operators("_moe_C.abi3.so", "_moe_C"), facts.size("experts")
    permute, back = library.moe_permute.default, library.moe_unpermute.default
    grouped_mm: Any = functional.grouped_mm
    in_blocks = "m_indices" in _names(permute)
    gate, of_map = _gate(facts), MAPS.get(experts, _device(facts), capturing=bool(facts["capturing"]))
    made_for(of_call(owner, facts, ("experts",)))

    def run(
        input: Tensor, gate_up_weight: Tensor, down_weight: Tensor, expert_ids: Tensor, expert_weights: Tensor, **_: Any
    ) -> Tensor:
        (tokens, top_k), hidden = expert_ids.shape, input.shape[1]
        ids = expert_ids.to(torch.int32).contiguous().remainder(experts + 1)
        numbers = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device).view(tokens, top_k)
        rows, starts = input.new_empty(ids.numel(), hidden), ids.new_empty(experts + 1, dtype=torch.int64)
        places, order = torch.empty_like(ids), ids.new_empty(ids.numel())
        known = (input, ids, numbers, of_map, experts + 1, experts, top_k)
        if in_blocks:
            permute(*known, None, rows, starts, places, order, torch.empty_like(order))
        else:
            permute(*known, rows, starts, places, order)
        ends = starts[1:].to(torch.int32)
        made = grouped_mm(gate(grouped_mm(rows, gate_up_weight.mT, offs=ends)), down_weight.mT, offs=ends)
        output, shares = torch.empty_like(input), expert_weights.to(torch.float32).contiguous()
        back(made, shares, places.flatten(), starts, top_k, output)
        return output

    return run


_GROUPED = "vllm.experts_grouped"

KERNELS = (
    _kernel("vllm.marlin_experts", _pack_codes, IN_FOUR_BITS, limit.dim("weight_group", multiple=32), ran=True),
    _kernel(
        "vllm.marlin_experts_int8",
        _pack_codes,
        limit.one_of("weight_bits", 8),
        limit.one_of("weight_zeros", "none"),
        limit.dim("weight_group", multiple=32),
        ran=True,
    ),
    _kernel(
        "vllm.marlin_experts_fp8",
        functools.partial(_pack_other, kind=marlin.E4M3, one=marlin.block_tensors),
        limit.one_of("weight_dtype", "float8_e4m3"),
        limit.one_of("weight_scheme", "fp8"),
        limit.dim("weight_group", one_of=(0, 128)),
        compiles=False,
    ),
    _kernel(
        "vllm.marlin_experts_mx",
        functools.partial(_pack_other, kind=marlin.E2M1, one=marlin.micro_tensors),
        limit.dtype("bfloat16"),
        limit.one_of("weight_scheme", "mxfp4"),
    ),
    _kernel(
        "vllm.marlin_experts_nvfp4",
        functools.partial(_pack_other, kind=marlin.E2M1, one=marlin.micro_tensors),
        limit.one_of("weight_scheme", "nvfp4"),
        # added before the product is scaled: 3e32 instead of -1 (vLLM 0.20.0, H100, 2026-11-27)
        limit.absent("down_bias"),
    ),
    VLLM.kernel(
        _GROUPED,
        EXPERTS.name,
        functools.partial(_load_grouped, owner=_GROUPED),
        limit.dim("experts", max=1023),
        limit.dtype("bfloat16"),
        _GATES,
        *limit.dims("hidden", "inner_features", multiple=8),
        *_ROWS,
        limit.contiguous("input", "gate_up_weight", "down_weight"),
        limit.aligned(16, "input", "gate_up_weight", "down_weight"),
        before_capture(_GROUPED, ("experts",)),
        accepts=("activation", "alpha", "limit"),
        device_guard=False,
        priority=58,
    ),
)
