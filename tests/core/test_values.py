"""Values are looked at where they lie: one read of a device for all rules of a call, and the words of a host's look."""

from __future__ import annotations

import inspect
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import examples
from layerzero.core import indices, values
from layerzero.core.values import Check
from layerzero.ops import OPERATIONS, function_of
from layerzero.ops.calls import accepted, arguments_of
from layerzero.ops.paged import tree
from layerzero.ops.ragged import starts as ragged
from reads import Reads

LOOKED_AT = sorted(
    name
    for name, each in OPERATIONS.items()
    if each.schema.inputs and (each.check_values or any(tensor.required for tensor in each.schema.indexed))
)
"""Operations with places, counts or rules of their own."""


def places_of(shape):
    return list(itertools.product(*map(range, shape)))


def counted(look, *given):
    with Reads() as reads:
        found = look(*given)
    return found, len(reads.names)


@pytest.mark.parametrize("read", [
    lambda x: x.tolist(), lambda x: x[0].item(), lambda x: bool(x[0]), lambda x: x.nonzero(), lambda x: x[x > 0],
    lambda x: int(x[0]), lambda x: x.cpu(), lambda x: torch.unique(x), lambda x: x.to("cpu"),
    lambda x: ragged.value_problems("cu_seqlens_q", x.int(), 3),
])  # fmt: skip
def test_what_brings_values_to_the_host_is_counted(read):
    assert counted(read, torch.tensor([0, 3]))[1]


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_the_first_wrong_places_are_told(data):
    """Of checks of any shape, in order, up to as many as each tells, and none that stands behind another mistake."""
    checks, wanted = [], []
    for number in range(data.draw(st.integers(0, 4))):
        shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
        size = math.prod(shape)
        wrong = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
        numbers = data.draw(st.lists(st.integers(-(2**40), 2**40), min_size=2 * size, max_size=2 * size))
        most, alone = data.draw(st.integers(1, 9)), data.draw(st.booleans())
        told = torch.tensor(numbers, dtype=torch.int64).view(*shape, 2)
        form = data.draw(st.sampled_from(["tensor", "asked", "none"]))
        given = {"tensor": told, "asked": lambda at, told=told: told.reshape(-1, 2)[at], "none": None}[form]

        def say(place, got, number=number):
            return f"{number} at {place}: {got}"

        checks.append(Check(torch.tensor(wrong, dtype=torch.bool).view(shape), given, say, most, alone))
        texts = [
            say(place, tuple(numbers[2 * at : 2 * at + 2]) if form != "none" else ())
            for at, place in enumerate(places_of(shape))
            if wrong[at]
        ]
        wanted += [] if alone and wanted else texts[:most]
        if data.draw(st.booleans()):
            checks.append(f"known before {number}")
            wanted.append(checks[-1])
    got, reads = counted(values.problems, checks)
    assert got == wanted
    alone = [each for each in checks if isinstance(each, Check)]
    assert values.problems_on_host(alone) == values.problems(alone)
    assert reads == any(isinstance(each, Check) and each.wrong.numel() for each in checks)


def on_host(rules, arguments):
    """What :func:`indices.problems` says, by one value after the other."""
    problems = []
    for rule in rules:
        tensor, name = arguments[rule.tensor.name], rule.tensor.name
        size = math.prod(arguments[of].shape[axis] for of, axis in rule.sizes)
        promised = [arguments[each] for each in rule.bounds if arguments.get(each) is not None]
        most = min([size - bool(rule.tensor.indexes), *promised])
        wanted = f"{rule.low} to {most}" if most >= rule.low else "none, since there is no place"
        per = math.prod(arguments[of].shape[axis] for of, axis in rule.per)
        texts = []
        for place in places_of(tensor.shape):
            value = int(tensor[place])
            read = not rule.counts or place[1] * per < int(arguments[rule.counts][place[0]])
            if read and not rule.low <= value <= most:
                where = f"[{', '.join(map(str, place))}]" if place else ""
                texts.append(f"{name}{where}: wanted {wanted}, got {value}")
        problems += texts[:8]
        if rule.tensor.distinct:
            problems += named_again(name, tensor.reshape(-1, tensor.shape[-1]).tolist() if tensor.numel() else [])[:8]
    return problems


def named_again(name, rows):
    for row in rows:
        again = [at for at, value in enumerate(row) if value >= 0 and value in row[:at]]
        if again:
            return [f"{name}: wanted each place once, got {row[at]} at {row.index(row[at])} and {at}" for at in again]
    return []


def integers(data, shape, low, high, dtype):
    size = math.prod(shape)
    drawn = data.draw(st.lists(st.integers(low, high), min_size=size, max_size=size))
    tensor = torch.tensor(drawn, dtype=dtype).view(shape)
    return tensor if size == 0 or data.draw(st.booleans()) else tensor.repeat_interleave(2, -1)[..., ::2]


def slots(data):
    cache = torch.zeros(data.draw(st.integers(0, 3)), 2, 1, 4)
    tokens = data.draw(st.integers(0, 12))
    return {"key_cache": cache, "value_cache": cache, "slot_mapping": integers(data, (tokens,), -3, 8, torch.int64)}


def rows(data):
    batch, seq, length = (data.draw(st.integers(1, most)) for most in (3, 6, 9))
    shape = data.draw(st.sampled_from([(seq,), (1, seq), (batch, seq)]))
    new, cache = torch.zeros(batch, seq, 1, 4), torch.zeros(batch, length, 1, 4)
    positions = integers(data, shape, -2, length + 1, data.draw(st.sampled_from([torch.int32, torch.int64])))
    return {"key": new, "value": new, "key_cache": cache, "value_cache": cache, "positions": positions}


def pages(data):
    cache, copies = torch.zeros(data.draw(st.integers(1, 5)), 2, 1, 4), data.draw(st.integers(0, 5))
    named = {name: integers(data, (copies,), -1, 6, torch.int64) for name in ("from_pages", "to_pages")}
    return {"key_cache": cache, "value_cache": cache, **named}


def tables(data):
    cache, batch, blocks = torch.zeros(4, 2, 1, 4), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4))
    named = {"block_tables": integers(data, (batch, blocks), -2, 5, torch.int32)}
    named["context_lens"] = integers(data, (batch,), -1, 2 * blocks + 1, torch.int32)
    bound = data.draw(st.none() | st.integers(1, 9))
    return {"query": torch.zeros(batch, 1, 1, 4), "key_cache": cache, "value_cache": cache, **named} | (
        {} if bound is None else {"max_context_len": bound}
    )


OF_INTEGERS = {
    "kv.append.paged": slots,
    "kv.gather.paged": slots,
    "kv.append.contiguous": rows,
    "kv.copy_blocks": pages,
    "attention.gqa.decode.paged": tables,
}


@pytest.mark.parametrize("name", OF_INTEGERS)
@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_places_and_counts_are_told_as_by_one_value_after_the_other(name, data):
    arguments, operation = OF_INTEGERS[name](data), OPERATIONS[name]
    layout = data.draw(st.sampled_from(["NHD", "HND"]))
    if layout == "HND":
        arguments |= {each: arguments[each].transpose(1, 2) for each in ("key_cache", "value_cache")}
    rules = indices.rules_of(operation.schema, layout, arguments)
    problems, reads = counted(indices.problems, rules, arguments)
    assert problems == on_host(rules, arguments)
    assert reads <= 1
    for rule in rules:  # what plans on a CPU ask is whether there is any
        broken = [each for each in on_host([rule], arguments) if each]
        said = eval(indices.condition(rule), {**indices.NAMES, "max_context_len": None, **arguments})
        assert bool(said) is not bool(broken)


def start_problems(values, tokens, longest):
    """What is wrong with starts, one number after the other."""
    pairs = list(itertools.pairwise(values))
    problems = [f"cu_seqlens_q[0]: wanted 0, got {values[0]}"] if values[0] else []
    problems += [
        f"cu_seqlens_q[{place}]: wanted at least {left}, the number before it, got {right}"
        for place, (left, right) in enumerate(pairs, 1)
        if right < left
    ][:8]
    if values[-1] != tokens:
        problems.append(f"cu_seqlens_q[{len(pairs)}]: wanted {tokens}, the number of tokens, got {values[-1]}")
    most = max((right - left for left, right in pairs), default=0)
    if longest is not None and most > longest:
        problems.append(
            f"cu_seqlens_q: wanted sequences of at most {longest} tokens as was promised, got one of {most}"
        )
    return problems


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.integers(-2, 9) | st.sampled_from([2**31 - 1, -(2**31)]), min_size=1, max_size=12),
    st.booleans(),
    st.integers(0, 9),
    st.none() | st.integers(1, 9),
)
def test_starts_are_told_as_on_the_host(numbers, follow, tokens, longest):
    if follow:
        numbers = [0, *sorted(number % 10 for number in numbers[1:]), tokens]
    tensor = torch.tensor(numbers, dtype=torch.int32)
    wanted = start_problems(numbers, tokens, longest)
    assert ragged.value_problems("cu_seqlens_q", tensor, tokens, longest) == wanted
    problems, reads = counted(lambda: values.problems(ragged.checks("cu_seqlens_q", tensor, tokens, longest)))
    assert problems == wanted
    assert reads == 1


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_a_tree_beside_starts_that_do_not_fit_is_not_told(data):
    tokens, columns = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 6))
    starts = integers(data, (data.draw(st.integers(1, 5)),), -3, 12, torch.int32)
    mask = torch.rand(tokens, columns, generator=torch.Generator().manual_seed(0)) < 0.5
    wanted = ragged.value_problems("cu_seqlens_q", starts, tokens)
    found = ragged.checks("cu_seqlens_q", starts, tokens) + tree.checks(mask, starts)
    problems, reads = counted(values.problems, found)
    assert reads == 1
    assert problems == (wanted or tree.value_problems(mask, starts))


@pytest.fixture
def looks(monkeypatch):
    """How often each look at the values of a call read them."""
    found, look = [], indices.problems

    def watched(*given):
        problems, reads = counted(look, *given)
        found.append(reads)
        return problems

    monkeypatch.setattr(indices, "problems", watched)
    return found


def call_of(name):
    operation, function = OPERATIONS[name], function_of(name)
    case = min(operation.cases, key=lambda each: sum(each.sizes.values()))
    return function, accepted(function, arguments_of(operation, case, operation.dtypes[0]))


def has_rules(name, arguments):
    """Whether anything is asked of a call's values: without a scale, or numbers of rows, they may be any."""
    operation = OPERATIONS[name]
    if not name.startswith(("quantize.", "dequantize.", "mlp.linear.quant.", "sampling.penalties.counted")):
        return True
    named = inspect.signature(operation.check_values).parameters
    whole = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in named.values())
    return bool(operation.check_values(**{name: each for name, each in arguments.items() if whole or name in named}))


@pytest.mark.parametrize("name", LOOKED_AT)
def test_debug_mode_reads_the_values_of_a_call_once(name, looks):
    function, arguments = call_of(name)
    with lz.scope(debug=True):
        for _ in range(2):
            getattr(lz, function.name)(**arguments)
    assert looks == 2 * [int(has_rules(name, arguments))]


@pytest.mark.parametrize("name", [each for each in LOOKED_AT if OPERATIONS[each].schema.indexed])
def test_each_tensor_of_places_is_looked_at_in_debug_mode(name, looks):
    """Whatever else its operation looks at."""
    function, arguments = call_of(name)
    for tensor in OPERATIONS[name].schema.indexed:
        if arguments.get(tensor.name) is None:
            continue
        broken = arguments[tensor.name].clone()
        broken.view(-1)[-1] = -9
        with lz.scope(debug=True), pytest.raises(lz.InvalidCallError, match=rf"{tensor.name}.*-9"):
            getattr(lz, function.name)(**arguments | {tensor.name: broken})
    assert set(looks) <= {1}
