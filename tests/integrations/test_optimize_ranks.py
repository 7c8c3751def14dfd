"""``lz.optimize`` on several ranks: a module stays optimised only where it does on all."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.asking import agreement
from layerzero.core.errors import FrozenChoiceError
from layerzero.integrations.optimize import entrance


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Norm(), Norm()

    def forward(self, x):
        return self.two(self.one(x))


@pytest.fixture
def _several(monkeypatch):
    for module in (agreement, entrance):
        monkeypatch.setattr(module, "ranks_choose", lambda policy: True)
    yield
    if lz.frozen() is not None:
        lz.thaw()


@pytest.fixture
def _all_gain(monkeypatch):
    monkeypatch.setattr(entrance, "time_random_rows", lambda *rest, **options: None)


@pytest.mark.usefixtures("_several", "_all_gain")
@pytest.mark.filterwarnings("ignore:agree")
def test_what_another_rank_left_is_left(monkeypatch):
    monkeypatch.setattr(entrance, "said_by_all", lambda words: {each for each in words if each.startswith("two ")})
    report = lz.optimize(Model().eval())
    assert [each.path for each in report.replaced] == ["two"]
    assert any(each.path == "one" and "another rank left it" in each.why for each in report.left)
    assert lz.frozen().agreed
    report.undo()


@pytest.mark.usefixtures("_several", "_all_gain")
@pytest.mark.filterwarnings("ignore:agree")
def test_a_module_that_another_rank_computes_otherwise_at_some_sizes_is_left(monkeypatch):
    said = []
    monkeypatch.setattr(entrance, "said_by_all", lambda words: said.append(words) or set(words))
    model = Model().eval()
    lz.optimize(model).undo()

    def slow_at_some(search, report, **options):
        for each in report.replaced:
            each.swap.state.own_at = (True, False, False)

    monkeypatch.setattr(entrance, "time_random_rows", slow_at_some)
    lz.optimize(model).undo()
    assert len(said[0]) == len(said[1]) == 2
    assert not set(said[0]) & set(said[1])


@pytest.mark.usefixtures("_several", "_all_gain")
def test_ranks_that_do_not_agree_leave_the_model_as_it_was(monkeypatch):
    def refusing(words):
        raise FrozenChoiceError("agree", ["rank 1 did not come"])

    monkeypatch.setattr(entrance, "said_by_all", refusing)
    model = Model().eval()
    with pytest.raises(FrozenChoiceError, match="rank 1 did not come"):
        lz.optimize(model)
    assert all("forward" not in each.__dict__ for each in model.modules())


def test_what_all_ranks_say_is_common_to_them():
    assert agreement.said_by_all(["b", "a"]) == {"a", "b"}
