"""``lz.dry_run``: which kernels a model's layers would run on a named device. Nothing runs; weights need no memory."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import Module, Parameter
from torch.utils import _pytree as pytree

from layerzero.core.arguments import told
from layerzero.core.device import Device
from layerzero.core.plan import Report
from layerzero.engine.probe import Machine
from layerzero.engine.registry import REGISTRY
from layerzero.engine.scopes import holding
from layerzero.engine.transforms import ELSEWHERE, Elsewhere
from layerzero.inspection.answers import described
from layerzero.inspection.plan_document import libraries_of
from layerzero.inspection.trace import Trace, TraceRow, traced
from layerzero.tuning.measurement.workload import called
from layerzero.tuning.storage.prior import priors_of

TOKENS = 512
"""Tokens of the one sequence that stands for a language model's inputs where no inputs are given."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a model would run on a device.

    Attributes:
        device: its name.
        libraries: distribution name to version, as the answers assume them to be installed there.
        assumes: what the answers rest on, a sentence each.
        trace: the layers with their calls, kernels and reasons, and modules that make no call of LayerZero.
        reports: the whole report of each call that differs from the others: every candidate and every reason.
        refused: those of them that no kernel may run there.
    """

    device: str
    libraries: Mapping[str, str]
    assumes: tuple[str, ...]
    trace: Trace
    reports: tuple[Report, ...]
    refused: tuple[Report, ...]

    @property
    def rows(self) -> list[TraceRow]:
        """Calls that a layer would make alike, a row each."""
        return self.trace.rows

    def to_dict(self) -> dict[str, object]:
        return {
            "device": self.device,
            "libraries": dict(self.libraries),
            "assumes": list(self.assumes),
            **self.trace.as_dict(),
            "refused": [each.to_dict() for each in self.refused],
        }

    def __str__(self) -> str:
        lines = [str(self.trace)]
        lines += [f"no kernel may run {each.operation} on {self.device}:\n{each}" for each in self.refused]
        return "\n".join([*lines, *(f"assumed: {each}" for each in self.assumes)])


def dry_run(
    model: Module, inputs: Any = None, device: Device | str | None = None, *, libraries: Mapping[str, str] | None = None
) -> DryRun:
    """Tell what each layer of a model would run on a device, and why. No kernel runs, and no weight is read.

    The model is afterwards as it was: what its modules assign meanwhile is put back. What its code changes in other
    objects stays. No other thread may call the model meanwhile.

        with torch.device("meta"):
            model = Decoder(...)  # no memory for weights
        print(lz.dry_run(model, torch.ones(1, 2048, dtype=torch.long), device="H100"))

    Args:
        model: a module on the meta device, under a fake mode, or with weights; the latter's code runs on fake tensors.
        inputs: a tensor, a tuple or a dict that it is called with, whose values are not read. None: 512 tokens, for
            what has ``config.vocab_size``.
        device: as :func:`layerzero.explain` takes it: ``"H100"`` need not be here. None: the current CUDA device, or
            the CPU where there is none.
        libraries: those that are installed there, distribution name to version. None: those here; for a named device
            that has shipped times, those that the times were measured with.
    Returns: the report. What it assumes stands in it.
    Raises: TypeError for what is no module, and for inputs that are missing; KeyError for an unknown device; whatever
        the model raises, as for code that reads values.
    """
    if not isinstance(model, Module):
        raise TypeError(f"dry_run: wanted a torch.nn.Module, got {type(model).__name__}")
    asked = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    target = described(asked) if isinstance(asked, str) else asked
    here = target == _here(target)
    assumes = [f"{target.name}{'' if here else ', as the package describes it: it need not be here'}"]
    origin = "as they were named" if libraries is not None else "as they are installed here"
    if libraries is None and not here:
        libraries = shipped_libraries(target)
        origin = "with which its shipped times were measured; libraries= names others"
        if libraries is None:
            origin = f"as they are installed here, since no times ship for {target.name}; libraries= names others"
    installed = libraries_of(target, REGISTRY.operations()) if libraries is None else dict(libraries)
    assumes.append(
        f"{', '.join(f'{name} {version}' for name, version in installed.items()) or 'torch alone'}: {origin}"
    )
    if not here:
        assumes.append("nothing is built there yet, so that kernels which compile are refused; lz.warmup builds them")
    given = token_ids(model, batch=1, seq_len=TOKENS) if inputs is None else inputs
    elsewhere = Elsewhere(Machine(target, libraries))
    with holding(ELSEWHERE, elsewhere), run_on_shapes(model) as run:
        trace = traced(model, lambda: run(given))
    if not _is_meta(model):
        assumes.append("modules that lz.optimize exchanged run their own code where tensors have no memory")
    plans = [each for each in elsewhere.plans.values() if each is not None]
    return DryRun(
        target.name, installed, tuple(assumes), trace, tuple(each.report for each in plans), tuple(elsewhere.refused)
    )


def _here(target: Device) -> Device | None:
    """The device of this machine of the same kind; None if there is none."""
    if target.platform == "cpu":
        return Device.detect("cpu")
    return Device.detect(f"cuda:{target.index}") if torch.cuda.is_available() else None


def shipped_libraries(device: Device) -> dict[str, str] | None:
    """The libraries, by distribution, that a device's shipped times were measured with, torch among them.

    None where none ship for it or its kin: those here stand for them.
    """
    found: dict[str, str] = {}
    known = {each.id: each.backend for each in REGISTRY.kernels()}
    tables = priors_of(device).tables
    own = [each for each in tables if each.device == device.name]
    for table in sorted(own or tables, key=lambda each: each.date):
        found["torch"] = table.torch
        for kernel_id, version in table.versions.items():
            if version and kernel_id in known:
                found |= dict.fromkeys(known[kernel_id].distributions[:1], version)
    return found or None


def token_ids(model: Module, *, batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Token ids (batch, seq_len) for a language model. Raises: TypeError for what has no vocabulary in its config."""
    if not isinstance(getattr(getattr(model, "config", None), "vocab_size", None), int):
        wanted = "wanted inputs= for a model without config.vocab_size: a tensor, a tuple or a dict"
        raise TypeError(f"{wanted}; got {told(model)[:80]}")
    return {"input_ids": torch.ones(batch, seq_len, dtype=torch.long, device="meta")}


@contextmanager
def run_on_shapes(model: Module) -> Iterator[Callable[[Any], Any]]:
    """Give what calls a model with inputs without memory, be its weights on meta, fake, or in memory.

    Gradients are not recorded. What the modules hold is put back afterwards.
    """
    mode = _mode_of(model)

    def run(inputs: Any) -> Any:
        shaped = pytree.tree_map_only(torch.Tensor, lambda each: _shape_of(each, mode, model), inputs)
        with torch.no_grad(), mode or nullcontext():
            return called(model, shaped)

    with _put_back(model):
        if mode is None:
            _to_meta(model)
        yield run


CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)
"""What a module's state is put back in. Their subclasses are left alone: some refuse to be emptied."""


@contextmanager
def _put_back(model: Module) -> Iterator[None]:
    """Put back what modules and their containers hold now: a table that grew would have no memory afterwards."""
    kept: dict[int, tuple[Any, list[Any]]] = {}
    waiting: list[Any] = [vars(each) for each in model.modules()]
    while waiting:
        held = waiting.pop()
        if id(held) in kept or type(held) not in (*CONTAINERS, tuple):
            continue
        kept[id(held)] = held, [*held.items()] if isinstance(held, dict) else [*held]
        waiting += held.values() if isinstance(held, dict) else held
    try:
        yield
    finally:
        for held, before in kept.values():
            if isinstance(held, tuple) or _same(held, before):
                continue
            held.clear()
            (held.update if isinstance(held, (dict, set)) else held.extend)(before)


def _same(held: Any, before: list[Any]) -> bool:
    """Whether a container holds the very objects that it held before."""
    if len(held) != len(before):
        return False
    if not isinstance(held, dict):
        return all(now is then for now, then in zip(held, before, strict=True))
    return all(key is name and now is then for (key, now), (name, then) in zip(held.items(), before, strict=True))


def _to_meta(model: Module) -> None:
    """Replace what lies in memory while weights lie on meta, as buffers do that Accelerate leaves there."""
    for module in model.modules():
        stores: tuple[dict[str, Any], ...] = vars(module), module._parameters, module._buffers
        for held in stores:
            for name, each in held.items():
                if isinstance(each, torch.Tensor) and not each.is_meta:
                    moved = each.detach().to("meta")
                    held[name] = Parameter(moved, each.requires_grad) if isinstance(each, Parameter) else moved


def _tensors(model: Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _is_meta(model: Module) -> bool:
    return any(each.is_meta for each in model.parameters())


def _mode_of(model: Module) -> FakeTensorMode | None:
    """The fake mode that a model's code runs in; None for one on the meta device."""
    fake = next((each for each in _tensors(model) if isinstance(each, FakeTensor)), None)
    if fake is not None:
        return fake.fake_mode
    return None if _is_meta(model) else FakeTensorMode(allow_non_fake_inputs=True)


def _shape_of(tensor: torch.Tensor, mode: FakeTensorMode | None, model: Module) -> torch.Tensor:
    """A tensor of these sizes without memory, where the model's tensors seem to lie."""
    if mode is None:
        return tensor.to("meta")
    if isinstance(tensor, FakeTensor):
        return tensor
    device = next((each.device for each in _tensors(model)), torch.device("cpu")) if tensor.is_meta else tensor.device
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
