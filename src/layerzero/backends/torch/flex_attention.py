"""torch's flex_attention, compiled ahead of time for a class of calls; softcap, windows and ALiBi without a mask.

``torch.compile(flex_attention)`` compiles anew, inside a call, for other sizes, dtypes, grad modes and thread counts.
Nothing here can: what was built has no guards, and what it was not built for is refused (JIT_DISABLED). Every argument
is a tensor of the one program, so that a build serves calls with and without each of them.

On the CPU the program is exported with batch and lengths as ranges and compiled by AOTInductor: 20 to 30 s a build,
kept in Inductor's cache; compared with float64 on a Skylake Xeon with torch 2.13.0 (2026-11-21). There 1 x 512 tokens
with 16/4 heads of 64 take one thread 50 ms in float32 and 150 in bfloat16. torch's SDPA takes 13 and 37, the reference,
which alone knows a softcap, 130 and 350: hence a priority below every kernel that takes the call otherwise.
On GPUs it is compiled by ``aot_compile`` for exact sizes and lives in this process only. That way ran on the CPU with
torch 2.11 and 2.13. On a GPU conformance built small calls in float32 alone, and found no wrong result (H200, torch
2.11, 2026-11-27). Its limits there are those of torch 2.13's source (inductor/kernel/flex).
Library: torch 2.13, BSD-3-Clause; arXiv:2412.05496.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch import aot_inductor
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.reference import attention_reference

FLEX_ATTENTION = Backend(
    name="flex_attention",
    summary="torch's flex_attention, compiled for the sizes of warmup",
    distribution="torch",
    platforms=("cpu", "cuda"),
    homepage="https://pytorch.org",
    **aot_inductor.VERSIONS,
)

Runner = Callable[[list[Tensor]], Tensor]

_THREADS = max(torch.get_num_threads(), os.cpu_count() or 1)
"""Most threads that a CPU build serves: its buffers are sized for so many, and more would write beyond them. Compiled
for two and run by four, it ended in "double free or corruption" (torch 2.13.0, 2026-11-21)."""

_EXACT = ("heads", "kv_heads", "head_dim", "value_dim")
_RANGES = ("batch", "seq_q", "seq_k")
_UNBOUNDED = 1 << 40

_BUILT: aot_inductor.Loaded[Runner] = aot_inductor.Loaded()


def _attention(
    scale: Tensor,
    softcap: Tensor,
    left: Tensor,
    right: Tensor,
    offset: Tensor,
    slopes: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Attention on BSHD tensors; a softcap of 0 is none, slopes of 0 are none, bounds count from the diagonal."""
    from torch.nn.attention.flex_attention import flex_attention

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        score = score * scale
        score = torch.where(softcap > 0, softcap * torch.tanh(score / softcap), score)
        distance = row + offset - column  # the last query stands at the last key
        score = score - slopes[head] * distance.abs()
        return torch.where((distance <= left) & (-distance <= right), score, -math.inf)

    output: Any = flex_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        score_mod=score_mod,
        scale=1.0,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return output.transpose(1, 2)  # type: ignore[no-any-return]


class _Attention(torch.nn.Module):
    """What torch.export takes in place of a function."""

    def forward(self, *tensors: Tensor) -> Tensor:
        return _attention(*tensors)


def _load(facts: Facts) -> Callable[..., Any]:
    device = torch.device(facts.device.torch_type, facts.device.index)
    run, on_cpu = _built(facts, device), device.type == "cpu"
    window: Any = facts["window"]
    left, right = window or (-1, -1)
    if facts.get("causal"):
        right = 0
    scale = facts.size("head_dim") ** -0.5 if facts["scale"] is None else facts["scale"]
    numbers = [torch.tensor(number, dtype=torch.float32, device=device) for number in (scale, facts["softcap"] or 0.0)]
    bounds = [_UNBOUNDED if bound < 0 else bound for bound in (left, right)]
    numbers += [torch.tensor(number, device=device) for number in bounds]
    # one build on the CPU serves a class of lengths, and a plan should, too; on a GPU the copy would cost each call
    exact_offset = None if on_cpu else torch.tensor(facts.size("seq_k") - facts.size("seq_q"), device=device)
    no_slopes = torch.zeros(facts.size("heads"), dtype=torch.float32, device=device)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, *, alibi_slopes: Tensor | None = None, **scores: Any
    ) -> Tensor:
        if on_cpu and not math.isfinite(query.sum(dtype=torch.float32) + key.sum(dtype=torch.float32)):
            # the CPU's kernel takes a row of NaN for one without keys, and gives 0
            return attention_reference(query, key, value, alibi_slopes=alibi_slopes, **scores)  # type: ignore[return-value]
        # a plan has but one causal, scale, window and softcap: they are in ``numbers``
        slopes = no_slopes if alibi_slopes is None else alibi_slopes.float().contiguous().view(-1)
        offset = torch.tensor(key.shape[1] - query.shape[1]) if exact_offset is None else exact_offset
        return run([*numbers, offset, slopes, query, key, value])

    return attend


def _built(facts: Facts, device: torch.device) -> Runner:
    """The build that serves a call, made if there is none; warmup is the only caller for which there is none."""
    ranged = device.type == "cpu"
    sizes = {name: 1 << (facts.size_bits(name) - 1) if ranged else facts.size(name) for name in _RANGES}
    sizes |= {name: facts.size(name) for name in _EXACT}  # a range is a class: from a power of two up to its double
    dtype = facts.tensors["query"].dtype
    key = (device, dtype, *sizes.values())

    def build() -> Runner:
        if not ranged:
            return aot_inductor.apart(lambda: _for_exact_sizes(device, dtype, sizes))
        ((_, path),) = aot_inductor.parts_of(_name(facts), lambda: [_for_a_range(facts, device, dtype, sizes)])
        return _runner(path)

    return _BUILT.get(key, build)


def _example(device: torch.device, dtype: torch.dtype, sizes: dict[str, int]) -> tuple[Tensor, ...]:
    batch, seq_q, seq_k, heads, kv_heads, head_dim, value_dim = sizes.values()
    return (
        *(torch.ones((), dtype=torch.float32, device=device) for _ in range(2)),
        *(torch.ones((), dtype=torch.int64, device=device) for _ in range(3)),
        torch.zeros(heads, dtype=torch.float32, device=device),
        torch.ones(batch, seq_q, heads, head_dim, dtype=dtype, device=device),
        torch.ones(batch, seq_k, kv_heads, head_dim, dtype=dtype, device=device),
        torch.ones(batch, seq_k, kv_heads, value_dim, dtype=dtype, device=device),
    )


def _for_a_range(facts: Facts, device: torch.device, dtype: torch.dtype, sizes: dict[str, int]) -> tuple[int, Path]:
    """Export for batch and lengths from the given ones up to their doubles, and compile ahead of time."""
    batch, seq_q, seq_k = (aot_inductor.sizes_between(name, sizes[name], 2 * sizes[name] - 1) for name in _RANGES)
    dynamic = (*(None,) * 6, {0: batch, 1: seq_q}, {0: batch, 1: seq_k}, {0: batch, 1: seq_k})
    example = sizes | {name: sizes[name] * 3 // 2 for name in _RANGES}
    if example["seq_q"] == example["seq_k"] > 1:
        example["seq_k"] -= 1  # equal sizes would be taken for one
    options = {"cpp.dynamic_threads": True, "cpp.threads": _THREADS}
    return aot_inductor.compiled(_Attention(), _example(device, dtype, example), {"tensors": dynamic}, facts, options)


def _runner(path: Path) -> Runner:
    artefact = aot_inductor.loaded(path)

    def run(tensors: list[Tensor]) -> Tensor:
        if torch.get_num_threads() > _THREADS:
            raise RuntimeError(f"built for {_THREADS} threads at most, torch has {torch.get_num_threads()}")
        return artefact(tensors)[0]

    return run


def _name(facts: Facts) -> str:
    return aot_inductor.name_of((facts.device.name, _THREADS, _build_key(facts)), __file__)


def _for_exact_sizes(device: torch.device, dtype: torch.dtype, sizes: dict[str, int]) -> Runner:
    """Compile for the very sizes; other ones raise in it, without further checks."""
    ahead = torch._dynamo.config.patch(enable_aot_compile=True)  # torch 2.11 and before have no ``aot_compile`` without
    with warnings.catch_warnings(), torch.no_grad(), ahead:
        warnings.simplefilter("ignore")
        traced: Any = torch.compile(_attention, fullgraph=True, dynamic=False)
        artefact = traced.aot_compile((_example(device, dtype, sizes), {}))
    artefact.disable_guard_check()  # sizes, strides, dtype and device are the limits' business; grad mode is set below

    def run(tensors: list[Tensor]) -> Tensor:
        with torch.no_grad():
            return artefact(*tensors)  # type: ignore[no-any-return]

    return run


def _build_key(facts: Facts) -> Hashable:
    """A build on the CPU serves a class of batches and lengths, at exact heads and widths, in its own layout.

    A call's layout is none of it: a build for one in BHSD, which is adapted, was not found by the next.
    """
    return facts["operation"], facts["dtype"], *map(facts.size_bits, _RANGES), *map(facts.__getitem__, _EXACT)


def _exact_build_key(facts: Facts) -> Hashable:
    """A build on a GPU serves its own sizes."""
    return facts.device.index, facts["dtype"], *(facts[name] for name in (*_RANGES, *_EXACT))


_ARGUMENTS = ("causal", "scale", "window", "softcap", "alibi_slopes")
_DTYPES = limit.dtype("float32", "float16", "bfloat16")
# indexed by a batch whose size is a range, they make C++ that does not compile
_SLOPES = limit.rule(
    "alibi_slopes: one slope a head, (H,)",
    lambda facts: (
        (slopes := facts.tensors.get("alibi_slopes")) is None or len(slopes.shape) == 1 or slopes.shape[0] == 1
    ),
)
_DENSE = limit.contiguous("query", "key", "value")  # strides are compiled in

KERNELS = (
    FLEX_ATTENTION.kernel(
        "flex_attention.cpu",
        attention.ALL,
        _load,
        layout="BSHD",
        accepts=_ARGUMENTS,
        limits=(limit.platform("cpu"), _DTYPES, _SLOPES, _DENSE),
        deterministic=True,
        jit=True,
        build_key=_build_key,
        prebuilt=aot_inductor.kept_files(_name),
        priority=15,
    ),
    FLEX_ATTENTION.kernel(
        "flex_attention.cuda",
        attention.ALL,
        _load,
        limit.platform("cuda"),
        limit.arch(min=(8, 0)),
        _DTYPES,
        limit.dim("head_dim", min=16, max=256),  # tl.dot takes no less; wider heads outgrow the shared memory
        limit.dim("value_dim", min=16, max=256),
        _SLOPES,
        _DENSE,
        limit.aligned(16, "query", "key", "value"),
        layout="BSHD",
        accepts=_ARGUMENTS,
        jit=True,
        build_key=_exact_build_key,
        priority=15,
    ),
)
