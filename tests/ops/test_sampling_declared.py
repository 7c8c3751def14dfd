"""The CUDA kernels of draws on devices that are not here: what each is offered, and how its library is called."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import layerzero as lz
from layerzero.backends.flashinfer import sampling as flashinfer
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.core.reasons import ReasonCode
from layerzero.core.recipe import CallRecipe
from layerzero.ops import FUNCTIONS, OPERATIONS
from layerzero.ops.calls import arguments_of, case_of_shapes
from layerzero.ops.recipes import arguments_of_recipe
from layerzero.ops.sampling import formulas
from layerzero.testing import compare, randomness
from layerzero.testing.generate import RandomCall
from layerzero.testing.single_run import attempt

LIBRARIES = {"torch": "2.11.0", "flashinfer-python": "0.7.2.post1"}
GIVEN = {
    "sample": {},
    "sample_topk": {"top_k": 3},
    "sample_topp": {"top_p": 0.6},
    "sample_minp": {"min_p": 0.2},
    "sample_topk_topp": {"top_k": 4, "top_p": 0.7},
}
ROW_GIVEN = {
    name: (f"{name}_by_row", torch.int64 if name == "top_k" else torch.float32) for name in ("top_k", "top_p", "min_p")
}
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def codes(name, kernel, device="H200", dtype=F32, vocab=32000, rows=8, **more):
    tensor = torch.empty(rows, vocab, dtype=dtype, device="meta")
    with lz.scope(allow_jit_compile=True):
        report = lz.explain(
            name, tensor, **GIVEN[name.removesuffix("_probs")], **more, device=device, libraries=LIBRARIES
        )
    return {reason.code for reason in report.reasons(kernel)} - {ReasonCode.NOT_INSTALLED}


@pytest.mark.parametrize("name", GIVEN)
def test_dtypes(name):
    for dtype in (F32, BF16, F16, F64):
        refused = codes(name, f"flashinfer.{name}", dtype=dtype)
        assert refused == (set() if dtype is not F64 else {ReasonCode.DTYPE_UNSUPPORTED})
        refused = codes(f"{name}_probs", f"flashinfer.{name}_probs", dtype=dtype)
        assert refused == (set() if dtype is F32 else {ReasonCode.DTYPE_UNSUPPORTED})


def test_devices_and_sizes():
    assert codes("sample_topp", "flashinfer.sample_topp", device="MI300X") == {ReasonCode.PLATFORM_MISMATCH}
    assert codes("sample_topp", "flashinfer.sample_topp", device="T4") == {ReasonCode.SM_TOO_OLD}
    assert codes("sample_topp", "flashinfer.sample_topp", rows=2**15, vocab=2**17) == {ReasonCode.CONSTRAINT_FAILED}
    assert codes("sample_topp", "flashinfer.sample_topp", rows=2**15 - 1, vocab=2**17) == set()
    assert codes("sample_topp", "torch.sample_topp") == {ReasonCode.PLATFORM_MISMATCH}
    assert codes("sample_topp", "torch.sorted_topp") == set()


def facts_of(operation, arguments, device="H200", **state):
    given = {**OPERATIONS[operation].schema.neutral, **arguments}
    facts = FactsBuilder(OPERATIONS[operation]).of_valid(given, device=Device.named(device))
    return facts.on(Device.named(device), **state) if state else facts


def kernel_of(kernels, name):
    return next(each for each in kernels if each.id == name)


@pytest.mark.parametrize("argument", ["seed", "generator"])
def test_a_capture_draws_from_torchs_own_generator_only(argument):
    from layerzero.backends.torch import sampling

    value = 3 if argument == "seed" else torch.Generator()
    for kernel in sampling.KERNELS:
        operation = kernel.operations[0]
        if operation == "sampling.greedy":
            continue
        if operation == "sampling.topp" and kernel.id == "torch.sample_topp":
            continue  # a CPU's
        given = {"logits": torch.empty(2, 64)}
        for capturing, extra, refused in (
            (True, {argument: value}, True),
            (True, {}, False),
            (False, {argument: value}, False),
        ):
            facts = facts_of(operation, given | extra, capturing=capturing)
            found = {finding.reason.code for limit in kernel.limits for finding in limit.check(facts)}
            assert (ReasonCode.CUDA_GRAPH_UNSAFE in found) == refused


def test_counts_of_rows_are_read_on_a_cpu_only():
    from layerzero.backends.torch import sampling

    given = {"logits": torch.empty(2, 64), "top_k_by_row": torch.ones(2, dtype=torch.int64)}
    (limit,) = (
        each for each in kernel_of(sampling.KERNELS, "torch.sample_topk").limits if "top_k_by_row" in each.describe()
    )
    assert limit.check(facts_of("sampling.topk", given))
    assert not limit.check(facts_of("sampling.topk", given, device="cpu"))


@pytest.mark.parametrize("ending", ["", "_probs"])
@pytest.mark.parametrize("name", GIVEN)
def test_calls_that_were_written_down_are_made_again_of_what_can_be_drawn_of(name, ending):
    operation = FUNCTIONS[name + ending].operations[0]
    source = operation.schema.inputs[0].name
    tensor = torch.randn(2, 3, 64).softmax(-1)
    recipe = CallRecipe.of(facts_of(operation.name, {source: tensor, **GIVEN[name], "seed": 3}, device="cpu"))
    function, arguments = arguments_of_recipe(recipe, operation)
    assert arguments["seed"] is not None
    assert arguments[source].shape == tensor.shape
    if ending:
        torch.testing.assert_close(arguments[source].sum(-1), torch.ones(2, 3))
    assert getattr(lz, function.name)(**arguments).shape == (2, 3)


@pytest.mark.parametrize("name", [*GIVEN, "greedy"])
def test_the_shape_of_logits_asks_for_a_call_with_usual_numbers(name):
    operation = FUNCTIONS[name].operations[0]
    case = case_of_shapes(operation, [(4, 64)])
    assert case is not None
    made = arguments_of(operation, case, F32)
    assert {each: made[each] for each in ROW_GIVEN if each in made}.keys() == GIVEN.get(name, {}).keys()


class Library:
    """FlashInfer's module in torch: the argument lists of csrc/flashinfer_sampling_binding.cu, and what they say."""

    def __init__(self):
        self.asked = []

    def _draw(self, probs, output, valid, indices, random, keep):
        deterministic, seed_arr, seed, offset_arr, offset = random
        assert deterministic is True
        assert indices is seed_arr is offset_arr is None
        assert probs.dtype is F32
        assert probs.is_contiguous()
        assert output.dtype is torch.int64
        assert valid.dtype is torch.bool
        assert len(probs) == len(output) == len(valid)
        self.asked.append((seed, offset))
        output.copy_(formulas.drawn(probs * keep, torch.Generator().manual_seed(seed + offset)))
        valid.fill_(True)

    @staticmethod
    def _of_rows(array, value, probs):
        if array is None:
            return value
        assert array.shape == probs.shape[:1], "the module takes one axis"
        return array

    def sampling_from_probs(self, probs, output, valid, indices, *random):
        self._draw(probs, output, valid, indices, random, 1)

    def top_k_sampling_from_probs(self, probs, output, valid, indices, array, k, *random):
        assert array is None or array.dtype is output.dtype
        keep = formulas.keep_top_k(
            probs, self._of_rows(None, k, probs), None if array is None else self._of_rows(array, 0, probs)
        )
        self._draw(probs, output, valid, indices, random, keep)

    def top_p_sampling_from_probs(self, probs, output, valid, indices, array, p, *random):
        assert array is None or array.dtype is F32
        keep = formulas.keep_top_p(probs, p, None if array is None else self._of_rows(array, 0, probs))
        self._draw(probs, output, valid, indices, random, keep)

    def min_p_sampling_from_probs(self, probs, output, valid, indices, array, p, *random):
        keep = formulas.keep_min_p(probs, p, None if array is None else self._of_rows(array, 0, probs))
        self._draw(probs, output, valid, indices, random, keep)

    def top_k_renorm_probs(self, probs, kept, array, k, deterministic, states):
        assert deterministic is True
        assert array is None or array.dtype is torch.int32
        assert states.dtype is torch.uint8
        assert not states.any()
        weights = probs * formulas.keep_top_k(probs, k, array)
        kept.copy_(weights / weights.sum(-1, keepdim=True))


@pytest.fixture
def library(monkeypatch):
    found = Library()
    numbers = []
    module = types.ModuleType("flashinfer.sampling")
    module.get_seed_and_offset = lambda increment, generator, device: (numbers.append(increment), (40, 2))[1]
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", module)
    monkeypatch.setattr(flashinfer, "built", lambda: found)
    found.numbers = numbers
    return found


@pytest.mark.parametrize("of_rows", [False, True])
@pytest.mark.parametrize("shape", [(64,), (33, 64), (2, 3, 64)], ids=str)
@pytest.mark.parametrize("ending", ["", "_probs"])
@pytest.mark.parametrize("name", GIVEN)
def test_draws_are_asked_for_as_the_module_wants_it(library, name, ending, shape, of_rows):
    """The binding alone, with torch in the library's place."""
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    tensor = logits.softmax(-1) if ending else logits
    given = dict(GIVEN[name])
    if of_rows:
        given = {
            ROW_GIVEN[key][0]: torch.full(shape[:-1], value, dtype=ROW_GIVEN[key][1]) for key, value in given.items()
        }
    operation = FUNCTIONS[name + ending].operations[0]
    source = operation.schema.inputs[0].name
    kernel = kernel_of(flashinfer.KERNELS, f"flashinfer.{name}{ending}")
    run = kernel.load(facts_of(operation.name, {source: tensor, **given}))
    call = RandomCall(name + ending, {source: tensor, **given})
    truth = compare.expected(call)
    rest = {each: None for each in ("temperature", "seed", "generator") if each in kernel.accepts}
    for seed in range(8):
        ids = run(tensor, **given, **{**rest, "seed": seed})
        assert compare.problems(ids, {}, truth) == []
    assert {offset for _, offset in library.asked} == {0}
    ids = run(tensor, **given, **rest)
    assert compare.problems(ids, {}, truth) == []
    assert library.asked[-1] == (40, 2)
    rows = tensor.numel() // 64
    assert library.numbers == [rows * (1 if name in ("sample", "sample_minp") else 32)]


def test_a_temperature_is_in_the_probabilities(library):
    logits = torch.randn(4, 64)
    kernel = kernel_of(flashinfer.KERNELS, "flashinfer.sample")
    run = kernel.load(facts_of("sampling.categorical", {"logits": logits}))
    assert torch.equal(run(logits, temperature=1e-6, seed=1, generator=None), logits.argmax(-1))


def test_shares_and_counts_of_rows_are_brought_into_range():
    array, _ = flashinfer._shares(None, torch.tensor([[-1.0, 0.5], [1.0, 7.0]]))
    assert array.tolist() == [flashinfer.LEAST, 0.5, 1.0, 1.0]
    array, _ = flashinfer._counts(None, torch.tensor([0, 5, 99]), 32, torch.int32)
    assert array.tolist() == [1, 5, 32]
    assert flashinfer._counts(99, None, 32, torch.int32) == (None, 32)


@pytest.mark.parametrize(
    "given", [{"top_k": 2, "top_p_by_row": torch.tensor(0.6)}, {"top_k": 2, "top_p": 0.6}], ids=["by_row", "one"]
)
def test_draws_of_a_single_row_without_an_axis_are_judged_as_one_row(given):
    operation = OPERATIONS["sampling.topk_topp"]
    kernel = next(each for each in lz.list_kernels(operation.name) if each.id == "reference.sampling.topk_topp")
    call = RandomCall("sample_topk_topp", {"logits": torch.tensor([1.0, 0.5, 0.2]), "top_k": 2, **given}, "one row")
    trial = attempt(kernel, operation, call)

    outcome = randomness.drawn_fairly(trial)

    assert outcome.status == "passed", outcome.message
