"""Modules whose code may compute something else for another input, in another process or at another time are left."""

from __future__ import annotations

import cProfile
import functools
import math
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import layerzero as lz
from decoders import made, tokens
from layerzero.integrations.optimize.modules.products import block
from layerzero.integrations.optimize.swaps.candidate import Candidate, compared, unfollowed

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")

OF_ROWS, MANY, OFFSET = {2: 1.0, 6: 1.0}, [False] * 100, 0


def fails(x: Tensor) -> bool:
    try:
        x.view(-1, 3, x.shape[-1])
    except RuntimeError:
        return False
    return False


ASKS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "inference mode": (lambda _: torch.is_inference_mode_enabled(), "is_inference_mode_enabled"),
    "gradients": (lambda _: torch.is_grad_enabled(), "is_grad_enabled"),
    "wants gradients": (lambda x: x.requires_grad, "Tensor.requires_grad"),
    "threads": (lambda _: torch.get_num_threads() > 1000, "get_num_threads"),
    "environment": (lambda _: os.environ.get("LZ_NO_SUCH"), "os.__getitem__"),
    "process": (lambda _: os.getpid() == 0, "getpid"),
    "time": (lambda _: time.time() < 0, "time.time"),
    "random": (lambda _: random.random() > 2, "random"),
    "random numbers": (lambda x: torch.rand(1) if x.ndim is None else x.sub_(torch.rand(1) * 0) is None, "torch.rand"),
    "default dtype": (lambda _: torch.get_default_dtype() is torch.float64, "get_default_dtype"),
    "device": (lambda x: x.device.index == 1, "Tensor.device"),
    "deterministic": (lambda _: torch.are_deterministic_algorithms_enabled(), "are_deterministic_algorithms_enabled"),
    "matmul": (lambda _: torch.backends.cuda.matmul.allow_tf32, "torch.backends"),
    "rows": (lambda x: x.shape[:-1].numel() > 1000, "compares how many rows"),
    "unbind": (lambda x: len(x.unbind()) > 1000, "compares how many rows"),
    "turned": (lambda x: x.mT.shape[-1] > 1000, "compares how many rows"),
    "index": (lambda x: MANY[x.shape[0]], "compares how many rows"),
    "errors": (lambda x: fails(x), "compares how many rows"),
    "loop": (lambda x: sum(1 for _ in x) > 1000, "compares how many rows"),
    "bytes": (lambda x: x.numel() * x.element_size() > 1e9, "compares how many rows"),
    "a table": (lambda x: OF_ROWS.get(x.shape[0], 0.0) == 0.0, "compares how many rows"),
    "text": (lambda x: len(str(x.shape[0])) > 3, "compares how many rows"),
    "bits": (lambda x: x.shape[0].bit_length() > 10 or x.shape[0] & 1024, "compares how many rows"),
    "logarithm": (lambda x: math.log(x.shape[0]) > math.pi, "compares how many rows"),
    "count": (lambda x: any(each > 1000 for each in range(OFFSET + x.shape[0])), "compares how many rows"),
    "function": (lambda _: min([0.0], key=time.gmtime) > 0, "reads time"),
}

VALUES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "clamp": (lambda x: torch.clamp(x, -1e30, 1e30), "clamp"),
    "nan_to_num": (lambda x: x.nan_to_num(), "nan_to_num"),
    "where": (lambda x: torch.where(x.abs() > 1e20, 0.0, x), "gt"),
    "bits": (lambda x: (x.view(torch.int16) & -1).view(x.dtype), "view(dtype)"),
    "product": (lambda x: x * (x < 1e20), "lt"),
    "soft limit": (lambda x: 1e6 * torch.tanh(x / 1e6), "for more or larger rows"),
    "cast": (lambda x: x.half().to(x.dtype), "for more or larger rows|off by"),
}


class Block(nn.Module):
    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.change = nn.Linear(16, 24), nn.Linear(24, 16), change

    def forward(self, x: Tensor) -> Tensor:
        rows = self.down(functional.gelu(self.up(x)))
        return rows * 2 if self.change(x) else rows


class Changing(Block):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.change(self.down(functional.gelu(self.up(x))))
        return made


def why_left(module: nn.Module) -> str:
    found = block(module.eval())
    return compared(found) if isinstance(found, Candidate) else str(found)


def test_a_block_of_its_own_is_taken() -> None:
    assert why_left(Block(lambda _: False)) == ""
    assert why_left(Changing(lambda x: x)) == ""


class Usual(Block):
    """What research code often does: sizes for views, settings for indexes and counts, messages that are off."""

    place, times, debug = 1, 1, False
    gates = (functional.relu, functional.gelu)

    def forward(self, x: Tensor) -> Tensor:
        many, length, width = x.shape
        rows = self.up(x.reshape(many * length, width)) * (math.sqrt(2.0 / math.pi) / math.sqrt(2.0 / math.pi))
        for _ in range(self.times):
            rows = self.gates[self.place](rows)
        if self.debug:
            print(rows.shape)  # noqa: T201
            warnings.warn("on", stacklevel=2)
        made: Tensor = self.down(rows)
        return made.view(many, length, width)


def gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it is old, which research code does not mind
    scripted = torch.jit.script(gelu)


class Scripted(Block):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(scripted(self.up(x)))
        return made


@pytest.mark.parametrize("kind", [Usual, Scripted])
def test_a_block_that_does_what_is_usual_is_taken(kind: type[Block]) -> None:
    assert why_left(kind(lambda _: False)) == ""


@pytest.mark.parametrize("name", sorted(ASKS))
def test_a_block_that_asks_is_left(name: str) -> None:
    asks, told = ASKS[name]
    assert told in why_left(Block(asks))


@pytest.mark.parametrize("name", sorted(VALUES))
def test_a_block_that_changes_few_values_is_left(name: str) -> None:
    changes, told = VALUES[name]
    assert any(each in why_left(Changing(changes)) for each in told.split("|"))


FACTOR, OF_CLASS = 1.0, SimpleNamespace(scale=1.0)


class Settings:
    """Settings whose names are not those of its attributes."""

    factors: ClassVar[dict[str, float]] = {"all": 1.0}
    factor = 1.0

    def __init__(self) -> None:
        self._scale = 1.0

    @property
    def scale(self) -> float:
        return self._scale


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale


SETTINGS, SLOTTED, BOUND = Settings(), Slotted(), Slotted().scaled


SEVERAL, ELSEWHERE = [SLOTTED], nn.Identity()


def helped(x: Tensor) -> Tensor:
    return deeper(x)


def deeper(x: Tensor) -> Tensor:
    return x * FACTOR


def doubling(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*given: Any) -> Any:
        return function(*given) * FACTOR

    return around


class Around(Block):
    @doubling
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(functional.gelu(self.up(x)))
        return made


def kept() -> tuple[Callable[[Tensor], Tensor], dict[str, float]]:
    held = {"factor": 1.0}
    return lambda x: x * held["factor"], held


BY_CELL, HELD = kept()

FOLLOWED: dict[str, tuple[Callable[[], nn.Module], tuple[Any, str]]] = {
    "helper": (lambda: Changing(helped), (globals(), "FACTOR")),
    "decorator": (lambda: Around(helped), (globals(), "FACTOR")),
    "property": (lambda: Changing(lambda x: x * SETTINGS.scale), (vars(SETTINGS), "_scale")),
    "class": (lambda: Changing(lambda x: x * Settings.factor), (Settings, "factor")),
    "dict of a class": (lambda: Changing(lambda x: x * Settings.factors["all"]), (Settings.factors, "all")),
    "name as text": (lambda: Changing(lambda x: x * getattr(OF_CLASS, "scale")), (vars(OF_CLASS), "scale")),  # noqa: B009
    "closure": (lambda: Changing(BY_CELL), (HELD, "factor")),
}


@pytest.mark.parametrize("name", sorted(FOLLOWED))
def test_a_setting_is_followed_wherever_it_lies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, (where, key) = FOLLOWED[name]
    module, rows = make().eval(), torch.randn(2, 3, 16)
    found = block(module)
    assert isinstance(found, Candidate)
    assert compared(found) == ""
    found.swap.on()
    with torch.no_grad():
        before = module(rows)
        assert found.swap.state.stamp is not None
        assert found.swap.state.stamp.holds()
        if isinstance(where, type):
            monkeypatch.setattr(where, key, 2.0)
        else:
            monkeypatch.setitem(where, key, 2.0)
        torch.testing.assert_close(module(rows), type(module).forward(module, rows))
        assert not torch.allclose(module(rows), before)


class Counting(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        made: Tensor = self.down(functional.gelu(self.up(x)))
        return made


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (Changing(lambda x: x * SLOTTED.scale), "reads SLOTTED"),
        (Changing(lambda x: x * (2 if sys.flags.optimize > 9 else 1)), "reads sys"),
        (Changing(BOUND), "reads change"),
        (Changing(lambda x: x * SEVERAL[0].scale), "reads SEVERAL"),
        (Changing(lambda x: ELSEWHERE(x)), "reads ELSEWHERE"),
        (Counting(helped), "writes into its attributes"),
    ],
    ids=["slots", "sys", "method", "list", "module", "writes"],
)
def test_a_setting_that_nothing_tells_of_is_a_reason(module: nn.Module, told: str) -> None:
    assert told in why_left(module)


def turned(forward: Callable[..., Any], dtype: torch.dtype = torch.float32) -> Any:
    """A Llama whose layers have a forward of another's."""
    model = made().to(dtype)
    kind = type(model.model.layers[0])
    for each in model.model.layers:
        each.__class__ = type(
            "Turned", (kind,), {"forward": lambda self, x, **named: forward(kind.forward, self, x, named)}
        )
    return model


def layers_left(model: Any) -> str:
    report = lz.optimize(model, padding=False)
    assert "layer" not in {each.kind for each in report.replaced}
    return "\n".join(each.why for each in report.left if each.module == "Turned")


@pytest.mark.parametrize("name", sorted(ASKS))
def test_a_layer_that_asks_is_left(name: str) -> None:
    asks, told = ASKS[name]
    model = turned(lambda stock, self, x, named: stock(self, x, **named) * (2 if asks(x) else 1))
    assert told in layers_left(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(VALUES))
def test_a_layer_that_changes_few_values_is_left(name: str, dtype: torch.dtype) -> None:
    changes, told = VALUES[name]
    why = layers_left(turned(lambda stock, self, x, named: changes(stock(self, x, **named)), dtype))
    assert any(each in why for each in told.split("|")), why


def test_a_function_that_was_put_into_a_library_is_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    stock = kind.forward

    def forward(self: Any, x: Tensor, **named: Any) -> Any:
        return stock(self, x, **named) * (2 if os.environ.get("LZ_NO_SUCH") else 1)

    monkeypatch.setattr(kind, "forward", forward)
    report = lz.optimize(made())
    assert "layer" not in {each.kind for each in report.replaced}
    assert any("os.__getitem__" in each.why for each in report.left)


def test_models_that_share_a_config_keep_their_attention() -> None:
    model = made()
    other = type(model)(model.config).eval()
    report = lz.optimize(model)
    assert "attention" not in {each.kind for each in report.replaced}
    assert any("its config is also that of another LlamaForCausalLM" in each.why for each in report.left)
    assert other.config._attn_implementation == "sdpa"
    del other
    report.undo()
    lz.optimize(model)
    with torch.no_grad():
        model(tokens())


def test_a_librarys_wrapper_reads_what_it_likes():
    """Transformers wraps functions that take old names: the wrapper bears the name of the function's module."""
    space = {"__name__": "transformers.wrapping", "functools": functools, "sys": sys}
    code = "def around(own):\n    return functools.wraps(own)(lambda *given: sys.flags and own(*given))"
    exec(code, space)

    class Wrapped(nn.Module):
        forward = space["around"](lambda self, x: x * 2)

    assert Wrapped.forward.__module__ == __name__
    assert not unfollowed(Wrapped())


def test_a_profile_goes_on_counting():
    with cProfile.Profile() as profile:
        lz.optimize(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)).eval())
        called = SimpleNamespace(after=lambda: None)
        called.after()
    assert any(code == called.after.__code__ for code, *_ in profile.getstats())
