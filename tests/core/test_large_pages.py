"""Pages of 2 MiB under weights: the same numbers at the same place, and nothing where the system gives none."""

from __future__ import annotations

import contextlib

import pytest
import torch

import layerzero as lz
from layerzero.core.system import memory

ROW = torch.arange(1024, dtype=torch.float32)


@pytest.fixture
def asked(monkeypatch):
    """What the system is asked for, which gives everything."""
    found = []

    def advise(begin, size, how):
        found.append((begin, size, how))
        return 0

    monkeypatch.setattr(memory, "_madvise", lambda: advise)
    return found


def test_numbers_and_addresses_stay():
    weight = ROW.repeat(2048, 1)
    at = weight.data_ptr()
    taken = memory.take([weight])
    assert 0 <= taken <= weight.nbytes
    assert taken % memory.BYTES == 0
    assert weight.data_ptr() == at
    assert torch.equal(weight, ROW.expand(2048, 1024))


def test_only_whole_pages_within_a_tensors_own_memory_are_asked_for(asked):
    weight = torch.zeros(3 * memory.BYTES, dtype=torch.uint8)
    taken = memory.take([weight, weight[5:], weight.view(3, -1)])
    assert taken in (2 * memory.BYTES, 3 * memory.BYTES)
    assert [how for *_, how in asked] == [14, 25]  # once, whatever views there are
    for begin, size, _ in asked:
        assert begin % memory.BYTES == size % memory.BYTES == 0
        assert weight.data_ptr() <= begin
        assert begin + size <= weight.data_ptr() + weight.nbytes


def test_what_has_no_plain_memory_is_passed_over(asked):
    class Odd(torch.Tensor):
        pass

    big = torch.zeros(4 * memory.BYTES, dtype=torch.uint8)
    others = [big.as_subclass(Odd), torch.empty_like(big, device="meta"), torch.zeros(8), None, "form"]
    others.append(torch.zeros(2048, 2048).to_sparse())
    assert memory.take(others) == 0
    assert not asked


def test_refusals_of_the_system_count_nothing(monkeypatch):
    monkeypatch.setattr(memory, "_madvise", lambda: lambda *_: -1)
    assert memory.take([torch.zeros(4 * memory.BYTES, dtype=torch.uint8)]) == 0


def test_time_ends_it(asked):
    weights = [torch.zeros(4 * memory.BYTES, dtype=torch.uint8) for _ in range(3)]
    memory.take(weights, iter((False, True)).__next__)
    assert len({begin for begin, *_ in asked}) == 1


@pytest.mark.parametrize("text", ["always madvise [never]\n", None])
def test_a_system_without_them_is_asked_for_nothing(text, monkeypatch, tmp_path):
    path = tmp_path / "enabled"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(memory, "_SETTING", path)
    assert memory._madvise.__wrapped__() is None


@pytest.mark.parametrize("wanted", [True, False])
def test_the_setting_decides_for_packed_forms_and_models(asked, wanted):
    weight = torch.randn(2048, 2048)
    layer = torch.nn.Linear(2048, 2048).eval()
    with lz.scope(**{"memory.large_pages": wanted}), contextlib.ExitStack() as undone:
        packed = lz.PackedWeight(weight)
        packed.form("a test", lambda dense: ((dense.clone(), None), dense.nbytes))
        assert bool(asked) is wanted
        report = lz.optimize(layer, budget_s=5.0)
        undone.callback(report.undo)
    assert bool(report.large_pages) is wanted
    assert ("pages of 2 MiB" in str(report)) is wanted
