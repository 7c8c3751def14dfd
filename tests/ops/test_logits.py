"""What is done to logits before a draw and asked of them after it: penalties, biases, log-probabilities; bad input."""

from __future__ import annotations

import math
import types

import pytest
import torch

import layerzero as lz
from drawing import examples
from layerzero.backends.vllm import rows as vllm
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.engine.registry import REGISTRY
from layerzero.ops import FUNCTIONS, OPERATIONS
from layerzero.testing import fuzz

NAMES = ("apply_penalties", "add_logit_bias", "chosen_logprobs")
LOGITS = [2.0, -1.0, 0.0, 3.0, -math.inf]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def by_hand(logits, output, prompt, repetition, presence, frequency):
    """One row by the definition, a place after the other."""
    found = []
    for place, value in enumerate(logits):
        less = value / repetition if value > 0 else value * repetition
        repeated = less if place in output or place in prompt else value
        found.append(repeated - frequency * output.count(place) - presence * (place in output))
    return found


@pytest.mark.parametrize("kernel", ["torch", "reference"])
@pytest.mark.parametrize("form", ["ids", "counts"])
def test_penalties_are_those_of_the_definition(form, kernel):
    logits = torch.tensor([LOGITS, LOGITS])
    output, prompt = torch.tensor([[0, 0, 1, -1], [4, 3, 3, 3]]), torch.tensor([[2, 3], [-1, 0]])
    given = {"output_ids": output, "prompt_ids": prompt}
    if form == "counts":
        counts = torch.tensor([[2, 1, 0, 0, 0], [0, 0, 0, 3, 1]])
        mask = torch.tensor([[False, False, True, True, False], [True, False, False, False, False]])
        given = {"output_counts": counts, "prompt_mask": mask}
    operation = "sampling.penalties" if form == "ids" else "sampling.penalties.counted"
    own = "torch.penalties" if form == "ids" else "torch.penalties_counted"
    with lz.scope(locks={operation: own if kernel == "torch" else f"reference.{operation}"}):
        got = lz.apply_penalties(logits, **given, repetition=2.0, presence=0.5, frequency=0.25)
        of_rows = lz.apply_penalties(
            logits,
            **given,
            repetition=torch.tensor([2.0, 1.0]),
            presence=torch.tensor([0.5, 0.0]),
            frequency=torch.tensor([0.25, 1.0]),
        )
    rows = [([0, 0, 1], [2, 3]), ([4, 3, 3, 3], [0])]
    assert got.tolist() == [by_hand(LOGITS, *row, 2.0, 0.5, 0.25) for row in rows]
    assert of_rows.tolist() == [by_hand(LOGITS, *rows[0], 2.0, 0.5, 0.25), by_hand(LOGITS, *rows[1], 1.0, 0.0, 1.0)]
    assert logits.tolist() == [LOGITS, LOGITS], "the caller's logits stay as they were"


def test_ids_may_be_batched_by_vmap():
    logits, ids = torch.randn(2, 3, 8), torch.randint(0, 8, (2, 3, 4))
    got = torch.vmap(lambda of, said: lz.apply_penalties(of, said, said, presence=1.0, repetition=2.0))(logits, ids)
    want = [
        lz.apply_penalties(of, said, said, presence=1.0, repetition=2.0) for of, said in zip(logits, ids, strict=True)
    ]
    torch.testing.assert_close(got, torch.stack(want))


def test_nothing_said_and_no_number_change_nothing():
    logits = torch.randn(2, 3, 16, generator=generator())
    nothing = torch.empty(2, 3, 0, dtype=torch.int64)
    assert torch.equal(lz.apply_penalties(logits, nothing, repetition=1.5, presence=1.0), logits)
    changed = lz.apply_penalties(logits, torch.zeros(2, 3, 1, dtype=torch.int64))
    assert torch.equal(changed, logits)
    assert changed.data_ptr() != logits.data_ptr()


def test_a_bias_is_added_and_forbids():
    logits = torch.zeros(2, 4)
    ids, bias = torch.tensor([[1, 1, -1], [3, 0, 2]]), torch.tensor([[1.0, 2.0, math.nan], [-math.inf, 0.5, 0.0]])
    assert lz.add_logit_bias(logits, ids, bias).tolist() == [[0, 3, 0, 0], [0.5, 0, 0, -math.inf]]
    assert not logits.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_of_what_was_drawn(dtype):
    logits = (torch.randn(3, 5, 300, generator=generator()) * 3).to(dtype)
    ids = lz.sample(logits, seed=1)
    got = lz.chosen_logprobs(logits, ids)
    want = logits.double().log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=3e-5)
    warm = torch.full((3, 5), 0.5)
    assert torch.equal(
        lz.chosen_logprobs(logits, ids, temperature=0.5), lz.chosen_logprobs(logits, ids, temperature=warm)
    )
    cold = lz.chosen_logprobs(logits.fill_(20), ids, temperature=1e-6)  # 2e7, where a step of float32 is 2
    torch.testing.assert_close(cold, torch.full_like(cold, -math.log(300)))


def test_log_probabilities_have_gradients():
    logits = torch.randn(4, 32, generator=generator(), dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 5, 31, 5])
    lz.chosen_logprobs(logits, ids).sum().backward()
    want = torch.nn.functional.one_hot(ids, 32) - logits.detach().softmax(-1)
    torch.testing.assert_close(logits.grad, want)


WRONG = {
    "output_ids: wanted output_ids or output_counts, got neither": {},
    "output_ids: wanted output_ids or output_counts, got both": {"output_ids": "ids", "output_counts": "counts"},
    "prompt_mask: wanted prompt_ids with output_ids, got prompt_mask": {"output_ids": "ids", "prompt_mask": "mask"},
    "prompt_ids: wanted prompt_mask with output_counts, got": {"output_counts": "counts", "prompt_ids": "ids"},
    "repetition: wanted 0.0001 to 10000, got 0": {"output_ids": "ids", "repetition": 0},
    "presence: wanted -10000 to 10000, got nan": {"output_ids": "ids", "presence": math.nan},
    "presence: wanted the rows (2,) of logits, got shape (3,)": {"output_ids": "ids", "presence": "rows"},
    "presence: wanted dtype float32, got int64": {"output_ids": "ids", "presence": "whole"},
    "output_ids: wanted the rows (2,) of logits, got shape (3, 1)": {"output_ids": "three"},
    "output_ids[1, 1]: wanted -1 to 7, got 8": {"output_ids": "beyond"},
    "output_ids: wanted dtype int32 or int64, got float32": {"output_ids": "floats"},
}
TENSORS = {
    "ids": torch.tensor([[0, 1], [2, -1]]),
    "counts": torch.ones(2, 8, dtype=torch.int32),
    "mask": torch.ones(2, 8, dtype=torch.bool),
    "rows": torch.ones(3),
    "whole": torch.ones(2, dtype=torch.int64),
    "three": torch.zeros(3, 1, dtype=torch.int64),
    "beyond": torch.tensor([[0, 1], [2, 8]]),
    "floats": torch.zeros(2, 2),
}


@pytest.mark.parametrize("problem", WRONG)
def test_bad_penalties(problem):
    given = {
        name: TENSORS.get(value, value) if isinstance(value, str) else value for name, value in WRONG[problem].items()
    }
    with pytest.raises(lz.InvalidCallError) as raised:
        lz.apply_penalties(torch.zeros(2, 8), **given)
    assert problem in str(raised.value)


@pytest.mark.parametrize("number", [0.0, -1.0, math.nan])
def test_numbers_of_rows_are_looked_at_in_debug_mode(number):
    """As one number for all rows is at every call: reading a tensor would wait for a GPU."""
    rows = torch.tensor([1.1, number])
    with lz.scope(debug=True), pytest.raises(lz.InvalidCallError, match=r"repetition: wanted .*, got another in row 1"):
        lz.apply_penalties(torch.zeros(2, 8), TENSORS["ids"], repetition=rows)


def test_places_beyond_the_vocabulary_are_refused_behind_any_number_of_rows():
    for rows in ((), (3,), (2, 2)):
        logits = torch.zeros(*rows, 8)
        beyond = torch.full(rows, 8)
        with pytest.raises(lz.InvalidCallError, match="wanted 0 to 7, got 8"):
            lz.chosen_logprobs(logits, beyond)
        with pytest.raises(lz.InvalidCallError, match="wanted -1 to 7, got 8"):
            lz.add_logit_bias(logits, beyond.unsqueeze(-1), torch.zeros(*rows, 1))
        assert lz.chosen_logprobs(logits, beyond - 1).shape == rows


@pytest.mark.parametrize("name", NAMES)
def test_compiled(name):
    logits, ids = torch.randn(2, 16, generator=generator()), torch.tensor([[1, 2], [3, -1]])
    given = {
        "apply_penalties": {"output_ids": ids, "repetition": 1.5},
        "add_logit_bias": {"bias_ids": ids, "bias": torch.ones(2, 2)},
        "chosen_logprobs": {"ids": ids[:, 0]},
    }[name]
    torch.compiler.reset()
    compiled = torch.compile(lambda logits: getattr(lz, name)(logits, **given), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(logits), getattr(lz, name)(logits, **given))


def test_vllms_operator_gets_masks_and_a_penalty_for_each_row(monkeypatch):
    """The binding alone, with its formula in the library's place."""

    def repeat(logits, prompt_mask, output_mask, penalties):
        assert all(each.is_contiguous() and each.ndim == 2 for each in (logits, prompt_mask, output_mask))
        assert penalties.shape == logits.shape[:1]
        assert penalties.dtype is logits.dtype
        less = torch.where(logits > 0, logits / penalties.unsqueeze(1), logits * penalties.unsqueeze(1))
        logits.copy_(torch.where(prompt_mask | output_mask, less, logits))

    operator = types.SimpleNamespace(apply_repetition_penalties_=types.SimpleNamespace(default=repeat))
    monkeypatch.setattr(vllm, "operators", lambda *_: operator)
    kernel = REGISTRY.kernel("vllm.penalties")
    operation = OPERATIONS["sampling.penalties.counted"]
    logits = torch.randn(2, 3, 8, generator=generator())
    counts = torch.randint(0, 3, (2, 3, 8), generator=generator(1), dtype=torch.int32)
    mask = torch.rand(2, 3, 8, generator=generator(2)) < 0.3
    given = {"output_counts": counts, "prompt_mask": mask, "repetition_by_row": torch.rand(2, 3) + 1, "presence": 0.5}
    facts = FactsBuilder(operation).of_valid({**given, "logits": logits}, device=Device.named("H200"))
    got = kernel.load(facts)(
        logits, counts, **{name: value for name, value in given.items() if name != "output_counts"}
    )
    torch.testing.assert_close(got, operation.reference(logits, **given))


def test_random_calls(monkeypatch):
    monkeypatch.setattr("layerzero.testing.generate.FUNCTIONS_BY_NAME", {name: FUNCTIONS[name] for name in NAMES})
    report = fuzz.run(examples(300), 7)
    assert report.ok, str(report)
