"""Soundness of reuse: a kept plan serves a call only where choosing anew would allow the same, with the same result."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reading import READINGS, evaluate, reading_kernel
from torch.nn import Parameter

import layerzero as lz
from drawing import at_once, examples
from layerzero.core import indices, limits
from layerzero.core.evidence import Measurement
from layerzero.core.facts import TensorFacts
from layerzero.core.kernel import Kernel
from layerzero.core.reuse_conditions import SizedCall
from layerzero.engine import health, legality, plan_source
from layerzero.engine.cache import InClass
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.function_kernels import USER_BACKEND
from layerzero.engine.functions import CALLS
from layerzero.engine.jit import BUILT
from layerzero.engine.reference import as_tuple
from layerzero.testing import check, expected, random_call
from layerzero.testing.compare import copied
from layerzero.testing.generate import FUNCTIONS, RandomCall, case_call
from paths import IN_C

pytestmark = [pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning"), pytest.mark.usefixtures("path")]

SHARING = sorted(name for name, each in FUNCTIONS.items() if not any(of.is_collective for of in each.operations))
"""Functions whose plans serve other sizes, and calls with gradients: what ranks compute together does neither."""

EXAMPLES = settings(
    max_examples=examples(400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def on_tensors(call, change):
    arguments = {n: change(t) if isinstance(t, torch.Tensor) else t for n, t in call.arguments.items()}
    return RandomCall(call.function, with_its_step(arguments), call.name)


STARTS = ("cu_seqlens_q", "cu_seqlens_k")


def with_its_step(arguments):
    """A step or pattern belongs to the tensors that it was made of; each call has its own."""
    step = arguments.get("step")
    if arguments.get("block_indptr") is not None:  # it ends with the blocks: what is beyond is left out
        both = arguments["block_indptr"].detach().clamp(max=len(arguments["block_indices"])), arguments["block_indices"]
        arguments |= {"block_indptr": both[0], "block_indices": both[1].detach()}
        if arguments.get("block_pattern") is not None:
            arguments["block_pattern"] = lz.BlockPattern(arguments["block_indptr"], arguments["block_indices"])
    for name, tokens in (("row_sizes", "query"), ("col_sizes", "key")):
        if arguments.get(name) is None or not arguments[name].shape[1]:
            continue
        count, ends = len(arguments[tokens]), arguments[name].cumsum(1)
        if not (ends[:, -1] == count).all():  # sizes of blocks sum up to the tokens
            ends = ends.clamp(max=count)
            ends[:, -1] = count
            arguments[name] = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1])).to(arguments[name].dtype)
    if step is not None:
        names = ("block_tables", "context_lens", *STARTS)
        arguments |= {name: arguments[name].detach() for name in names if arguments.get(name) is not None}
        if isinstance(step, lz.RaggedMetadata):
            arguments["step"] = lz.RaggedMetadata(*(arguments[name] for name in STARTS), capturable=step.capturable)
        else:
            tables = arguments["block_tables"], arguments["context_lens"]
            starts = arguments.get("cu_seqlens_q")
            arguments["step"] = lz.StepMetadata(*tables, cu_seqlens_q=starts, capturable=step.capturable)
    return arguments


def with_its_starts(arguments):
    """Starts belong to as many sequences as there are tables, and end with the tokens: what is beyond is left out."""
    if arguments.get("cu_seqlens_q") is None:
        return arguments
    starts = [name for name in STARTS if arguments.get(name) is not None]
    count = min(len(arguments[name]) for name in starts)
    tables = [name for name in ("block_tables", "context_lens") if name in arguments]
    count = min([count, *(len(arguments[name]) + 1 for name in tables)])
    slopes = arguments.get("alibi_slopes")
    if slopes is not None and slopes.ndim == 2:
        arguments["alibi_slopes"] = slopes[: count - 1]
    arguments |= {name: arguments[name][: count - 1] for name in tables}
    for name, tokens in zip(STARTS, (("query",), ("key", "value")), strict=True):
        if name in starts:
            kept = arguments[name][:count]
            arguments |= {each: arguments[each][: int(kept[-1])] for each in tokens}
            least = min(len(arguments[each]) for each in tokens)
            arguments[name] = kept.clamp(max=least)
    if arguments.get("decodes") is not None:
        queries = arguments["cu_seqlens_q"].diff().tolist()
        alone = next((place for place, each in enumerate(queries) if each != 1), len(queries))
        arguments["decodes"] = min(arguments["decodes"], alone) or None
    return arguments


def moved(offset_bytes):
    """The same strides in a copy of the memory that starts at another address; one element further where None."""

    def change(tensor):
        step = offset_bytes or tensor.element_size()
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        room = torch.cat((memory.new_zeros(step), memory)).untyped_storage()
        start = tensor.storage_offset() + step // tensor.element_size()
        copy = torch.empty(0, dtype=tensor.dtype).set_(room, start, tensor.shape, tensor.stride())
        return torch._neg_view(copy) if tensor.is_neg() else copy

    return change


def loose(tensor):
    """Other strides where an axis has one element: other numbers, the same memory."""
    strides = [stride + 3 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset()) if not tensor.is_neg() else tensor


def resized(call, pick, dense):
    """The same call with one of the axes that may vary made shorter, within the class of its size where that can be."""
    dispatcher = CALLS[call.function].dispatcher
    report, _ = dispatcher.explain(dispatcher.function.bind((), call.arguments), current_policy())
    sized = SizedCall(report.facts, None, dispatcher.order, frozenset(report.varies))
    axes = {name: sized.axes(name) for name in report.facts.tensors}
    there = {axis for each in axes.values() for axis in each} & set(report.varies)
    written = call.function in ("append_paged_kv_", "copy_kv_blocks_")  # where a page that is named twice is an error
    there = sorted(there - ({"pages"} if written else set()))
    if not there:
        return call
    axis = there[pick % len(there)]
    arguments = dict(call.arguments)
    for name, names in axes.items():
        if axis in names and report.facts.tensors[name].shape[names.index(axis)] > 1:
            tensor, place = arguments[name], names.index(axis)
            size = tensor.shape[place]
            shorter = tensor.narrow(place, 0, max((1 << size.bit_length()) // 2, size - 1 - pick % 3))
            arguments[name] = shorter.contiguous() if dense else shorter
    for rule in indices.rules_of(report.facts.operation.schema, report.facts.layout, report.facts.tensors):
        name = rule.tensor.name  # nothing leads to what is not there any more
        most = math.prod(arguments[of].shape[place] for of, place in rule.sizes) - bool(rule.tensor.indexes)
        if rule.tensor.distinct and rule.tensor.holes:  # two at the last place would be an error
            arguments[name] = arguments[name].masked_fill(arguments[name] > most, -1)
        else:
            arguments[name] = arguments[name].clamp(max=most)
    arguments = with_its_step(with_its_starts(arguments))
    if isinstance(arguments.get("tree_mask"), torch.Tensor):  # a row for each query that is left
        arguments["tree_mask"] = arguments["tree_mask"][: len(arguments["query"])]
    return RandomCall(call.function, arguments, call.name)


def padded(elements):
    """Rows so many elements further apart: other strides of one class."""

    def change(tensor):
        if not tensor.dim():
            return tensor
        rows = tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] + elements))
        return rows[..., : tensor.shape[-1]].copy_(tensor.detach())

    return change


def asking_for_gradients(call):
    """Gradients of every tensor; of those that are written into, autograd wants a copy that it made itself."""
    asked = on_tensors(call, lambda tensor: tensor.detach().clone().requires_grad_(tensor.is_floating_point()))
    for name in CALLS[call.function].function.mutates:
        asked.arguments[name] = asked.arguments[name].clone()
    return asked


def as_parameter(tensor):
    return Parameter(tensor, requires_grad=False) if tensor.is_floating_point() and not tensor.is_neg() else tensor


CHANGES = {
    "nothing": lambda call: call,
    "moved by 16 bytes": lambda call: on_tensors(call, moved(16)),
    "moved by one element": lambda call: on_tensors(call, moved(None)),
    "loose strides": lambda call: on_tensors(call, loose),
    "contiguous": lambda call: on_tensors(call, lambda tensor: tensor.contiguous()),
    "gradients": asking_for_gradients,
    "parameters": lambda call: on_tensors(call, as_parameter),
    "defaults spelled out": lambda call: RandomCall(
        call.function,
        {k: v for k, v in CALLS[call.function].function.bind((), call.arguments).items() if k != "causal"}
        | ({"causal": call.arguments.get("causal", True)} if call.function == "attention" else {}),
    ),
}


@st.composite
def pairs(draw):
    """Two calls: the same one with other data and, mostly, one change; or two that are drawn apart."""
    function = draw(st.sampled_from(SHARING))
    number = draw(st.integers(0, 100_000))
    first = random_call(2, number, function=function)
    if draw(st.integers(0, 9)) == 0:
        return first, random_call(2, draw(st.integers(0, 100_000)), function=function)
    second = random_call(2, number, function=function, data=draw(st.integers(1, 3)))
    if draw(st.integers(0, 2)) == 0:
        return first, resized(second, draw(st.integers(0, 11)), draw(st.booleans()))
    return first, CHANGES[draw(st.sampled_from(sorted(CHANGES)))](second)


def table(call):
    return CALLS[call.function].dispatcher.cache.table(current_policy())


def arguments_of(call):
    """Arguments of which a call may write into those that it writes into."""
    mutated = CALLS[call.function].function.mutates
    return {
        name: _fresh(value) if name in mutated or isinstance(value, torch.Generator) else value
        for name, value in call.arguments.items()
    }


def _fresh(value):
    """A copy to write into, which asks for gradients where the tensor does and is no leaf then, either."""
    asks = isinstance(value, torch.Tensor) and value.requires_grad and value.dtype.itemsize > 1  # float8 has no product
    return value * 1 if asks else copied(value)


def run(call):
    """Results, and everything the call wrote into."""
    torch.manual_seed(0)  # what is drawn without a seed is drawn again
    mutated, arguments = CALLS[call.function].function.mutates, arguments_of(call)
    result = getattr(lz, call.function)(**arguments)
    return [*as_tuple(result), *(arguments[name] for name in mutated)]


def plan_that_served(call):
    """Run a call; the kept plan that it used, None if it was chosen anew."""
    for plan in table(call).values():
        plan.used = False
    before = set(table(call))
    results = run(call)
    used = [plan for key, plan in table(call).items() if plan.used and key in before]
    assert len(used) <= 1
    return results, used[0] if used else None


def violations(plan, call):
    """What the plan's kernel finds wrong with the tensors that the plan makes of this call's own."""
    dispatcher = CALLS[call.function].dispatcher
    arguments = dispatcher.function.bind((), call.arguments)
    report, _ = dispatcher.explain(arguments, current_policy())
    adapted = plan_source.adapted_tensors(plan, arguments)
    tensors = {name: TensorFacts.of(tensor) for name, tensor in adapted.items() if name in report.facts.tensors}
    facts = report.facts.seen_in(plan.kernel.layout).with_tensors(tensors)
    made_good = {each.argument for each in plan.adaptations if each.kind in ("expand", "fold")}
    found = legality.limit_findings(plan.kernel, facts)
    found = [each.reason for each in found if each.repair is None or each.repair.argument not in made_good]
    candidate = next(each for each in report.candidates if each.kernel is plan.kernel)
    return [*found, *candidate.reasons, *(["adaptations"] if candidate.adaptations != plan.adaptations else [])]


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
    arguments.pop("step", None)  # which is of the whole tables
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


# Policies: three right kernels that write down that they ran.


SPIES = ("spy.first", "spy.second", "spy.third")


@pytest.fixture
def ran(monkeypatch):
    """Ids of the kernels that ran, latest last; one that failed rests, however long a busy machine takes."""
    monkeypatch.setattr(health, "FIRST_RETRY_S", 3600.0)
    names = []

    def spy(name, deterministic):
        def load(facts):
            def kernel(input, weight, *, eps):
                names.append(name)
                return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

            return kernel

        backend = dataclasses.replace(USER_BACKEND, name=name.split(".")[1])
        priority = {"spy.first": 90, "spy.second": 85, "spy.third": 80}[name]
        return Kernel(
            id=name,
            operations=("norm.rms",),
            backend=backend,
            load=load,
            accepts=("eps",),
            priority=priority,
            deterministic=deterministic,
            grad=True,
        )

    lz.register_backend([spy("spy.first", False), spy("spy.second", True), spy("spy.third", True)])
    return names


X, W = torch.ones(2, 8), torch.ones(8)

STEPS = st.one_of(
    st.tuples(
        st.just("configure"),
        st.sampled_from(["prefer_sources", "avoid_sources", "deny", "allow"]),
        st.sampled_from([[], ["second"], ["spy.third"], ["spy.f*"], ["spy.*"], ["torch"]]),
    ),
    st.tuples(st.just("lock"), st.sampled_from(["norm.rms", "rms_norm", "norm.*"]), st.sampled_from(SPIES)),
    st.tuples(st.just("unlock"), st.just(""), st.just("")),
    st.tuples(st.just("rule"), st.sampled_from([2, 3]), st.sampled_from(SPIES)),
    st.tuples(
        st.just("enter"),
        st.sampled_from(["prefer_sources", "deny", "avoid_sources"]),
        st.sampled_from([["spy.third"], ["spy.second"], ["spy.first"]]),
    ),
    st.tuples(st.just("enter"), st.just("deterministic"), st.booleans()),
    st.tuples(st.just("enter"), st.just("enabled"), st.booleans()),
    st.tuples(st.just("leave"), st.just(""), st.just("")),
    st.tuples(st.just("torch_deterministic"), st.just(""), st.booleans()),
    st.tuples(st.just("time"), st.sampled_from(SPIES), st.sampled_from([1.0, 10.0, 100.0])),
    st.tuples(st.just("fail"), st.sampled_from(SPIES), st.just("")),
    st.tuples(st.just("recover"), st.just(""), st.just("")),
    st.tuples(st.just("nothing"), st.just(""), st.just("")),
)


def take(step, scopes, stack):
    kind, name, value = step
    if kind == "configure":
        lz.configure(**{name: value})
    elif kind == "lock":
        lz.lock(name, value, otherwise="select")
    elif kind == "unlock":
        lz.configure(locks=None)
    elif kind == "rule":
        lz.configure(rules=[{"match": {"rows": f"<{name}"}, "prefer": value}])
    elif kind == "enter":
        scopes.append(stack.enter_context(contextlib.ExitStack()))
        scopes[-1].enter_context(lz.scope(**{name: value}))
    elif kind == "leave" and scopes:
        scopes.pop().close()
    elif kind == "torch_deterministic":
        torch.use_deterministic_algorithms(value)
    elif kind == "time":
        ENGINE.ledger.record_time(kernel_named(name), lz.facts("rms_norm", X, W), Measurement(value, value, 0.0, 1))
        ENGINE.bump()  # what a tuning window does when the winner changes
    elif kind == "fail":
        ENGINE.health.failed(kernel_named(name), "norm.rms", RuntimeError("planted"))
    elif kind == "recover":
        ENGINE.health.reset()


def kernel_named(kernel_id):
    return next(kernel for kernel in lz.list_kernels("norm.rms") if kernel.id == kernel_id)


@IN_C
@settings(EXAMPLES, max_examples=examples(250))
@given(steps=st.lists(STEPS, min_size=3, max_size=15))
def test_no_change_of_policy_is_served_by_a_stale_choice(ran, steps):
    forget()
    try:
        with contextlib.ExitStack() as stack:
            scopes = []
            for step in steps:
                take(step, scopes, stack)
                for _ in range(2):  # the second is a hit
                    ran.clear()
                    lz.rms_norm(X, W)
                    wanted = lz.which("rms_norm", X, W)["kernel_id"]
                    assert ran == ([wanted] if wanted.startswith("spy.") else [])
            while scopes:
                scopes.pop().close()
    finally:
        forget()


def forget():
    torch.use_deterministic_algorithms(False)
    ENGINE.ledger = type(ENGINE.ledger)()
    ENGINE.health.reset()
    lz.configure(prefer_sources=None, avoid_sources=None, deny=None, allow=None, locks=None, rules=None)


def test_registering_and_removing_a_kernel_empties_the_table(ran):
    lz.rms_norm(X, W)
    lz.unregister_kernel("spy.first")
    lz.rms_norm(X, W)
    lz.register_kernel("norm.rms", "user.best", priority=100)(lambda x, w, *, eps: ran.append("user.best") or x)
    lz.rms_norm(X, W)
    assert ran == ["spy.first", "spy.second", "user.best"]


def test_a_plan_chosen_before_a_change_is_not_kept_after_it(ran):
    def load(facts):
        lz.unregister_kernel("user.slow")  # as another thread may while this one chooses
        return lambda x, w, *, eps: ran.append("user.slow") or x

    slow = {"operations": ("norm.rms",), "backend": USER_BACKEND, "accepts": ("eps",), "priority": 100}
    lz.register_backend([Kernel(id="user.slow", load=load, **slow)])
    lz.rms_norm(X, W)  # chosen while it was there
    assert not CALLS["rms_norm"].dispatcher.cache.current
    lz.rms_norm(X, W)
    assert ran == ["user.slow", "spy.first"]


def test_a_scope_leaves_the_plans_outside_it_alone(ran):
    lz.rms_norm(X, W)
    kept = dict(CALLS["rms_norm"].dispatcher.cache.current)
    with lz.prefer("spy.third"):
        lz.rms_norm(X, W)
    with lz.prefer("spy.third"):
        assert len(table(RandomCall("rms_norm", {}))) == 1  # an equal scope finds its table again
        lz.rms_norm(X, W)
    lz.rms_norm(X, W)
    assert CALLS["rms_norm"].dispatcher.cache.current == kept
    assert ran == ["spy.first", "spy.third", "spy.third", "spy.first"]


# Eviction


@settings(EXAMPLES, max_examples=40)
@given(st.integers(0, 12), st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_a_table_never_grows_beyond_its_bound(bound, rows):
    lz.configure(**{"cache.max_size": bound})
    for count in rows:
        result = lz.rms_norm(torch.full((4, count), 2.0), torch.ones(count))  # each length of a row has its own plan
        assert result.shape == (4, count)
        assert CALLS["rms_norm"].dispatcher.cache.size() <= bound
    if bound:
        assert CALLS["rms_norm"].dispatcher.cache.size() >= min(bound, len(set(rows))) // 2


def test_what_is_used_outlives_what_is_not():
    lz.configure(**{"cache.max_size": 16})
    weight = torch.ones(4)
    often = torch.ones(1, 4)
    lz.rms_norm(often, weight)
    for count in range(5, 100):
        lz.rms_norm(torch.ones(2, count), torch.ones(count))
        _, plan = plan_that_served(RandomCall("rms_norm", {"input": often, "weight": weight}))
        assert plan is not None


def test_truth_does_not_depend_on_what_is_kept():
    call = random_call(5, 3, function="attention")
    first = expected(call)
    run(call)
    for mine, theirs in zip(first.results, expected(call).results, strict=True):
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def test_what_is_judged_again_has_its_tensors_in_the_order_of_the_facts():
    """The plan names a call's tensors as the function does, facts as the operation does; a limit may read the order."""
    call = random_call(2, 5, function="verify_speculative")
    facts = lz.facts(call.function, **arguments_of(call))
    backwards = dict(reversed(facts.tensors.items()))
    assert list(facts.with_tensors(backwards).tensors) == list(facts.tensors) != list(backwards)
