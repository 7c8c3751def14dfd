"""The serving engine of the examples writes what the plain model writes, request by request, whatever runs beside."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import layerzero as lz
from engine_example import FILE, loaded, printed
from layerzero.engine import dispatch

TOKENS = 6


example = pytest.fixture(scope="module")(loaded)


@pytest.fixture(scope="module")
def served(example):
    """A small model in float32, prompts, and what the model writes after each of them."""
    model = example.Llama(
        example.Shape(vocabulary=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, wide=96, longest=256)
    )
    prompts = example.requests_of(6, 64)
    return model, prompts, example.one_by_one(model, prompts, TOKENS)


@pytest.mark.parametrize(("pages", "budget"), [(64, 32), (64, 512), (20, 17)], ids=["chunks", "whole", "little room"])
def test_interleaved_requests_get_the_tokens_that_they_get_alone(example, served, pages, budget):
    model, prompts, wanted = served
    engine = example.Engine(model, pages=pages, budget=budget)
    assert example.serve(engine, prompts, TOKENS) == wanted
    assert not engine.running
    assert engine.cache.free_pages == pages
    assert not [*engine.cache]


def test_a_known_prefix_is_not_computed_again_and_changes_no_token(example, served):
    model, prompts, wanted = served
    engine = example.Engine(model, pages=64)
    for _again in range(2):
        for prompt, tokens in zip(prompts, wanted, strict=True):
            request = engine.submit(prompt, TOKENS)
            while engine.step():
                pass
            assert request.written == tokens
    assert engine.cache.usage().found_tokens >= sum(
        (len(prompt) - 1) // example.PAGE * example.PAGE for prompt in prompts
    )


def test_steps_mix_prefills_and_decodes_in_one_call(example, served, monkeypatch):
    model, prompts, _ = served
    seen = []
    attend = lz.paged_attention

    def watched(query, *tensors, **others):
        seen.append((query.ndim, others.get("decodes")))
        return attend(query, *tensors, **others)

    monkeypatch.setattr(lz, "paged_attention", watched)
    example.serve(example.Engine(model, budget=24), prompts, TOKENS)
    assert {(3, None), (4, None)} < set(seen)
    assert any(decodes for _, decodes in seen)


def test_a_request_that_no_step_could_serve_is_refused(example, served):
    engine = example.Engine(served[0], pages=4)
    for prompt, count in (([], 1), ([1] * 60, 5), ([1], 0)):
        with pytest.raises(ValueError, match="wanted a prompt and at most 64 tokens"):
            engine.submit(prompt, count)


def test_it_is_small():
    assert len(FILE.read_text().splitlines()) <= 300


def test_it_runs_as_a_program(example, monkeypatch, capsys):
    told = printed(example, "--width 64 --tokens 2 --device cpu", monkeypatch, capsys)
    assert "engine: " in told
    assert "tokens that are the same: 32 of 32" in told
    assert torch.get_default_dtype() is torch.float32


class Recorder(TorchDispatchMode):
    """Notes what runs, with the tensors that it runs on."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        output = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, output))
        return output


class Captures:
    """Stands for CUDA graphs: a replay runs the same operators on the same tensors, and none of the engine's Python."""

    def __init__(self):
        self.rows, self.replays = [], []

    def __call__(self, run):
        run()
        with Recorder() as recorder:
            result = run()
        self.rows.append(len(result[0]))

        def replay():
            self.replays.append(len(result[0]))
            for operator, args, kwargs, output in recorder.calls:
                again = operator(*args, **kwargs)
                for kept, new in zip(tree_leaves(output), tree_leaves(again), strict=True):
                    if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                        kept.copy_(new)
            return result

        return replay


@pytest.fixture
def captures():
    with lz.scope(locks={"attention.paged": "torch.paged_gather"}):  # reads nothing on the host, as graphs want
        yield Captures()


@pytest.mark.parametrize(("pages", "budget"), [(64, 32), (64, 512), (20, 17)], ids=["chunks", "whole", "little room"])
def test_captured_decodes_write_the_same_tokens(example, served, captures, pages, budget):
    model, prompts, wanted = served
    engine = example.Engine(model, pages=pages, budget=budget, capture=captures)
    for _again in range(2):  # the second time prefixes are known, and graphs are there
        assert example.serve(engine, prompts, TOKENS) == wanted
        assert engine.cache.free_pages == pages
    assert engine.cache.usage().found_tokens > 0
    assert captures.replays
    assert len(set(captures.rows)) == len(captures.rows)


def test_batches_shrink_and_grow_through_buckets(example, served, captures):
    model, prompts, _ = served
    counts = [2, 5, 9, 14, 20, 27]
    wanted = [example.one_by_one(model, [prompt], count)[0] for prompt, count in zip(prompts, counts, strict=True)]
    engine = example.Engine(model, pages=64, budget=512, capture=captures)
    for _again in range(2):
        requests = [engine.submit(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
        while engine.step():
            pass
        assert [each.written for each in requests] == wanted
    once = captures.replays[: len(captures.replays) // 2]
    assert [rows for rows, before in zip(once, [0, *once], strict=False) if rows != before] == [8, 4, 2, 1]
    assert captures.replays == once * 2
    assert captures.rows == [8, 4, 2, 1]
    assert all(step.capturable for _, step, _ in engine.graphs.values())


def test_padding_has_pages_of_its_own(example, served, captures):
    model, prompts, _ = served
    engine = example.Engine(model, pages=64, budget=512, capture=captures, most=8)
    before = [engine.cache.table(name) for name in engine.padding]
    requests = [engine.submit(prompt, 8) for prompt in prompts[:5]]
    while engine.step():
        taken = {page for each in engine.running for page in engine.cache.table(each.name)}
        assert taken.isdisjoint(page for table in before for page in table)
    assert list(engine.graphs) == [8]
    assert [engine.cache.table(name) for name in engine.padding] == before
    assert [each.written for each in requests] == example.one_by_one(model, prompts[:5], 8)


@pytest.mark.parametrize("draft", [0, 3])
@pytest.mark.parametrize("captured", [False, True])
def test_draws_of_requests_are_those_that_they_draw_alone(example, served, captures, draft, captured):
    """Half of them draw by top-k, top-p and min-p, with penalties and masks; the others are verified with drafts."""
    model, prompts, _ = served
    of = tuple(example.sampling_of(number, 64) for number in range(3))
    wanted = example.one_by_one(model, prompts, 20, example.draw_alone(of))
    engine = example.Engine(model, pages=64, budget=40, capture=captures if captured else None, draft=draft)
    for engine.salt in ("one", "another"):
        assert example.serve(engine, prompts, 20, of=of) == wanted
    assert all(token % 2 == 0 for token in wanted[0])
    assert len(engine.counts) == 0


def test_drafts_stand_where_a_text_repeats_itself(example, served):
    model, _, _ = served
    prompts = [[1, 2, 3, 4] * 6, [5, 6] * 12]
    wanted = example.one_by_one(model, prompts, 40)
    engine = example.Engine(model, draft=4)
    assert example.serve(engine, prompts, 40) == wanted
    repeats = any(written[-4:] == written[-8:-4] for written in wanted)
    assert engine.accepted > 0 or not repeats
    plain = example.Engine(model)
    assert example.serve(plain, prompts, 40) == wanted
    assert plain.accepted == 0


def test_a_warm_engine_chooses_for_nothing(example, served, monkeypatch):
    model, prompts, wanted = served
    missed, usual = [], dispatch.Dispatcher.miss
    engine = example.Engine(model, pages=64, budget=32, most=6)
    engine.warm()
    monkeypatch.setattr(
        dispatch.Dispatcher, "miss", lambda self, *call: (missed.append(self.function.name), usual(self, *call))[1]
    )
    for engine.salt in ("one", "another"):
        assert example.serve(engine, prompts, TOKENS) == wanted
    assert missed == []


def test_decodes_are_captured_only_where_somebody_captures(example, served):
    model, prompts, wanted = served
    engine = example.Engine(model)
    assert example.serve(engine, prompts, TOKENS) == wanted
    assert not engine.graphs
    assert engine.spent["tokens"] >= engine.spent["steps"] > 0


def test_prompts_of_a_length_and_fewer_comparisons(example, monkeypatch, capsys):
    asked = "--width 64 --tokens 2 --device cpu --requests 3 --prompt 50 --compare 1"
    assert "tokens that are the same: 2 of 2" in printed(example, asked, monkeypatch, capsys)
    prompts = example.requests_of(4, 64, 50)
    assert [len(each) for each in prompts] == [50] * 4
    assert prompts[1][:40] == prompts[3][:40] != prompts[0][:40]


def test_nothing_is_compared_where_nobody_asks_for_it(example, monkeypatch, capsys):
    asked = "--width 64 --tokens 2 --device cpu --requests 3 --compare 0"
    told = printed(example, asked, monkeypatch, capsys)
    assert "tokens that are the same: none compared" in told
    assert "one by one" not in told


def test_every_option_says_what_it_does(example, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        printed(example, "--help", monkeypatch, capsys)
    told = re.split(r"\n  (?=-)", capsys.readouterr().out)[1:]
    assert len(told) == 14
    assert all(re.search(r" {2,}[a-zA-Z]", each) for each in told), told


def test_it_needs_nothing_that_is_private():
    """Whoever copies it into a project of his own has the public names alone."""
    assert re.findall(r"^(?:from|import) layerzero.*", FILE.read_text(), re.MULTILINE) == ["import layerzero as lz"]
