"""The laws of a cache, by random histories beside a model of lists: contents, owners of pages, and what is free."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import layerzero as lz
from drawing import examples

NAMES = st.integers(0, 5)
SALTS = st.sampled_from(["", "", "another adapter"])
FORMS = {
    "paged": {"pages": 9, "page_size": 4},
    "heads first": {"pages": 9, "page_size": 4, "layout": "HND"},
    "transposed": {"pages": 9, "page_size": 4, "layout": "VLLM_CPU"},
    "split": {"pages": 9, "page_size": 4, "layout": "VLLM", "head_dim": 4},
    "latent": {"pages": 9, "page_size": 4, "kv_heads": None, "head_dim": None, "latent": (3, 2)},
    "contiguous": {"max_sequences": 5, "max_length": 24, "strategy": "contiguous"},
    "virtual": {"max_sequences": 5, "max_length": 24, "strategy": "virtual"},
    "unified": {"max_sequences": 5, "max_length": 24, "strategy": "unified"},
}


def tokens_of(cache, name):
    """The first number of each token of a sequence in each layer, read without any kernel."""
    pages, size = cache.table(name), cache.page_size
    found = []
    for planes in cache._storage.layers:
        for plane in cache._planes:
            rows = [planes[plane.name][page].movedim(plane.token_axis - 1, 0).flatten(1) for page in pages]
            rows = [row[: min(cache.length(name) - number * size, size)] for number, row in enumerate(rows)]
            whole = torch.cat(rows) if rows else torch.zeros(0, 1)
            assert bool((whole == whole[:, :1]).all()), "a token is of one step"
            found.append([int(each) for each in whole[:, 0]])
    assert all(each == found[0] for each in found)
    return found[0]


def write(cache, step, numbers):
    """Write tokens whose every element is their number, as kernels of another library would: by slots."""
    for planes in cache._storage.layers:
        for plane in cache._planes:
            for slot, number in zip(step.slots.tolist(), numbers, strict=True):
                page = planes[plane.name][slot // cache.page_size]
                page.select(plane.token_axis - 1, slot % cache.page_size).fill_(number)


class Histories(RuleBasedStateMachine):
    form = "paged"

    def __init__(self):
        super().__init__()
        given = {"kv_heads": 2, "head_dim": 2} | FORMS[self.form]
        self.cache = lz.KVCache(2, **given, dtype=torch.float32)
        self.model, self.host, self.next, self.published = {}, set(), 1, set()

    def teardown(self):
        for name in self.cache:
            self.cache.free(name)
        usage, book = self.cache.usage(), self.cache._book
        assert usage.free_pages == usage.pages, "nothing leaks"
        assert sum(book.users) == usage.known_pages == len(book.prefixes.idle)
        self.cache.close()

    def numbers(self, count):
        self.next += count
        return list(range(self.next - count, self.next))

    @rule(name=NAMES)
    def allocate(self, name):
        if name in self.model:
            with pytest.raises(lz.KVCacheError, match="a name that no sequence has"):
                self.cache.allocate(name)
        else:
            self.cache.allocate(name)
            self.model[name] = []

    @rule(names=st.sets(NAMES, min_size=1, max_size=3), data=st.data(), keep=st.integers(0, 4))
    def append(self, names, data, keep):
        names = [name for name in sorted(names) if name in self.model and name not in self.host]
        counts = [data.draw(st.integers(0, 7)) for _ in names]
        try:
            step = self.cache.writing(names, counts)
        except lz.KVCacheError as error:
            known = "nothing was written" in error.problem or "max_length" in error.problem
            assert known, error  # noqa: PT017  # only where it raises
            return
        numbers = self.numbers(sum(counts))
        assert len(step.slots) == len(numbers)
        write(self.cache, step, numbers)
        if not keep:
            step.abort()
            return
        step.commit()
        for name, count in zip(names, counts, strict=True):
            self.model[name] = self.model[name] + numbers[:count]
            numbers = numbers[count:]

    @rule(name=NAMES, new=NAMES, data=st.data())
    def fork(self, name, new, data):
        if name not in self.model or name in self.host or new in self.model:
            return
        tokens = data.draw(st.none() | st.integers(0, len(self.model[name])))
        self.cache.fork(name, new, tokens)
        self.model[new] = self.model[name][:tokens]

    @rule(name=NAMES, data=st.data(), salt=SALTS)
    def publish(self, name, data, salt):
        if name not in self.model or name in self.host:
            return
        tokens = self.model[name][: data.draw(st.integers(0, len(self.model[name])))]
        if self.cache.strategy is not lz.KVCacheStrategy.PAGED:
            with pytest.raises(lz.KVCacheError, match="wanted a paged cache for tokens="):
                self.cache.publish(name, tokens, salt=salt)
            return
        self.cache.publish(name, tokens, salt=salt)
        self.published |= {(salt, *tokens[:end]) for end in range(4, len(tokens) + 1, 4)}

    @rule(name=NAMES, other=st.sampled_from([*range(6)]), data=st.data(), salt=SALTS)
    def begin_with_a_prompt(self, name, other, data, salt):
        if name in self.model or self.cache.strategy is not lz.KVCacheStrategy.PAGED:
            return
        seen = self.model.get(other) or list(data.draw(st.sampled_from(sorted(self.published) or [("",)])))[1:]
        prompt = seen[: data.draw(st.integers(0, len(seen)))] + data.draw(st.sampled_from([[], [10**9]]))
        self.cache.allocate(name, prompt=prompt, salt=salt)
        found = self.cache.length(name)
        assert found % 4 == 0
        assert found < max(len(prompt), 1)
        assert not found or (salt, *prompt[:found]) in self.published, "what nothing made known is not found"
        self.model[name] = prompt[:found]  # contents are compared with it

    @rule(name=NAMES)
    def free(self, name):
        if name in self.model:
            self.cache.free(name)
            del self.model[name]
            self.host.discard(name)

    @rule(name=NAMES, data=st.data())
    def truncate(self, name, data):
        if name in self.model and name not in self.host:
            tokens = data.draw(st.integers(0, len(self.model[name])))
            self.cache.truncate(name, tokens)
            self.model[name] = self.model[name][:tokens]

    @rule(name=NAMES)
    def swap(self, name):
        if name not in self.model:
            return
        if name not in self.host:
            self.cache.swap_out(name)
            self.host.add(name)
            return
        try:
            self.cache.swap_in(name)
        except lz.KVCacheError as error:
            assert error.code is lz.ReasonCode.KV_CACHE_EXHAUSTED  # noqa: PT017  # only where it raises
            return
        self.host.discard(name)

    @rule(whole=st.booleans())
    def move(self, whole):
        moved = self.cache.defragment() if whole else self.cache.compact()
        used = sorted({page for name in self.model if name not in self.host for page in self.cache.table(name)})
        assert used == list(range(len(used)))
        assert moved <= len(used)
        assert self.cache.usage().fragmentation == 0.0

    @precondition(lambda self: self.form == "virtual")
    @rule()
    def trim(self):
        self.cache.trim()

    @invariant()
    def contents_are_those_of_the_model(self):
        assert {*self.cache} == {*self.model}
        for name, numbers in self.model.items():
            assert self.cache.length(name) == len(numbers)
            if name not in self.host:
                assert tokens_of(self.cache, name) == numbers

    @invariant()
    def pages_have_owners_or_are_free(self):
        usage, users = self.cache.usage(), {}
        for name in self.model:
            if name not in self.host:
                pages = self.cache.table(name)
                assert len(set(pages)) == len(pages) == -(-len(self.model[name]) // self.cache.page_size)
                for place, page in enumerate(pages):
                    users.setdefault(page, []).append((place, tuple(self.model[name][: (place) * usage.page_size])))
        assert usage.free_pages + len(users) == usage.pages
        assert usage.shared_pages == sum(len(each) > 1 for each in users.values())
        assert all(len(set(each)) == 1 for each in users.values()), "a shared page is that of one prefix"
        book = self.cache._book
        assert book.users == [len(users.get(page, ())) + (page in book.prefixes) for page in range(usage.pages)]
        assert [*book.prefixes.idle] == sorted(
            (page for page in range(usage.pages) if page in book.prefixes and page not in users),
            key=[*book.prefixes.idle].index,
        )
        assert usage.sequences + usage.swapped == len(self.model)
        assert usage.needed_bytes <= usage.committed_bytes <= usage.reserved_bytes


@pytest.mark.parametrize("form", FORMS)
def test_any_history_leaves_what_lists_would_hold(form):
    machine = type(f"Of{form.title().replace(' ', '')}", (Histories,), {"form": form})
    case = machine.TestCase
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    case.settings = settings(
        max_examples=examples(40), stateful_step_count=25, deadline=None, suppress_health_check=slow
    )
    case("runTest").runTest()
