"""FlashInfer's norms, gates, products for a few rows and all-reduce: modules that it compiles with nvcc on first use.

``flashinfer.norm.rmsnorm`` takes the CuTe DSL's kernels where that is installed and the module's otherwise; here it is
always the module's, called without the operator registration around it (9 us a call through that, an H200 host,
2026-11-21). Limits follow csrc/norm.cu and include/flashinfer/norm.cuh: float16 and bfloat16 only, a dtype that is read
off the input and never compared with the weight's; row starts are computed in 32 bits; the last stride must be 1, which
that of a single element need not be. Its fused_add_rmsnorm writes the norm over its input: norm.add_rms.inplace. For
norm.add_rms it would need a copy of the input first: two launches that move six times the tensor. Adding and then
normalising are two launches that move it five times, and they normalise the sum as it was rounded. Its layernorm takes
float32 weights with bfloat16 data, which norm.layer does not have.

FlashInfer's gates, called as the modules that it compiles with nvcc on first use: one for each activation.

``flashinfer.silu_and_mul`` goes through an operator registration; here the module is called directly. Read:
flashinfer-python 0.7.2, jit/activation.py and include/flashinfer/activation.cuh: float16 and bfloat16 only; dense rows;
vectors as wide as divide a row, loaded from wherever the data begins, so it has to begin at 16 bytes; row starts in 64
bits. It makes the tensors' device the current one and leaves it so, hence the plan's guard where there are several.

FlashInfer's product for a few rows, TensorRT-LLM's tinygemm: bfloat16, 16 outputs by 8 rows a block, from sm_90 on.

One module, compiled with nvcc on first use and called directly, not through ``flashinfer.gemm.tinygemm_bf16`` and its
checks of every call. Read: flashinfer-python 0.7.2, gemm/routergemm.py and csrc/tinygemm2.cu: dense tensors through TMA
descriptors, made on the host for each call, so they begin at 16 bytes; inputs in steps of 64, outputs of 16; the launch
does not set the device. It never starts early (PDL): its documentation says that it hangs next to kernels that do not.
Library: flashinfer-python 0.7.2, Apache-2.0.

FlashInfer's all-reduce of a few tokens, alone and with a residual and a norm in the same launch (TensorRT-LLM's).

Each rank pushes its numbers into all buffers and waits until its own holds no mark of an unwritten number (-0.0), so
that no barrier is needed. All ranks add in the order of the ranks, in float32, and round once: they have the same bits.
Buffers are torch's symmetric memory, without NVLink's multicast. They are made at a group's first call, where all ranks
come together, and kept as long as the group; launches that share them come one after the other.

Read: flashinfer-python 0.7.2, comm/trtllm_ar.py and include/flashinfer/comm/trtllm_allreduce_fusion.cuh: dense rows of
whole vectors of 16 bytes; up to 8 blocks of 1,024 threads a row, in steps of a power of two. One module, for sm 9.0 and
newer, which nvcc compiles for minutes. On two H200 it ran as nvcc made it elsewhere, of the same sources cut down to
bfloat16 and two ranks (torch 2.11, 2026-11-27). Library: flashinfer-python 0.7.2, Apache-2.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

from layerzero.backends.flashinfer.attention import FLASHINFER, kernel, overlaps
from layerzero.backends.flashinfer.modules import is_built, of_modules
from layerzero.backends.norm_limits import ElementsBelow, RowsAligned, sum_then
from layerzero.backends.shape_cache import give_context
from layerzero.backends.torch.collectives import ONE_SHOT, ONE_SHOT_ELEMENTS, ONE_SHOT_OF_TWO, dense, of_group
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.comm.ranks import Ranks, ranks_of

_SUM, _SUM_ADD_NORM = 0, 1  # AllReduceFusionPattern
_ROW = 1024
"""Numbers of a block's row of a sum without a norm."""

_WORKSPACES: WeakKeyDictionary[Any, dict[int, Tensor]] = WeakKeyDictionary()


def _workspace(ranks: Ranks, like: Tensor) -> Tensor:
    """Addresses of the group's buffers. Raises: InvalidCallError in a capture that lacks them."""

    def make() -> Tensor:
        from flashinfer.comm import trtllm_ar

        most = 1 + (ONE_SHOT_OF_TWO if ranks.size == 2 else ONE_SHOT_ELEMENTS)
        create: Any = trtllm_ar.trtllm_create_ipc_workspace_for_all_reduce_fusion
        create = create.__wrapped__  # without the wrapper that warns of another name for it
        buffers, addresses = create(ranks.rank, ranks.size, 1, most, group=ranks.group)
        finalize(ranks.group, trtllm_ar.trtllm_destroy_ipc_workspace_for_all_reduce_fusion, buffers)
        found: Tensor = addresses
        return found

    return of_group(_WORKSPACES, ranks, like, make)


def _operator() -> Callable[..., None]:
    from flashinfer.comm.trtllm_ar import get_trtllm_comm_module

    operator: Callable[..., None] = get_trtllm_comm_module().trtllm_allreduce_fusion
    return operator


def _load_all_reduce(_facts: Facts) -> Callable[..., Any]:
    operator = _operator()

    def run(input: Tensor, *, group: Any = None) -> Tensor:
        ranks, local = ranks_of(group), dense(input)
        output, rows = torch.empty_like(local), local.numel() // _ROW
        given = local, ranks.size, ranks.rank, rows, _ROW, _workspace(ranks, local), True, True, True, True
        operator(*given, _SUM, output, *[None] * 11)
        return output

    return run


def _load_all_reduce_add_rms_norm(facts: Facts) -> Callable[..., Any]:
    operator, hidden = _operator(), facts.size("hidden")

    def run(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float, group: Any = None) -> tuple[Tensor, Tensor]:
        ranks, local = ranks_of(group), dense(input)
        output, total, rows = torch.empty_like(local), torch.empty_like(local), local.numel() // hidden
        given = local, ranks.size, ranks.rank, rows, hidden, _workspace(ranks, local), True, True, True, True
        normed = None, dense(residual), total, output, None, None, dense(weight), eps
        operator(*given, _SUM_ADD_NORM, *normed, *[None] * 4)
        return output, total

    return run


_SUM_LIMITS = (
    limit.arch(min=(9, 0)),
    limit.dtype("bfloat16"),
    *ONE_SHOT,
    limit.dim("rank_count", max=2),  # more ranks never ran it
)


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    from flashinfer.norm import get_norm_module

    operator, overlap = get_norm_module().rmsnorm, overlaps(facts)
    empty_like, hidden, is_matrix = torch.empty_like, facts.size("hidden"), facts["input_ndim"] == 2

    def matrix(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        output = empty_like(input)
        operator(output, input, weight, eps, overlap)
        return output

    def run(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        rows = input.view(-1, hidden)  # of three axes it takes the last two for a head, a warp for each
        output = empty_like(rows)
        operator(output, rows, weight, eps, overlap)
        return output.view(input.shape)

    return matrix if is_matrix else run


def _load_add_rms_norm_inplace(facts: Facts) -> Callable[..., Any]:
    from flashinfer.norm import get_norm_module

    operator, hidden, overlap = get_norm_module().fused_add_rmsnorm, facts.size("hidden"), overlaps(facts)

    def run(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> None:
        operator(input.view(-1, hidden), residual.view(-1, hidden), weight, eps, overlap)

    return run


_LIMITS = (limit.dtype("float16", "bfloat16"), limit.dim("hidden", min=2), ElementsBelow(2**32))


def _activation(facts: Facts) -> str:
    if facts["operation"] == "mlp.silu_mul.joined":
        return "silu"
    return "gelu_tanh" if facts["approximate"] == "tanh" else "gelu"


@functools.cache
def _function(activation: str) -> Callable[..., None]:
    from flashinfer.jit import gen_act_and_mul_module

    module = gen_act_and_mul_module(activation).build_and_load()
    function: Callable[..., None] = getattr(module, f"{activation}_and_mul")
    return function


def _load(facts: Facts) -> Callable[..., Any]:
    operator, overlap = _function(_activation(facts)), overlaps(facts)

    def run(input: Tensor, **_: Any) -> Tensor:
        output = input.new_empty((*input.shape[:-1], input.shape[-1] // 2))
        operator(output, input, overlap)
        return output

    return run


@functools.cache
def _module_linear() -> Any:
    from flashinfer.jit import gen_tinygemm2_module

    return gen_tinygemm2_module().build_and_load()


def _load_linear(facts: Facts) -> Callable[..., Any]:
    module = _module_linear()
    with_bias, without = module.tinygemm2_op, module.tinygemm2_nobias_op
    inputs, outputs, ndim = facts.size("in_features"), facts.size("out_features"), facts["input_ndim"]

    def run(input: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
        give_context(input)
        rows = input if ndim == 2 else input.view(-1, inputs)
        output = rows.new_empty((rows.shape[0], outputs))
        if bias is None:
            without(rows, weight, output, False)
        else:
            with_bias(rows, weight, bias, output, False)
        return output if ndim == 2 else output.view(*input.shape[:-1], outputs)

    return run


KERNELS = (
    kernel(
        "flashinfer.rms_norm",
        "norm.rms",
        _load_rms_norm,
        accepts=("eps",),
        limits=(*_LIMITS, limit.contiguous("input", "weight"), RowsAligned(("input", "weight"))),
        deterministic=True,
        **of_modules("norm"),
        priority=95,
    ),
    kernel(
        "flashinfer.add_rms_norm",
        "norm.add_rms",
        lambda facts: sum_then(_load_rms_norm(facts)),
        accepts=("eps",),
        limits=(*_LIMITS, limit.contiguous("residual", "weight"), RowsAligned(("residual", "weight"))),
        deterministic=True,
        **of_modules("norm"),
        priority=85,
    ),
    kernel(
        "flashinfer.add_rms_norm_inplace",
        "norm.add_rms.inplace",
        _load_add_rms_norm_inplace,
        limit.dtype("bfloat16"),  # it normalises the sum before that is rounded: of float16 more than its tolerance
        *_LIMITS[1:],
        limit.contiguous("input", "residual", "weight"),
        RowsAligned(("input", "residual", "weight")),
        accepts=("eps",),
        deterministic=True,
        **of_modules("norm"),
        priority=85,
    ),
    *(
        kernel(
            f"flashinfer.{name}",
            f"mlp.{name}.joined",
            _load,
            limit.dtype("float16", "bfloat16"),
            limit.contiguous("input"),
            limit.aligned(16, "input"),
            limit.dim("joined", multiple=8),  # no copy aligns rows of other lengths
            accepts=accepts,
            deterministic=True,
            build_key=lambda facts: (facts.device.sm, _activation(facts)),
            prebuilt=lambda facts: is_built(f"{_activation(facts)}_and_mul", facts),
            device_guard=False,
            priority=90,
        )
        for name, accepts in (("silu_mul", ()), ("gelu_mul", ("approximate",)))
    ),
    kernel(
        "flashinfer.tinygemm",
        "mlp.linear",
        _load_linear,
        limit.arch(min=(9, 0)),
        limit.dtype("bfloat16"),
        limit.dim("rows", max=64),  # beyond, each block of 8 rows reads the weight again
        limit.dim("in_features", multiple=64),
        limit.dim("out_features", multiple=16),
        limit.contiguous("input", "weight", "bias"),
        limit.aligned(16, "input", "weight"),
        accepts=("bias",),
        deterministic=True,
        **of_modules("tinygemm2"),
        device_guard=False,
        priority=40,
    ),
    FLASHINFER.kernel(
        "flashinfer.all_reduce",
        "comm.all_reduce",
        _load_all_reduce,
        limits=(*_SUM_LIMITS, limit.dim("payload", multiple=_ROW)),
        accepts=("group",),
        **of_modules("trtllm_comm"),
        priority=70,
    ),
    FLASHINFER.kernel(
        "flashinfer.all_reduce_add_rms_norm",
        "comm.all_reduce_add_rms_norm",
        _load_all_reduce_add_rms_norm,
        limits=(*_SUM_LIMITS, limit.dim("hidden", max=16384, multiple=64)),
        accepts=("eps", "group"),
        **of_modules("trtllm_comm"),
        priority=70,
    ),
)
