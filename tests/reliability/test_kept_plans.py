"""What a kept plan may be used for: other ranks, other places in memory, other weights are other calls."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.engine.function_kernels import USER_BACKEND
from layerzero.engine.registry import REGISTRY
from layerzero.ops import OPERATIONS, function_of
from layerzero.ops.calls import accepted, arguments_of

COS, SIN = torch.randn(64, 8), torch.randn(64, 8)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("ranks", [(3, 4), (4, 3)])
def test_a_kernel_of_another_layout_serves_each_rank_as_it_is(ranks):
    reference = REGISTRY.kernel("reference.posenc.rope")

    def load(facts):
        rope = reference.load(facts)

        def heads_first(query, key, *tables, **more):
            rotated = rope(query.transpose(-3, -2), key.transpose(-3, -2), *tables, **more)
            return tuple(each.transpose(-3, -2) for each in rotated)

        return heads_first

    kernel = dataclasses.replace(
        reference, id="user.heads_first", backend=USER_BACKEND, load=load, layout="BHSD", priority=100
    )
    lz.register_backend([kernel])
    for rank in ranks:
        shape = (2, 8, 4, 16)[4 - rank :]
        query, key = torch.randn(shape), torch.randn(shape)
        layout = {"layout": "BSHD"} if rank == 4 else {}
        assert lz.which("rope", query, key, COS, SIN, **layout)["kernel_id"] == "user.heads_first"
        got = lz.rope(query, key, COS, SIN, **layout)
        with lz.scope(deny=["user"]):
            want = lz.rope(query, key, COS, SIN, **layout)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("path")
def test_tensors_that_overlap_are_refused_where_others_were_written_before():
    count = 8 * 4 * 16
    memory = torch.randn(3 * count)

    def at(start):
        return memory[start : start + count].view(1, 8, 4, 16)

    for start in (count, 2 * count):
        lz.rope_(at(0), at(start), COS, SIN, layout="BSHD")
    with pytest.raises(lz.InvalidCallError, match="wanted elements of its own, got memory that it shares"):
        lz.rope_(at(0), at(count // 2), COS, SIN, layout="BSHD")
    projection = torch.randn(1, 8, 6, 16)  # parts of one projection lie in each other's memory and share no element
    for _ in range(2):
        lz.rope_(projection[:, :, :4], projection[:, :, 4:], COS, SIN, layout="BSHD")


@pytest.mark.usefixtures("path")
def test_caches_that_overlap_are_refused_where_others_were_written_before():
    memory = torch.zeros(9, 16, 2, 8)
    new, slots = torch.randn(3, 2, 8), torch.arange(3)
    lz.append_paged_kv_(new, new, memory[:4], memory[4:8], slots)
    with pytest.raises(lz.InvalidCallError, match="value_cache: wanted elements of its own"):
        lz.append_paged_kv_(new, new, memory[:4], memory[1:5], slots)
    pairs = torch.zeros(4, 2, 16, 2, 8)
    for _ in range(2):
        lz.append_paged_kv_(new, new, pairs[:, 0], pairs[:, 1], slots)


def test_a_weight_that_lies_otherwise_in_the_same_memory_is_stale():
    weight = torch.nn.Parameter(torch.randn(64, 64), requires_grad=False)
    packed = lz.PackedWeight(weight)
    weight.data = weight.data.t()
    assert packed.kind_for(weight) == "stale"
    packed.refresh()
    weight.data = weight.data.t()[:32]
    assert packed.kind_for(weight) == "stale"


@pytest.mark.slow
@at_once("name", sorted(OPERATIONS))
def test_debug_mode_looks_at_the_values_of_every_operation(name):
    operation = OPERATIONS[name]
    function = function_of(name)
    case = min(operation.cases, key=lambda each: sum(each.sizes.values()))
    arguments = accepted(function, arguments_of(operation, case, operation.dtypes[0]))
    with lz.scope(debug=True):
        getattr(lz, function.name)(**arguments)
    assert not lz.doctor().resting


def test_an_alignment_that_nothing_tells_is_refused_where_it_is_declared():
    with pytest.raises(
        lz.RegistrationError, match="aligned: wanted at most 8 bytes of positions, which may be int64, got 16"
    ):
        lz.register_kernel("posenc.rope", "user.aligned", limits=[lz.limits.aligned(16, "positions")])(
            lambda query, key, cos, sin: None
        )
