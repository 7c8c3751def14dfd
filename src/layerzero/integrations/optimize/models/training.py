"""Training steps of a model: its norms by one kernel each, and a language model's loss without all of its logits.

The loss of a causal language model of Transformers is the model's own forward, in which the output layer gives on what
it gets, and the loss function is ``lz.linear_cross_entropy`` of that. Outputs have no logits then: they are what is
spared. A forward that does anything with logits besides runs as it is. One step of the model proves each kind, by loss
and gradients, and a kind that makes a step slower goes again.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, functional
from torch.nn.parallel import DataParallel, DistributedDataParallel

import layerzero as lz
from layerzero.core.errors import InvalidCallError, in_short
from layerzero.engine.transforms import in_transform
from layerzero.integrations.optimize.modules.norms import Norm, norm
from layerzero.integrations.optimize.swaps.candidate import TOLERANCE, Candidate, compared, refusal
from layerzero.integrations.optimize.swaps.swap import ABSENT, MARK, State, Swap, as_forward, by_name, is_dense
from layerzero.integrations.optimize.times import timing
from layerzero.integrations.optimize.times.report import NO_TIME, Left, Optimized, Replaced, switch_all

NORM, LOSS = "norm in training", "loss of a language model"
LOSES = -0.01
"""A kind by which steps gain less than this, in parts of a step, goes again."""

ACCUMULATED = 10.0
"""How many times a forward's difference gradients may have: a sum over rows, through all layers."""

TOKENS = {"cpu": (2, 64), "cuda": (2, 1024)}
"""Rows and length of the texts that are tried without inputs. 128 tokens say nothing of a GPU's steps of thousands: a
step of them took 1.74 times as long with a loss in chunks of 4 rows (Llama of 1B parameters, H200, 2026-11-27)."""

STEP = "steps of training"

CHANGED = "its forward changes or reads its logits (a cap, a scale, a loss of its own)"
UNPROVED = "a step with these inputs does not compute its loss: wanted labels, and no argument that asks for more"

NO_LOSS = "a step gives no loss with gradients, which would prove it; wanted outputs.loss, and no merged adapter"
REENTRANT = "reentrant checkpoints give no gradients that prove a step; pass use_reentrant=False to them"


class _NoLossError(RuntimeError):
    """No weight that wants a gradient has a part in what a step gives."""


TAKEN = frozenset(
    ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache", "labels", "num_items_in_batch")
)
"""Arguments of calls that LayerZero computes the loss of; a call with any other is the model's own."""


@as_forward
def _norm(self: Module, input: Tensor = ABSENT, /, *others: Any, **named: Any) -> Any:
    if input is ABSENT:
        return by_name(_norm, self, named)
    state: Any = self.__dict__.get(MARK)
    own = None
    if state is not None and not others and not named and not torch.compiler.is_compiling() and not in_transform():
        stamp = state.stamp  # once: undo takes it away
        own = state.weights_of(self) if stamp is not None and stamp.last.same else None
    if own is None or type(input) is not Tensor or not is_dense(own[0]) or input.dtype is not own[0].dtype:
        return type(self).forward(self, input, *others, **named)
    if state.form == "rms":
        return lz.rms_norm(input, own[0], state.eps_for(input))
    return lz.rms_norm(input.float(), 1.0 + own[0].float(), state.eps_for(input)).to(input.dtype)


class _TouchedError(Exception):
    """A forward does something with logits besides giving them to its loss function and into its outputs."""


class _Rows(Tensor):
    """Stands for logits where there are none: it can be handed on, and whatever is computed or read of it raises."""

    hidden: Tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if function is Tensor.contiguous:  # OPT's: the same numbers
            return given[0]
        raise _TouchedError


def _give_on(hidden: Tensor) -> Tensor:
    """The forward of an output layer that is passed by."""
    rows = hidden.new_empty(0).as_subclass(_Rows)
    rows.hidden = hidden
    return rows


class Head(State):
    """The output layer of a causal language model, and the loss function and forward that the proof was of.

    Attributes:
        passes: whether the forward gives the layer's logits to its loss function as they are; None before a call.
    """

    asks = False
    passes: bool | None = None

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layer: Linear = model.get_output_embeddings()
        self.function, self.forward = model.loss_function, type(model).forward

    def serves(self, model: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
        """Whether a call's loss is the one that was proved; any other call is the model's own."""
        if self.passes is False or not (model.training and torch.is_grad_enabled()):
            return False
        if torch.compiler.is_compiling() or in_transform():
            return False
        asked = {name for name, each in named.items() if each is not None}  # PEFT hands all on that it knows
        if len(given) > 1 or not asked <= TAKEN or not isinstance(named.get("labels"), Tensor):
            return False
        same = model.loss_function is self.function and type(model).forward is self.forward
        return same and model.config.return_dict and not _head_problem(model, self.layer)

    @contextmanager
    def passed_by(self, model: Any) -> Iterator[None]:
        """The layer gives on what it gets, and the loss function takes that."""
        own, size = model.__dict__.get("_loss_function"), self.layer.weight.shape[0]

        def loss(logits: Any, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **more: Any) -> Tensor:
            if type(logits) is not _Rows or vocab_size != size or any(each is not None for each in more.values()):
                raise _TouchedError
            return _loss(logits.hidden, self.layer.weight, self.layer.bias, labels, num_items_in_batch)

        self.layer.__dict__["forward"], model.__dict__["_loss_function"] = _give_on, loss
        try:
            yield
        finally:
            del self.layer.__dict__["forward"], model.__dict__["_loss_function"]
            if own is not None:
                model.__dict__["_loss_function"] = own


def _head_problem(model: Any, layer: Any) -> str:
    """Why rows may not pass an output layer by; empty where nothing speaks against it."""
    if model.get_output_embeddings() is not layer or type(layer) is not Linear:
        kind = type(layer)
        return f"its output layer is {kind.__module__}.{kind.__qualname__}, wanted torch.nn.Linear"
    return refusal(layer)


@as_forward
def _causal(self: Any, *given: Any, **named: Any) -> Any:
    state: Any = self.__dict__.get(MARK)
    if state is None or not state.serves(self, given, named):
        return type(self).forward(self, *given, **named)
    try:
        with state.passed_by(self):
            outputs = type(self).forward(self, *given, **named)
    except _TouchedError:
        state.passes = False
        return type(self).forward(self, *given, **named)
    state.passes = True
    return type(outputs)(**{name: each for name, each in outputs.items() if type(each) is not _Rows})


def _loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, count: Any) -> Tensor:
    """The mean over all next tokens, or their sum by how many a caller counts, in float32, as Transformers has it."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    following = functional.pad(labels, (0, 1), value=-100)[..., 1:].to(hidden.device)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    reduction = "mean" if count is None else "sum"
    loss: Tensor = lz.linear_cross_entropy(hidden, weight, following, bias=bias, reduction=reduction, out_dtype=wide)
    return loss if count is None else loss / (count.to(loss.device) if isinstance(count, Tensor) else count)


def _norms(root: Module) -> Iterator[Replaced | Left]:
    """The norms by root mean square whose code is no function of torch already."""
    for path, module in root.named_modules():
        if type(module) is torch.nn.RMSNorm:
            continue
        found = norm(module) if not module._modules else None
        if isinstance(found, str):
            yield Left(path, type(module).__name__, refusal(module) or found)
        if not isinstance(found, Candidate) or not isinstance(found.swap.state, Norm) or found.stock:
            continue
        state = found.swap.state
        try:
            why = refusal(module) or ("no kernel for gradients" if state.form == "layer" else compared(found))
        except InvalidCallError as error:
            why = in_short(error)
        if why:
            yield Left(path, type(module).__name__, why)
            continue
        swap = Swap(module, _norm, Norm(state.form, state.eps))
        yield Replaced(path, type(module).__name__, NORM, found.calls, found.kernel, found.error, swap)


def _losses(root: Module) -> Iterator[Replaced | Left]:
    library: Any = sys.modules.get("transformers.loss.loss_utils")
    for path, module in root.named_modules() if library is not None else ():
        own = hasattr(type(module), "get_output_embeddings")  # not of what hands names on to a model, as PEFT does
        if not own or getattr(module, "loss_type", "") != "ForCausalLM":
            continue
        model: Any = module
        why = ""
        if model.loss_function is not library.ForCausalLMLoss:
            why = "its loss is another function than Transformers' own"
        why = why or _head_problem(model, model.get_output_embeddings())
        if why:
            yield Left(path, type(model).__name__, why)
            continue
        state = Head(model)
        weight = state.layer.weight
        call = weight.new_zeros((2, weight.shape[1])), weight, torch.zeros(2, dtype=torch.int64, device=weight.device)
        kernel = str(lz.which("linear_cross_entropy", *call)["kernel_id"])
        name = type(model).__name__
        yield Replaced(path, name, LOSS, "lz.linear_cross_entropy", kernel, None, Swap(model, _causal, state))


def optimize_training(root: Module, report: Optimized, inputs: Any, rounds: int) -> None:
    """Put on what a training step of the model proves and does not lose by."""
    name = type(root).__name__
    if isinstance(root, (DataParallel, DistributedDataParallel)) or "FullyShardedDataParallel" in name:
        report.left.append(Left("", name, "it wraps a model; optimize that before it is wrapped"))
        return
    given = _example(root) if inputs is None else inputs
    if not isinstance(given, Mapping) or "labels" not in given:
        why = "wanted inputs= as a dict with labels, for a step forward and back proves what is put on"
        report.left.append(Left("", name, why))
        return
    if not any(each.requires_grad for each in root.parameters()):
        report.left.append(Left("", name, "none of its weights wants a gradient, which would prove a step"))
        return
    if not report.time.allows("everything", STEP):
        report.left.append(Left("", name, NO_TIME))
        return
    with _trains(root):
        with report.time.taking(STEP):
            fits = True
            try:
                wanted = _step(root, given)
            except torch.OutOfMemoryError:
                if inputs is not None:
                    raise
                fits = False
            except RuntimeError as error:
                why = NO_LOSS if isinstance(error, _NoLossError) else REENTRANT
                if why is REENTRANT and ".grad() or" not in str(error):  # torch has no class for it
                    raise
                report.left.append(Left("", name, why))
                return
            if not fits:  # behind the handler, in which the error keeps the first step's tensors
                given = _example(root, "cpu") or given  # fewer tokens
                wanted = _step(root, given)
        for each in [*report.sort(_norms(root)), *report.sort(_losses(root))]:
            report.put_on(each)
        for kind in (NORM, LOSS):
            mine = [each for each in report.replaced if each.kind == kind]
            if mine:
                try:
                    why = _wrong(root, given, wanted, report, kind) or _slow(root, given, mine, rounds, report)
                except torch.OutOfMemoryError as error:  # the gradients that it is compared with take room, too
                    why = in_short(error)
                report.take_out(mine if why else (), why)


@contextmanager
def _trains(root: Module) -> Iterator[None]:
    """Training mode, whatever mode each module is in; random numbers of the caller's stay where they are."""
    modes = [(each, each.training) for each in root.modules()]
    buffers = [(each, each.detach().clone()) for each in root.buffers()]
    try:
        for each, _ in modes:
            each.training = True
        with torch.random.fork_rng(devices=_gpus(root)), torch.enable_grad():
            yield
    finally:
        for each, training in modes:
            each.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _gpus(root: Module) -> list[int]:
    return sorted({each.device.index for each in root.parameters() if each.device.type == "cuda"})


def _example(root: Module, kind: str = "") -> Mapping[str, Tensor] | None:
    """Random texts for a language model, as many as fit its device, or one of that kind; None for any other model."""
    config = getattr(root, "config", None)
    vocab = getattr(config, "vocab_size", None)
    if getattr(root, "loss_type", "") != "ForCausalLM" or not isinstance(vocab, int):
        return None
    device = next(root.parameters()).device
    rows, length = TOKENS.get(kind or device.type, TOKENS["cpu"])
    shape = rows, min(length, getattr(config, "max_position_embeddings", None) or length)
    ids = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(0), device="cpu").to(device)
    return {"input_ids": ids, "labels": ids}


def _step(root: Module, given: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a step and its gradients, with the same random numbers each time; no ``grad`` is written."""
    for each in (torch.default_generator, *map(torch.cuda.default_generators.__getitem__, _gpus(root))):
        each.manual_seed(0)  # torch.manual_seed would seed every device
    weights = {name: each for name, each in root.named_parameters() if each.requires_grad}
    loss = getattr(root(**given), "loss", None)
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise _NoLossError
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    return loss.detach(), {name: each for name, each in zip(weights, found, strict=True) if each is not None}


def _wrong(root: Module, given: Any, wanted: Any, report: Optimized, kind: str) -> str:
    """How far a step is from the model's own with one kind alone; empty where it is as near as rounding explains."""
    with _only(report, kind):
        got = _step(root, given)
    for each in report.replaced:
        if isinstance(each.swap.state, Head) and each.kind == kind and not each.swap.state.passes:
            return CHANGED if each.swap.state.passes is False else UNPROVED
    largest = max((each.abs().max().item() for each in wanted[1].values()), default=0.0)
    pairs = [("loss", got[0], wanted[0], abs(wanted[0].item()))]
    pairs += [
        (name, got[1][name], each, max(each.abs().max().item(), largest / 8))
        for name, each in wanted[1].items()
        if name in got[1]
    ]
    lost = wanted[1].keys() - got[1].keys()
    if lost:
        return f"{min(lost)} has no gradient any more"
    for name, one, other, scale in pairs:
        error = (one.double() - other.double()).abs().max().item() / (scale or 1.0)
        if not error <= ACCUMULATED * TOLERANCE.get(other.dtype, 0.0):
            what = name if name == "loss" else f"the gradient of {name}"
            return f"{what} was off by {error:.2g} of its largest value in a step"
        for each in report.replaced:
            each.error = max(each.error or 0.0, error) if each.kind == kind else each.error
    return ""


def _slow(root: Module, given: Any, mine: list[Replaced], rounds: int, report: Optimized) -> str:
    """Whether steps take longer with one kind than with the model's own code, round by round; empty where not."""
    device = next(root.parameters()).device

    def sample(on: bool) -> float:
        switch_all(mine, on)
        return timing.taken(lambda: _step(root, given), device)

    def open_(times: Mapping[bool, Sequence[float]], turn: int) -> Sequence[bool]:
        return (False, True) if turn < rounds and report.time.allows("timing of a kind", STEP, 2.0) else ()

    times = timing.race((False, True), sample, open_)
    if not times[True]:
        switch_all(mine, on=True)
        return NO_TIME
    gained = timing.gain(list(zip(times[False], times[True], strict=True)))
    why = ""
    if gained < LOSES:
        before, after = (
            f"{statistics.median(times[on]) * 1e3:.1f} ms{_memory(root, given, mine, on)}" for on in (False, True)
        )
        why = f"a step forward and back takes {1 / (1 + gained):.2f} times as long with it: {after}, without {before}"
    switch_all(mine, on=True)
    return why


def _memory(root: Module, given: Any, mine: list[Replaced], on: bool) -> str:
    """What a step takes of a GPU's memory at most with or without one kind; empty on a CPU, which counts none."""
    device = next(root.parameters()).device
    if device.type != "cuda":
        return ""
    switch_all(mine, on)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    _step(root, given)
    return f" and {(torch.cuda.max_memory_allocated(device) - before) / 2**20:.0f} MiB"


@contextmanager
def _only(report: Optimized, kind: str) -> Iterator[None]:
    others = [each for each in report.replaced if each.kind != kind]
    switch_all(others, on=False)
    try:
        yield
    finally:
        switch_all(others, on=True)
