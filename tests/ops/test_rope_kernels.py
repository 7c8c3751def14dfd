"""Which rotations the kernels are offered, here and on devices that are not here, and what keeps them from harm."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero as lz
from drawing import at_once
from layerzero.backends.vllm_cpu.norm import VLLM_CPU
from layerzero.core.device import Device
from layerzero.core.reasons import ReasonCode
from layerzero.engine.probe import this_machine
from layerzero.ops.rope.declare import cos_sin, rope

LIBRARIES = {"torch": "2.11.0", "flashinfer-python": "0.7.2.post1", "vllm": "0.20.0", "liger-kernel": "0.8.5"}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MISSING = this_machine().state(VLLM_CPU, Device.detect("cpu")).reason


def call(tokens=(64,), heads=32, kv_heads=8, head_dim=128, half=64, dtype=BF16, table=F32, device="meta"):
    target = torch.device(device)
    query, key = (torch.empty((*tokens, each, head_dim), dtype=dtype, device=target) for each in (heads, kv_heads))
    cos, sin = cos_sin(4096, half, target, table)
    return {"query": query, "key": key, "cos": cos, "sin": sin, "positions": torch.empty(tokens, device=target).long()}


def codes(kernel, arguments, device="H200", libraries=LIBRARIES):
    function = "rope_" if kernel.endswith("inplace") else "rope"
    with lz.scope(allow_jit_compile=True):
        report = lz.explain(function, **arguments, device=device, libraries=libraries)
    return {reason.code for reason in report.reasons(kernel)}


CUDA = [f"{name}.rope{way}" for name in ("flashinfer", "vllm", "liger") for way in ("", "_inplace")]


@at_once("kernel", CUDA)
@at_once("tokens", [(1,), (64,), (2, 512)])
@at_once("positions", [True, False])
def test_a_models_rotation_is_offered_to_every_library(kernel, tokens, positions):
    arguments = call(tokens=tokens)
    arguments["positions"] = arguments["positions"] if positions else None
    assert codes(kernel, arguments) == set()


@pytest.mark.parametrize(
    ("kernel", "changes", "code"),
    [
        ("flashinfer.rope", {"dtype": F32}, ReasonCode.DTYPE_UNSUPPORTED),
        ("flashinfer.rope", {"table": BF16}, ReasonCode.DTYPE_UNSUPPORTED),
        ("flashinfer.rope", {"head_dim": 96, "half": 48}, ReasonCode.HEAD_DIM_INVALID),
        ("flashinfer.rope", {"half": 20}, ReasonCode.CONSTRAINT_FAILED),
        ("vllm.rope", {"table": BF16}, ReasonCode.DTYPE_UNSUPPORTED),
        ("vllm.rope", {"heads": 6, "kv_heads": 4}, ReasonCode.GQA_HEADS_MISMATCH),
        ("liger.rope", {"table": torch.float64}, ReasonCode.CONSTRAINT_FAILED),
    ],
)
def test_what_a_source_does_not_take_is_refused(kernel, changes, code):
    assert codes(kernel, call(**changes)) == {code}


def test_only_vllm_is_offered_interleaved_pairs():
    arguments = call() | {"interleaved": True}
    assert codes("vllm.rope", arguments) == set()
    for kernel in ("flashinfer.rope", "liger.rope"):
        assert codes(kernel, arguments) == {ReasonCode.CONSTRAINT_FAILED}


def test_parts_of_a_projection_go_to_those_that_step_over_strides():
    arguments = call()
    packed = torch.empty(64, 48 * 128, dtype=BF16, device="meta")
    arguments |= {"query": packed[:, :4096].view(64, 32, 128), "key": packed[:, 4096:5120].view(64, 8, 128)}
    for kernel in ("flashinfer.rope_inplace", "vllm.rope_inplace"):
        assert codes(kernel, arguments) == set()
    assert codes("liger.rope_inplace", arguments) == {ReasonCode.NOT_CONTIGUOUS}


needs_vllm = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@needs_vllm
@pytest.mark.parametrize(("head_dim", "half"), [(100, 8), (64, 12), (36, 16)])
def test_half_split_bfloat16_that_would_end_the_process_is_refused(head_dim, half):
    arguments = call((3,), 4, 2, head_dim, half, BF16, BF16, "cpu")
    for kernel in ("vllm.cpu.rope", "vllm.cpu.rope_inplace"):
        assert ReasonCode.HEAD_DIM_ALIGNMENT in codes(kernel, arguments, None, None)
        assert ReasonCode.HEAD_DIM_ALIGNMENT not in codes(kernel, arguments | {"interleaved": True}, None, None)


@needs_vllm
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("way", ["rope", "rope_"])
def test_positions_that_are_stepped_or_shared_are_read_as_they_are(dtype, way):
    torch.manual_seed(0)
    query, key = (torch.randn(3, 5, heads, 64).to(dtype) for heads in (4, 2))
    cos, sin = cos_sin(40, 32, torch.device("cpu"))
    stepped = torch.randint(0, 40, (3, 10))[:, ::2]
    name = "vllm.cpu.rope" if way == "rope" else "vllm.cpu.rope_inplace"
    for positions in (stepped, stepped[0], stepped[:1], stepped.int(), None):
        given = query.clone(), key.clone()
        wanted = rope(query, key, cos, sin, positions=positions)
        with lz.scope(locks={way: name}):
            got = getattr(lz, way)(*given, cos, sin, positions, layout="BSHD") or given
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


class Counted(TorchDispatchMode):
    """Counts torch's operators: on a CPU a decoder's token costs little else."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_one_token_in_place_takes_fewer_operators_than_transformers(dtype):
    query, key = torch.randn(1, 1, 8, 64, dtype=dtype), torch.randn(1, 1, 2, 64, dtype=dtype)
    cos, sin = lz.rope_table(1, 64)
    with lz.scope(locks={"posenc.rope.inplace": "torch.rope_inplace"}):
        plan = lz.bind("rope_", query, key, cos, sin, layout="BSHD").plan
    assert plan.kernel_id == "torch.rope_inplace"
    with torch.no_grad(), Counted() as ours:
        plan.run(query, key, cos, sin, None, False, "BSHD")
    assert ours.count > 2  # and no operator of ours that stands for all
    theirs = 16  # two unsqueezed tables; of query and key: two products, two slices, a negation, a cat, a sum
    assert ours.count <= theirs


def test_one_token_of_many_sequences_shares_a_row_of_the_table():
    query, key = torch.randn(96, 1, 32, 128), torch.randn(96, 1, 8, 128)  # more than a CPU rotates at once
    cos, sin = lz.rope_table(1, 128)
    expected = rope(query, key, cos, sin)
    with lz.scope(locks={"posenc.rope.inplace": "torch.rope_inplace"}):
        lz.rope_(query, key, cos, sin, layout="BSHD")
    torch.testing.assert_close((query, key), expected)
