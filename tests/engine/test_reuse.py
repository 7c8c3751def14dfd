"""Soundness of reuse: a kept plan serves a call only where choosing anew would allow the same, with the same result."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import READINGS, evaluate, reading_kernel
from reused_calls import (
    EXAMPLES,
    SHARING,
    arguments_of,
    moved,
    on_tensors,
    padded,
    pairs,
    plan_that_served,
    resized,
    run,
    table,
    violations,
)

import layerzero as lz
from drawing import at_once, examples
from layerzero.core import limits
from layerzero.engine.cache import InClass
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.function_kernels import USER_BACKEND
from layerzero.engine.functions import CALLS
from layerzero.engine.jit import BUILT
from layerzero.testing import check, random_call
from layerzero.testing.generate import FUNCTIONS, RandomCall, case_call
from paths import IN_C

pytestmark = [
    pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning"),
    pytest.mark.usefixtures("path", "one_thread"),
]


@IN_C
@EXAMPLES
@given(pairs())
def test_a_reused_plan_is_legal_for_the_call_that_reuses_it(pair):
    first, second = pair
    ENGINE.bump()
    run(first)
    results, plan = plan_that_served(second)
    if plan is None:
        return
    assert violations(plan, second) == []
    serves_its_class = any(isinstance(key, InClass) for key, each in table(second).items() if each is plan)
    ENGINE.bump()
    again, other = plan_that_served(second)
    assert other is None
    chosen = next(iter(table(second).values()))
    if serves_its_class and chosen.kernel is not plan.kernel:  # another size may be better served by another kernel
        assert check(second) == []
        return
    assert chosen.kernel is plan.kernel
    assert chosen.source == plan.source
    for hit, miss in zip(results, again, strict=True):
        assert hit.dtype == miss.dtype
        assert torch.equal(hit.isnan(), miss.isnan())
        wide = torch.float32 if hit.dtype.itemsize == 1 else hit.dtype  # float8 can do little
        assert torch.equal(hit.to(wide).nan_to_num(), miss.to(wide).nan_to_num())


@IN_C
@EXAMPLES
@given(st.integers(0, 100_000), st.sampled_from(sorted(FUNCTIONS)))
def test_the_same_call_with_other_data_hits_and_is_right(number, function):
    first, second = random_call(4, number, function=function), random_call(4, number, function=function, data=1)
    if "max_context_len" in first.arguments:  # which follows from the data
        second.arguments["max_context_len"] = max(each.arguments["max_context_len"] for each in (first, second))
        first.arguments["max_context_len"] = second.arguments["max_context_len"]
    run(first)  # the first cache that has a layout starts an epoch
    ENGINE.bump()
    run(first)
    assert len(table(first)) == 1
    assert check(second) == []
    assert len(table(second)) == 1


@at_once("function, operation", [
    (name, operation) for name, function in FUNCTIONS.items() for operation in function.operations
])  # fmt: skip
def test_a_plain_call_of_every_operation_makes_a_key(function, operation):
    """What another operation of the function must bring is left out here: that is a value like any other."""
    given = case_call(operation, operation.cases[0], torch.float32).arguments
    assert CALLS[function].key_of(*CALLS[function].function.bind((), given).values()) is not None


@st.composite
def misfits(draw):
    """A call, and the same one with an axis shorter, within its class, in some tensors alone: mostly a mistake."""
    function, number = draw(st.sampled_from(sorted(FUNCTIONS))), draw(st.integers(0, 100_000))
    first, second = (random_call(5, number, function=function, data=data) for data in (0, 1))
    tensors = {name: value for name, value in second.arguments.items() if isinstance(value, torch.Tensor)}
    sizes = sorted({size for tensor in tensors.values() for size in tensor.shape if size & (size - 1)})
    if not sizes:
        return first, second
    size, whole, dense = draw(st.sampled_from(sizes)), draw(st.sampled_from(sorted(tensors))), draw(st.booleans())
    arguments = dict(second.arguments)
    for name, tensor in tensors.items():
        if size in tensor.shape and name != whole:
            shorter = tensor.narrow(tensor.shape.index(size), 0, size - 1)
            arguments[name] = shorter.contiguous() if dense else shorter
    for name in ("step", "cache_list"):  # which are of the whole tensors
        arguments.pop(name, None)
    return first, RandomCall(second.function, arguments, second.name)


@IN_C
@EXAMPLES
@given(misfits())
def test_a_kept_plan_lets_no_mistake_pass(pair):
    first, second = pair
    ENGINE.bump()
    run(first)
    call = CALLS[second.function]
    with contextlib.suppress(lz.InvalidCallError):
        call.function.route(call.function.bind((), arguments_of(second)), current_policy().layout)
        return
    with pytest.raises(lz.InvalidCallError):
        run(second)


@st.composite
def readers(draw):
    """Two calls of one class, mostly of other sizes, and what a kernel for the first reads: rarely in all its parts."""
    function, number = draw(st.sampled_from(sorted(FUNCTIONS))), draw(st.integers(0, 100_000))
    first, second = (random_call(2, number, function=function, data=data) for data in (0, 1))
    apart = st.sampled_from((0, 32, 64, 96))
    told = "layout" in first.arguments or function != "attention"  # strides tell a layout that nobody names
    if told and draw(st.booleans()):
        first, second = on_tensors(first, padded(draw(apart))), on_tensors(second, padded(draw(apart)))
    if draw(st.integers(0, 3)):
        second = resized(second, draw(st.integers(0, 11)), draw(st.booleans()))
    part = draw(st.sampled_from(["load", "limit", "limit", "build_key", "all"]))
    return (
        first,
        second,
        {each: draw(READINGS) if part in (each, "all") else [] for each in ("load", "limit", "build_key")},
    )


@pytest.mark.slow
@IN_C
@settings(EXAMPLES, max_examples=examples(800))
@given(readers())
def test_a_plan_serves_calls_that_agree_in_what_was_read(drawn):
    """Whatever a kernel reads, where it loads, in its limit and for its artefact, and in whichever branch."""
    first, second, reads = drawn
    try:
        run(second)
    except lz.InvalidCallError:  # what was cut off may have been needed: rows of a table, weights above 0
        return
    facts = [lz.facts(call.function, **arguments_of(call)) for call in (first, second)]
    kernel = reading_kernel(facts[0].operation.name, **reads)
    lz.register_backend([kernel])
    try:
        if kernel.jit:
            BUILT.add(kernel, facts[0])
        run(first)
        _, plan = plan_that_served(second)
        if plan is None or plan.kernel is not kernel:
            return
        assert violations(plan, second) == []
        loaded_for, now = (each.seen_in(kernel.layout) for each in (plan.report.facts, facts[1]))
        assert evaluate(reads["load"], loaded_for) == evaluate(reads["load"], now)
        assert check(second) == []
    finally:
        lz.unregister_kernel(kernel.id)
        BUILT.clear()


@st.composite
def masked(draw):
    """Two calls of attention with a mask of any shape: of other data, of other sizes, or with one axis for all."""
    number = draw(st.integers(0, 100_000))
    while "attn_mask" not in random_call(6, number, function="attention").arguments:
        number += 1
    first, second = (random_call(6, number, function="attention", data=data) for data in (0, 1))
    for call in (first, second):
        call.arguments.setdefault("layout", lz.facts("attention", **call.arguments).layout)
    mask = second.arguments["attn_mask"]
    kind = draw(st.integers(0, 5))
    if kind == 0 and mask.ndim:  # one element for all of an axis
        axis = draw(st.integers(0, mask.ndim - 1))
        second.arguments["attn_mask"] = mask.narrow(axis, 0, min(1, mask.shape[axis]))
    elif kind == 1:  # the same numbers, one for all of what they broadcast to
        second.arguments["attn_mask"] = mask[(None,) * (4 - mask.ndim)]
    else:
        second = resized(second, draw(st.integers(0, 11)), draw(st.booleans()))
    return first, second


@IN_C
@settings(EXAMPLES, max_examples=examples(300))
@given(masked())
def test_a_plan_of_a_masked_call_serves_no_call_that_it_would_not_be_chosen_for(pair):
    first, second = pair
    ENGINE.bump()
    run(first)
    _, plan = plan_that_served(second)
    if plan is not None:
        assert violations(plan, second) == []
        assert check(second) == []


MASKS = {
    "of keys": lambda keys: (1, 1, 1, keys),
    "of each sequence": lambda keys: (2, 1, 4, keys),
    "of each head": lambda keys: (2, 4, 4, keys),
    "without a batch": lambda keys: (4, keys),
}


@IN_C
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_a_mask_over_keys_that_grow_is_chosen_for_once_for_each_alignment_of_its_rows(shape, dtype):
    query, chosen = torch.randn(2, 4, 4, 16), 0
    ENGINE.bump()
    for keys in range(65, 128):
        key = torch.randn(2, 1, keys, 16)
        mask = (torch.rand(shape(keys)) < 0.9).to(dtype)
        mask[..., 0] = 1
        call = RandomCall("attention", {"query": query, "key": key, "value": key, "layout": "BHSD", "attn_mask": mask})
        _, plan = plan_that_served(call)
        chosen += plan is None
        assert check(call) == []
    assert chosen <= 5  # rows start at a multiple of 1, 2, 4, 8 or 16 bytes


@IN_C
def test_masks_for_all_of_an_axis_and_for_each_of_it_are_told_apart():
    def served(batch, of_mask):
        key, mask = torch.randn(batch, 20, 1, 16), torch.zeros(of_mask, 1, 4, 20)
        given = {"query": torch.randn(batch, 4, 2, 16), "key": key, "value": key, "attn_mask": mask}
        return plan_that_served(RandomCall("attention", {**given, "layout": "BSHD"}))[1] is not None

    ENGINE.bump()
    assert [served(5, 1), served(6, 1), served(5, 5), served(6, 6)] == [False, True, False, True]
    with pytest.raises(lz.InvalidCallError, match="attn_mask"):
        served(6, 5)


def test_a_kernel_that_reads_how_a_made_mask_lies_shares_no_plan_of_one():
    """The mask that a plan makes lies as its sizes say: here one size passes the limit, another does not."""
    kernel = next(each for each in lz.list_kernels("attention.gqa.prefill") if each.id == "torch.sdpa.cpu_flash")
    limit = limits.Custom("even rows", lambda facts: facts.tensors["attn_mask"].row_alignment_bytes and None)
    own = dataclasses.replace(
        kernel, id="user.reads_mask", backend=USER_BACKEND, priority=99, limits=(*kernel.limits, limit), aliases=()
    )
    lz.register_backend([own])
    try:
        served = []
        for keys in (65, 66, 67):
            key, mask = torch.randn(1, 1, keys, 16), torch.ones(1, 1, 4, keys, dtype=torch.bool)
            tensors = {"query": torch.randn(1, 4, 4, 16), "key": key, "value": key, "attn_mask": mask}
            _, plan = plan_that_served(RandomCall("attention", {**tensors, "layout": "BHSD"}))
            served.append(plan)
        assert lz.which("attention", *list(tensors.values())[:3], layout="BHSD", attn_mask=mask)["kernel_id"] == own.id
        assert served == [None] * 3
    finally:
        lz.unregister_kernel(own.id)


@dataclasses.dataclass
class Reading:
    """A rule of an author, which has no hash."""

    part: str

    def __call__(self, facts):
        getattr(facts.tensors["query"], self.part)


@pytest.mark.parametrize("reads", ["dtype", "strides"])
def test_a_plan_that_copies_serves_other_sizes_unless_a_limit_reads_how_the_copy_lies(reads):
    """Each length of a prompt chose anew, which took longer than the kernel; what is not copied stays dense."""
    kernel = next(each for each in lz.list_kernels("attention.gqa.prefill") if each.id == "torch.sdpa.cpu_flash")
    seen = limits.Custom("reads it", Reading(reads))
    more = (limits.Contiguous(("query", "key")), seen)
    own = dataclasses.replace(
        kernel, id="user.copies", backend=USER_BACKEND, priority=99, limits=(*kernel.limits, *more), aliases=()
    )
    lz.register_backend([own])
    served = []
    try:
        for tokens, dense_key in ((65, True), (100, True), (70, False)):
            query, key = torch.randn(1, tokens, 4, 16).transpose(1, 2), torch.randn(1, 2, tokens, 16)
            key = key if dense_key else key.transpose(1, 2).contiguous().transpose(1, 2)
            call = RandomCall("attention", {"query": query, "key": key, "value": key, "layout": "BHSD"})
            served.append(plan_that_served(call)[1] is not None)
            assert lz.which("attention", query, key, key, layout="BHSD")["kernel_id"] == own.id
    finally:
        lz.unregister_kernel(own.id)
    assert served == [False, reads == "dtype", False]


@pytest.mark.parametrize("setting", ["deterministic", "batch_invariant"])
def test_a_flag_that_reads_sizes_is_asked_for_each(setting):
    """What was declared for 33 rows served 50, and what was judged of 33 held for 300."""
    kernel = next(each for each in lz.list_kernels("rms_norm") if each.id == "torch.rms_norm")
    served: list[int] = []

    def load(facts):
        run = kernel.load(facts)
        return lambda rows, *rest, **more: (served.append(len(rows)), run(rows, *rest, **more))[1]

    flags = {setting: lambda facts: facts.size("rows") < 40}
    own = dataclasses.replace(
        kernel, id="user.short", backend=USER_BACKEND, priority=99, aliases=(), load=load, **flags
    )
    lz.register_backend([own])
    try:
        with lz.scope(**{setting: True}):
            for rows in (33, 50, 300):
                lz.rms_norm(torch.randn(rows, 64), torch.ones(64))
    finally:
        lz.unregister_kernel(own.id)
    assert served == [33]


def test_most_changes_of_memory_are_told_apart():
    """The property above is empty if nothing hits; this counts that both happen."""
    hits = 0
    for number in range(60):
        ENGINE.bump()
        run(random_call(2, number, function="attention"))
        _, plan = plan_that_served(random_call(2, number, function="attention", data=1))
        hits += plan is not None
    assert hits == 60
    q = torch.randn(1, 8, 2, 16)
    lz.attention(q, q, q, layout="BSHD")
    for other in (q[:, :7], q.bfloat16(), q.transpose(1, 2), moved(None)(q), q.requires_grad_()):
        _, plan = plan_that_served(
            RandomCall("attention", {"query": other, "key": other, "value": other, "layout": "BSHD"})
        )
        assert plan is None


@IN_C
def test_most_changes_of_size_within_a_class_are_served():
    """The property above is empty of size classes if they are never shared; this counts that they are."""
    served, enough = dict.fromkeys(SHARING, 0), examples(8)
    for function in served:
        for number in range(160):
            first = random_call(7, number, function=function)
            second = resized(random_call(7, number, function=function, data=1), number, dense=bool(number % 2))
            shapes = [
                [t.shape for t in call.arguments.values() if isinstance(t, torch.Tensor)] for call in (first, second)
            ]
            if shapes[0] == shapes[1]:
                continue
            ENGINE.bump()
            run(first)
            _, plan = plan_that_served(second)
            if plan is not None:
                served[function] += 1
                assert violations(plan, second) == []
                assert check(second) == []
            if served[function] == enough:
                break
    assert {name: count for name, count in served.items() if count < enough} == {}


def test_a_table_that_ends_with_each_prompt_serves_other_prompts_of_its_class():
    """Models slice the table for each prompt: without this each new length chose anew."""

    def served(tokens, rows):
        cos = torch.randn(rows, 8)
        given = {"query": torch.randn(1, tokens, 4, 16), "key": torch.randn(1, tokens, 2, 16), "cos": cos, "sin": cos}
        return plan_that_served(RandomCall("rope_", given | {"layout": "BSHD"}))[1] is not None

    ENGINE.bump()
    assert [served(33, 33), served(40, 40), served(40, 41), served(41, 64)] == [False, True, False, False]
    with pytest.raises(lz.InvalidCallError, match=r"cos|table"):
        served(41, 40)
    ENGINE.bump()
    assert [served(40, 64), served(41, 64), served(50, 50)] == [False, True, False]
