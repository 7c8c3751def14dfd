"""After any change of a module, of what lies below it, or of a copy, it gives what its own code gives."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

import layerzero as lz
from layerzero.core.indices import IN_C
from layerzero.integrations.optimize.modules.norms import norm
from layerzero.integrations.optimize.modules.products import linear, linear_then
from layerzero.integrations.optimize.swaps import stamp
from layerzero.integrations.optimize.swaps.candidate import Candidate, compared
from layerzero.integrations.optimize.swaps.stamp import Stamp
from layerzero.integrations.optimize.times.report import Optimized, Replaced
from layerzero.ops.linear.glance import LOOKS

Change = Callable[[nn.Module, ExitStack], Any]

FACTOR = 1.0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.sizes = nn.Parameter(torch.rand(16) + 0.5), 1e-5, [16]
        self.settings = SimpleNamespace(inner=SimpleNamespace(factors=[1.0]), dtype=None)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.settings.dtype or x.dtype) * getattr(self.settings, "factor", 1.0)
        return self.scaled(x) * self.weight * len(self.sizes) * self.settings.inner.factors[0] * FACTOR

    def scaled(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop, self.act = nn.Linear(16, 24), nn.Linear(24, 16), nn.Dropout(0.5), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.act(self.up(x))))


class Begun(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.drop, self.intermediate_act_fn = nn.Linear(16, 16), nn.Dropout(0.5), functional.gelu

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.intermediate_act_fn(self.dense(x)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Scaled(), Block(), nn.Sequential(Begun()), nn.LayerNorm(16), nn.Linear(16, 16)).eval()


def optimized(module: nn.Module) -> list[nn.Module]:
    """Everything that may be replaced, whether it gains anything or not."""
    lz.optimize(module)
    begun, last, product = module[2][0], module[3], module[4]  # type: ignore[index]
    for found in (linear_then(begun), norm(last), linear(product)):
        assert isinstance(found, Candidate)
        if not stamp_of(found.swap.module):
            assert compared(found) == ""
            found.swap.on()
    replaced = [each for each in module.modules() if stamp_of(each)]
    assert [type(each) for each in replaced] == [Scaled, Block, Begun, nn.LayerNorm, nn.Linear]
    return replaced


@functools.cache
def one_for_copies() -> nn.Module:
    """Optimized, and written by no test: copies of it are LayerZero's, too."""
    made = model()
    optimized(made)
    return made


def stamp_of(module: nn.Module) -> Stamp | None:
    state: Any = vars(module).get("_layerzero")
    return None if state is None else state.stamp


def outputs(module: nn.Module) -> Tensor:
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    with torch.no_grad():
        return module(x)


def hooked(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return 2 * output


def patched(name: str) -> Change:
    """A method of the class, or a function of torch, that gives twice as much."""

    def change(module: nn.Module, until: ExitStack) -> None:
        where: Any = functional if hasattr(functional, name) else type(module)
        own = getattr(where, name)
        until.enter_context(mock.patch.object(where, name, lambda *given, **named: 2 * own(*given, **named)))

    return change


def patched_number(_: nn.Module, until: ExitStack) -> None:
    until.enter_context(mock.patch.dict(globals(), FACTOR=2.0))


def own_forward(module: nn.Module, _: ExitStack) -> None:
    vars(module)["forward"] = MethodType(lambda self, x: 3 * type(self).forward(self, x), module)


def other_class(module: nn.Module, _: ExitStack) -> None:
    module.__class__ = type("Other", (type(module),), {"forward": lambda _, x: torch.tanh(x) + 1})


def set_to(name: str, value: Any) -> Change:
    return lambda module, _: setattr(module, name, value)


CHANGES: dict[str, tuple[str, Change]] = {
    **{f"{path} trains": (path, lambda module, _: module.train()) for path in ("1.drop", "1", "2.0.drop", "1.up", "0")},
    **{
        f"{path} has a hook": (path, lambda module, _: module.register_forward_hook(hooked))
        for path in ("0", "1", "1.drop", "1.act", "1.up", "2.0.dense", "2.0.drop", "3", "4")
    },
    "a hook before": ("1.down", lambda module, _: module.register_forward_pre_hook(lambda _, given: (2 * given[0],))),
    "a hook everywhere": (
        "",
        lambda _, until: until.callback(nn.modules.module.register_module_forward_hook(hooked).remove),
    ),
    **{f"{path} has a forward": (path, own_forward) for path in ("1.drop", "1.act", "1.down", "2.0.dense", "1", "0")},
    **{f"{path} is of another class": (path, other_class) for path in ("0", "1.drop", "1.act", "3", "4")},
    **{
        f"{path} is exchanged": (
            path,
            lambda module, _: setattr(module, name, nn.Sequential(nn.Dropout(0.3), nn.Tanh())),
        )
        for path, name in (("1", "drop"), ("1", "act"), ("2.0", "drop"))
    },
    "a product is exchanged": ("1", lambda module, _: setattr(module, "up", nn.Linear(16, 24, bias=False))),
    "no bias": ("1.up", set_to("bias", None)),
    "eps of a norm": ("0", set_to("eps", 1.0)),
    "eps of torch's norm": ("3", set_to("eps", 1.0)),
    "a list of a norm": ("0", lambda module, _: module.sizes.append(16)),  # type: ignore[operator]
    "a setting": ("0", lambda module, _: module.settings.inner.factors.__setitem__(0, 2.0)),  # type: ignore[union-attr]
    "a setting that was not there": ("0", lambda module, _: setattr(module.settings, "factor", -2.0)),
    "a dtype that was none": ("0", lambda module, _: setattr(module.settings, "dtype", torch.bfloat16)),
    "a number of the file": ("0", patched_number),
    "a method on the instance": ("0", set_to("scaled", torch.sin)),
    "approximate": ("1.act", set_to("approximate", "tanh")),
    "an activation": ("2.0", set_to("intermediate_act_fn", functional.relu)),
    "p": ("1.drop", lambda module, _: (module.train(), setattr(module, "p", 0.9))),
    **{f"{name} of {path}'s class": (path, patched(name)) for path, name in (("0", "scaled"), ("1", "forward"))},
    **{f"forward of {path}'s class": (path, patched("forward")) for path in ("0", "1.act", "2.0", "3", "4", "1.up")},
    **{f"functional.{name}": ("0", patched(name)) for name in ("linear", "gelu", "layer_norm", "dropout")},
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("way", ["in C", "in Python"])
def test_a_change_after_optimize_counts(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "in C" and stamp.unchanged is stamp.python_unchanged:
        pytest.skip("the extension was not built")
    if way == "in Python":
        monkeypatch.setattr(stamp, "unchanged", stamp.python_unchanged)
        monkeypatch.setattr(stamp, "version", stamp.python_version)
        monkeypatch.setattr(stamp, "places", lambda made, _: len(made))
    path, change = CHANGES[name]
    stock = model()
    if way == "in C":
        mine = model()
        replaced = optimized(mine)
    else:
        mine = copy.deepcopy(one_for_copies())
        replaced = [each for each in mine.modules() if stamp_of(each)]
        assert len(replaced) == 5
    before = outputs(stock)
    torch.testing.assert_close(outputs(mine), before)
    assert all(each.holds() for each in map(stamp_of, replaced) if each)
    with ExitStack() as until:
        once = change.__qualname__.startswith("patched") or path == ""
        for each in (mine,) if once else (mine, stock):
            torch.manual_seed(3)
            change(each.get_submodule(path), until)
        expected = outputs(stock)
        for _ in range(2):
            torch.testing.assert_close(outputs(mine), expected)
        assert "trains" in name or not torch.equal(expected, before), "the change must show"
    if once:  # and it counts no more once it is taken back
        torch.testing.assert_close(outputs(mine), before)
        assert all(each.holds() for each in map(stamp_of, replaced) if each)


WRITES: dict[str, Callable[[Any], Any]] = {
    "fill_": lambda weight: weight.fill_(0.5),
    "data": lambda weight: weight.data.mul_(3),
    "other data": lambda weight: setattr(weight, "data", torch.ones_like(weight)),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("path", ["0", "1.up", "1.down", "2.0.dense", "3", "4"])
def test_a_write_into_a_weight_counts(name: str, path: str) -> None:
    mine, stock = copy.deepcopy(one_for_copies()), model()
    outputs(mine)
    with torch.no_grad():
        for each in (mine, stock):
            WRITES[name](each.get_submodule(path).weight)
    torch.testing.assert_close(outputs(mine), outputs(stock))


class Handing(nn.Module):
    """Hands names that it lacks on to its module, as torch.compile's and PEFT's wrappers do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.module(given) + 1.0


def test_a_wrapper_that_hands_names_on_is_copied_itself() -> None:
    wrapper = Handing(copy.deepcopy(one_for_copies())[1])
    twin = copy.deepcopy(wrapper)
    assert type(twin) is Handing
    assert twin.module is not wrapper.module
    assert stamp_of(twin.module) is not None


@pytest.mark.parametrize("path", ["0", "1", "2.0", "3", "4"])
@pytest.mark.parametrize("way", ["copy", "replica", "pickle", "deepcopy"])
def test_copies_compute_with_their_own_weights(path: str, way: str) -> None:
    mine, stock = copy.deepcopy(one_for_copies()), model()
    before = outputs(mine)
    module, other = mine.get_submodule(path), stock.get_submodule(path)
    if way == "pickle":
        twin = pickle.loads(pickle.dumps(module))  # what was pickled a line before
    elif way == "replica":
        twin = module._replicate_for_data_parallel()
        twin._modules = {name: each._replicate_for_data_parallel() for name, each in module._modules.items()}  # type: ignore[union-attr]
    else:
        twin = getattr(copy, way)(module)
    if way == "copy":
        twin._parameters = dict(module._parameters)
        twin._modules = {name: copy.copy(each) for name, each in module._modules.items()}
    assert (stamp_of(twin) is not None) == (way == "deepcopy")
    assert set(vars(twin)) - {"_is_replica", "_former_parameters"} == set(vars(module if way == "deepcopy" else other))
    for each, one in zip(twin.modules(), other.modules(), strict=True):
        each._parameters = {  # type: ignore[assignment]
            name: nn.Parameter(torch.full_like(weight, 0.25)) for name, weight in one.named_parameters(recurse=False)
        }
    with torch.no_grad():
        for one in other.parameters():
            one.fill_(0.25)
        x = torch.randn(3, 16)
        torch.testing.assert_close(twin(x), other(x))
    torch.testing.assert_close(outputs(mine), before)


def test_a_deep_copy_is_optimized_and_looks_at_its_own_modules() -> None:
    mine = model()
    optimized(mine)
    twin = copy.deepcopy(mine)
    torch.testing.assert_close(outputs(twin), outputs(mine))
    stamps = [each for module in twin.modules() if (each := stamp_of(module))]
    assert len(stamps) == 5
    assert all(each.holds() for each in stamps)
    mine[1].drop.train()  # type: ignore[index, union-attr]
    assert all(each.holds() for each in stamps)
    other = copy.deepcopy(mine)
    other.eval()
    assert stamp_of(other[1]).holds()  # type: ignore[index, union-attr]
    mine[1].act.approximate = "tanh"  # type: ignore[index, union-attr]
    assert not stamp_of(copy.deepcopy(mine[1])).holds()  # type: ignore[index, union-attr]


def test_what_means_nothing_is_no_change() -> None:
    mine = model()
    replaced = optimized(mine)
    scaled = mine[0]  # type: ignore[index]
    scaled.eps, scaled.sizes = float("1e-5"), list(scaled.sizes)
    mine.requires_grad_(False)
    mine.load_state_dict(mine.state_dict())
    vars(scaled)["_hf_hook"] = object()
    mine[1].drop.register_full_backward_hook(hooked)  # type: ignore[index, union-attr]
    outputs(mine)
    assert all(each.holds() for each in map(stamp_of, replaced) if each)


def test_c_and_python_agree_about_versions_of_classes() -> None:
    one = type("One", (nn.Module,), {"size": 1})
    two = type("Two", (one,), {})
    seen = stamp.version(two), stamp.python_version(two)
    assert seen == (stamp.version(two), stamp.python_version(two))
    one.size = 2  # type: ignore[attr-defined]
    assert stamp.version(two) != seen[0]
    assert stamp.python_version(two) != seen[1]


def _write_by_numpy(weight: Any) -> None:
    pytest.importorskip("numpy", reason="needs NumPy")
    weight.detach().numpy()[7, 9] = 50.0


UNCOUNTED: dict[str, Callable[[Any], Any]] = {
    "a row of data": lambda weight: weight.data[3].zero_(),
    "a column of data": lambda weight: weight.data[:, 5].mul_(2),
    "an element by numpy": _write_by_numpy,
    "two rows change places": lambda weight: weight.data.copy_(weight.detach()[[1, 0, *range(2, len(weight))]]),
    "the last element": lambda weight: weight.data.view(-1)[-1:].add_(1),
}


@pytest.mark.parametrize("name", UNCOUNTED)
@pytest.mark.parametrize("size", [16, 200])
@pytest.mark.parametrize("way", ["in C", "in Python"])
def test_a_write_that_torch_does_not_count_is_seen(name: str, size: int, way: str) -> None:
    with mock.patch.dict(IN_C):
        if way == "in Python":
            IN_C.clear()
        weight = nn.Parameter(torch.randn(size, 24), requires_grad=False)
        packed = lz.PackedWeight(weight)
        packed.form("a kernel", lambda dense: (dense.clone(), dense.nbytes))
        assert not any(packed.is_stale for _ in range(2 * LOOKS)), "nothing was written"
        UNCOUNTED[name](weight)
        looks = next(number for number in range(1, LOOKS + 1) if packed.is_stale)
        assert packed.is_late == (looks > 1)
        assert packed.is_stale, "until it is packed anew"
        packed.refresh()
        assert not packed.is_late
        packed.form("a kernel", lambda dense: (dense.clone(), dense.nbytes))
        assert not any(packed.is_stale for _ in range(2 * LOOKS))


def test_a_write_behind_the_last_whole_word_is_seen() -> None:
    weight = nn.Parameter(torch.randn(3, 5).bfloat16(), requires_grad=False)
    packed = lz.PackedWeight(weight)
    packed.form("a kernel", lambda dense: (dense.clone(), dense.nbytes))
    weight.data[-1, -1] += 1
    assert any(packed.is_stale for _ in range(2 * LOOKS))


@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (3, 4)])
def test_a_write_to_a_weight_of_few_words_is_seen_at_once(shape: tuple[int, int]) -> None:
    weight = nn.Parameter(torch.randn(shape), requires_grad=False)
    packed = lz.PackedWeight(weight)
    assert not packed.is_stale
    weight.data[-1, -1] += 1  # as an adapter is merged
    assert packed.is_stale


@pytest.mark.parametrize("name", UNCOUNTED)
@pytest.mark.parametrize("path", ["1.up", "1.down", "2.0.dense", "4"])
@pytest.mark.usefixtures("packs")
@pytest.mark.filterwarnings("ignore:lz.optimize. a weight")
def test_a_packed_weight_follows_a_write_that_torch_does_not_count(name: str, path: str) -> None:
    mine, stock = model(), model()
    replaced = optimized(mine)
    outputs(mine)
    for each in (mine, stock):
        UNCOUNTED[name](each.get_submodule(path).weight)
    expected = outputs(stock)
    seen = [torch.allclose(outputs(mine), expected, rtol=1e-4, atol=1e-5) for _ in range(40)]
    assert all(seen[20:])  # of so small a weight all is one part
    states = [vars(each)["_layerzero"] for each in replaced if "late" in vars(vars(each)["_layerzero"])]
    assert sum(state.late for state in states) == (0 if all(seen) else 1)


def test_a_write_that_was_seen_late_is_told() -> None:
    module = nn.Linear(64, 64).eval()
    found = linear(module)
    assert isinstance(found, Candidate)
    found.swap.on()
    state = vars(module)["_layerzero"]
    state.packed[0].form("a kernel", lambda dense: (dense.clone(), dense.nbytes))
    module.weight.data[-1, -1] += 1
    assert any(state.packed[0].is_stale for _ in range(LOOKS))
    with pytest.warns(lz.LayerZeroWarning, match="a weight .64 x 64. was written into past torch's count"):
        assert state.renew(module.weight)
    report = Optimized([Replaced("", "Linear", "linear", "", None, None, found.swap)])
    assert "1 writes into weights were seen late" in str(report)


def test_a_deep_copy_of_a_module_that_was_parametrized_computes_what_it_does() -> None:
    class Half(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 0.5

    mine = model()
    optimized(mine)
    parametrize.register_parametrization(mine[4], "weight", Half())  # type: ignore[index]
    torch.testing.assert_close(outputs(copy.deepcopy(mine)), outputs(mine))
