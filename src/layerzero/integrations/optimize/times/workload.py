"""The caller's own inputs: run, recorded, measured and timed, within the time that is left, on which libraries."""

from __future__ import annotations

import math
import sys
import time as _time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import Module
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from layerzero.core.arguments import signature_of
from layerzero.core.device import Device
from layerzero.engine.config import current_policy
from layerzero.engine.registry import REGISTRY
from layerzero.integrations.optimize.swaps.trial import as_served
from layerzero.integrations.optimize.times import timing
from layerzero.tuning.measurement.clocks import current
from layerzero.tuning.measurement.loop import Step
from layerzero.tuning.measurement.timing import Deadline, Effort
from layerzero.tuning.measurement.tune import Tuned, run_jobs
from layerzero.tuning.measurement.workload import jobs_of, record

CLOCK: Callable[[], float] = _time.monotonic
"""Tests set another one."""

RUN = "a run of the model"
"""What a run of the caller's inputs is called among steps."""


@dataclass
class LeftOut:
    """A step that was not begun.

    Attributes:
        what: the step, and what is done without it.
        needed_s: what it was expected to take, by steps like it; 0 where there was none.
        left_s: what was left then.
        times: how often it was left out.
    """

    what: str
    needed_s: float
    left_s: float
    times: int = 1

    def __str__(self) -> str:
        often = f" ({self.times} times)" if self.times > 1 else ""
        needed = f"about {self.needed_s:.2g} s" if self.needed_s else "an unknown time"
        return f"{self.what}{often}: {needed}, {self.left_s:.2g} s were left"


class TimeLeft:
    """What is left of the time for one model, and how long its steps take.

    Attributes:
        budget_s: seconds from now; None for no end.
        deadline: when that is over.
        left_out: the steps that there was no time for.
    """

    def __init__(self, budget_s: float | None) -> None:
        self.budget_s, self.deadline = budget_s, Deadline(budget_s, CLOCK)
        self.left_out: list[LeftOut] = []
        self._least_s: dict[str, float] = {}

    @contextmanager
    def taking(self, like: str) -> Iterator[None]:
        """Learn what a step takes: the least that one like it took, for the first also loads and compiles."""
        began = self.deadline.spent_s
        yield
        self._least_s[like] = min(self._least_s.get(like, float("inf")), self.deadline.spent_s - began)

    @contextmanager
    def holding_back(self, seconds: float) -> Iterator[None]:
        """Leave so many seconds, or half of what there is, for what follows."""
        whole = self.deadline
        self.deadline = whole.sooner(min(seconds, whole.left_s / 2)) if seconds else whole
        try:
            yield
        finally:
            self.deadline = whole

    def expected_s(self, like: str, times: float = 1.0) -> float:
        """What so many steps are likely to take; 0 before the first."""
        return times * self._least_s.get(like, 0.0)

    def fits(self, like: str, times: float = 1.0) -> bool:
        """Whether so many steps are likely to end in time."""
        left = self.deadline.left_s
        return left > 0.0 and self.expected_s(like, times) <= left

    def allows(self, what: str, like: str, times: float = 1.0) -> bool:
        """Whether a step may begin; one that may not is kept for the report."""
        if self.fits(like, times):
            return True
        self.leave(what, like, times)
        return False

    def leave(self, what: str, like: str, times: float = 1.0, left_s: float | None = None) -> None:
        """Keep for the report that a step was left out; ``left_s``: what was left then, if not now."""
        needed = self.expected_s(like, times)
        left = max(self.deadline.left_s if left_s is None else left_s, 0.0)
        for each in self.left_out:
            if each.what == what:
                each.times, each.needed_s = each.times + 1, each.needed_s + needed
                return
        self.left_out.append(LeftOut(what, needed, left))

    def lines(self) -> list[str]:
        if self.budget_s is None or not self.left_out:
            return []
        over = f"left out for want of time, of which budget_s gave {self.budget_s:g} s:"
        return [over, *(f"  {each}" for each in self.left_out)]


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether code exchanges tensors with other ranks meanwhile, as FSDP, DDP and tensor parallel models do.

    Ranks time by themselves, and not equally often: a collective of one would meet another one of the next.
    """

    seen = False
    supports_higher_order_operators = True
    ignore_compile_internals = staticmethod(lambda: True)  # code that is compiled stays so

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each.__module__.startswith("torch.distributed") for each in types):
            return NotImplemented  # a DTensor's own code runs collectives, which are to be seen, too
        self.seen |= "c10d" in getattr(func, "namespace", "")
        return func(*args, **(kwargs or {}))


def collectives() -> AbstractContextManager[Collectives | None]:
    """What notes them; nothing where this process is the only rank."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return Collectives() if several else nullcontext()  # type: ignore[no-untyped-call]


SHORTEST_S, MOST = 0.05, 20
"""A sample runs the model as often as fills this, at most so many times."""


@dataclass
class Workload:
    """A way to run a model.

    Attributes:
        call: runs it once and returns what it gives.
        device: where the model lies.
        time: what is left of the time; it learns of every run.
        tokens: the ids that it is called with, and which of them are padding; None where the inputs do not say.
        sampled_s: seconds of all timed runs, on the wall and of this thread alone.
    """

    call: Callable[[], Any]
    device: torch.device
    time: TimeLeft = field(default_factory=lambda: TimeLeft(None))
    tokens: tuple[Tensor, Tensor | None] | None = None
    sampled_s: tuple[float, float] = (0.0, 0.0)
    _often: int = 0

    def run(self) -> list[Tensor]:
        """The tensors that it gives, in order."""
        with self.time.taking(RUN):
            with torch.no_grad():
                found = [each.detach().clone() for each in tensors_in(self.call())]
            timing.wait(self.device)
        return found

    def samples(self, count: int) -> int:
        """How many runs so many samples are."""
        return count * max(self._often, 1)

    def fits(self, samples: int) -> bool:
        return self.time.fits(RUN, self.samples(samples))

    def sample(self) -> float:
        """Seconds of one run; short ones are run several times and the least counts."""
        if not self._often:
            seconds = self.time.expected_s(RUN) or self._seconds()
            self._often = max(1, min(MOST, int(SHORTEST_S / max(seconds, 1e-6))))
        return min(self._seconds() for _ in range(self._often))

    def _seconds(self) -> float:
        timing.wait(self.device)
        began_s, began_alone_s = timing.WALL(), _time.thread_time()
        with self.time.taking(RUN):
            with torch.no_grad():
                self.call()
            timing.wait(self.device)
        took_s = timing.WALL() - began_s
        self.sampled_s = self.sampled_s[0] + took_s, self.sampled_s[1] + _time.thread_time() - began_alone_s
        return took_s

    @property
    def core_share(self) -> float:
        """How much of the timed runs this thread had a core; 1 on a GPU, where the wait for it says nothing."""
        wall_s, alone_s = self.sampled_s
        return alone_s / wall_s if wall_s and self.device.type == "cpu" else 1.0

    def tune(self, *, deadline: Deadline, isolate: bool, progress: Callable[[Step], None] | None = None) -> Tuned:
        """Record the calls of one run and measure each class of them, the most frequent first."""
        with record() as recording, torch.no_grad():
            self.call()
        jobs = jobs_of(recording.manifest(), self.device.type)
        effort = Effort(current_policy()["tune_samples"], fill=self.device.type == "cpu")
        slow = [kernel.id for kernel in REGISTRY.kernels() if (kernel.jit and self.device.type == "cpu")]
        with current(self.device):
            return run_jobs(
                jobs, self.device, effort=effort, deadline=deadline, isolate=isolate, leave_out=slow, progress=progress
            )


def _noted(call: Callable[[], Any], how: str) -> Callable[[], Any]:
    """What says how the model was called, where it raises: a SentenceTransformer takes no sentences that way."""

    def run() -> Any:
        try:
            return call()
        except Exception as error:
            other = "inputs may be a function that runs it otherwise: lz.optimize(model, lambda: model.encode(texts))"
            error.add_note(f"lz.optimize ran {how}; {other}")
            raise

    return run


def is_function(inputs: Any) -> bool:
    """Whether inputs are a function that runs the model, and no arguments of a call."""
    return callable(inputs) and not isinstance(inputs, (Mapping, tuple, list, Tensor))


def workload_of(model: Any, inputs: Any, time: TimeLeft) -> Workload:
    """A way to run a model on what the caller gave."""
    first = next((each for each in tensors_of_model(model)), None)
    device = torch.device("cpu") if first is None else first.device
    if isinstance(inputs, Mapping):
        tokens = _tokens(inputs.get("input_ids"), inputs.get("attention_mask"))
        return Workload(_noted(lambda: model(**inputs), "model(**inputs)"), device, time, tokens)
    if isinstance(inputs, (tuple, list)):
        tokens = _tokens(inputs[0] if inputs else None)
        return Workload(_noted(lambda: model(*inputs), "model(*inputs)"), device, time, tokens)
    if isinstance(inputs, Tensor):
        return Workload(_noted(lambda: model(inputs), "model(inputs)"), device, time, _tokens(inputs))
    if callable(inputs):
        return Workload(inputs, device, time)
    wanted = "a tensor, a tuple, a dict, or a function without arguments"
    raise TypeError(f"optimize: inputs: wanted {wanted}, got {type(inputs).__name__}")


def _tokens(ids: Any, mask: Any = None) -> tuple[Tensor, Tensor | None] | None:
    """Ids (B, S) of at least two tokens, and the mask (B, S) of those that count."""
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.shape[1] < 2:
        return None
    return ids, mask if isinstance(mask, Tensor) and mask.shape == ids.shape else None


def perplexity(logits: Tensor, tokens: tuple[Tensor, Tensor | None]) -> float | None:
    """Of each token but the first, given those before it; None where these are no logits (B, S, V) of such tokens."""
    ids, mask = tokens
    if logits.ndim != 3 or not logits.is_floating_point() or logits.shape[:2] != ids.shape:
        return None
    if int(ids.min()) < 0 or int(ids.max()) >= logits.shape[2]:
        return None
    wanted = ids[:, 1:].long()
    if mask is not None:
        wanted = wanted.masked_fill((mask[:, 1:] == 0) | (mask[:, :-1] == 0), -100)
    if not bool((wanted >= 0).any()):
        return None
    return math.exp(min(cross_entropy(logits[:, :-1].float().flatten(0, 1), wanted.flatten()).item(), 700.0))


def tensors_of_model(model: Any) -> Iterator[Tensor]:
    """Its parameters, or those of the model within it."""
    module = model if isinstance(model, torch.nn.Module) else model.model
    yield from module.parameters()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in what a model returns, caches aside: in tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)


LIBRARIES = ("transformers", "diffusers", "sentence_transformers")


def stock_of(root: Module, device: torch.device) -> str:
    """Libraries with their versions, the attention that a model of Transformers asks for, and where it runs."""
    made = {type(each).__module__.partition(".")[0] for each in root.modules()}
    names = [f"torch {torch.__version__}"]
    names += [f"{each} {sys.modules[each].__version__}" for each in LIBRARIES if each in made and each in sys.modules]
    settings = sorted(set(_settings_of(root)))
    text = ", ".join(names) + (f" with {' and '.join(settings)}" if settings else "")
    where = Device.detect(device).name
    text += f", on {torch.get_num_threads()} threads of {where}" if device.type == "cpu" else f", on {where}"
    overrides = sorted(_overrides_of(device.type))
    if overrides:
        text += f"; torch's own {', '.join(overrides)}, which TORCH_DISABLE_NATIVE_JIT=1 turns off"
    return text


def _settings_of(root: Module) -> Iterator[str]:
    for each in root.modules():
        if isinstance(setting := getattr(getattr(each, "config", None), "_attn_implementation", None), str):
            yield setting


def _overrides_of(kind: str) -> Iterator[str]:
    """Operators that torch sends to kernels in a language of its own on such a device; its registry is private."""
    registry = sys.modules.get("torch._native.registry")
    for (*_, operator, key), nodes in getattr(registry, "_graphs", {}).items():  # from torch 2.15 on a library first
        if str(key).lower() == kind:
            for language in sorted({str(getattr(each, "dsl_name", "kernel")) for each in nodes}):
                yield f"{language} kernel for {operator}"


SAMPLES, FRAMES, SIDE = 4000, 64, 64
"""Random input: samples of sound, a dozen frames for most models; frames; the side of pictures without a known size."""


def _of_pictures_or_sound(model: Any, name: str) -> dict[str, Any]:
    """Two random inputs for a model whose example Transformers does not know; nothing for other kinds of input."""
    parts = ("vision_config", "backbone_config") if name == "pixel_values" else ("audio_config", "encoder_config")
    kept = (getattr(model.config, each, None) for each in parts)
    config, generator = next(filter(None, kept), model.config), torch.Generator().manual_seed(0)
    size = getattr(config, "image_size", None) or getattr(model.config, "image_size", None) or SIDE
    names = "max_source_positions", "max_length", "num_mel_bins"
    frames, most, bins = (getattr(config, each, None) for each in names)
    if name == "input_values":  # or the spectrum of AST
        shape: tuple[int, ...] = (2, most, bins) if bins and most else (2, SAMPLES)
    elif name == "input_features" and bins:  # Whisper's: a convolution takes every other frame
        shape = (2, bins, 2 * frames) if frames else (2, FRAMES, bins)
    elif name == "pixel_values":
        shape = (2, getattr(config, "num_channels", 3), *((size, size) if isinstance(size, int) else size))
    else:
        return {}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")}


def _example(model: Any) -> dict[str, Any]:
    """Transformers' example for a model, or pictures or sound where it has none."""
    known = signature_of(model.forward).parameters
    words = model.dummy_inputs
    example = {name: each for name, each in words.items() if name in known}
    padding = vars(model.config).get("pad_token_id")  # to ask Idefics3 for it is deprecated
    if padding is not None and "input_ids" in example and "attention_mask" not in words:  # LayoutLM warns of it, once
        example["input_ids"] = words["input_ids"].masked_fill(words["input_ids"] == padding, 6 if padding == 7 else 7)
    if model.main_input_name not in example:
        example = _of_pictures_or_sound(model, model.main_input_name)
    if example and "decoder_input_ids" in known and "input_ids" in words:  # shorter: which is which shows
        example.setdefault("decoder_input_ids", words["input_ids"][: len(next(iter(example.values()))), :-1])
    return example


def example_run(model: Any) -> Callable[[], Any]:
    """A way to run a model on Transformers' own example, as it is and with the first tokens of a row hidden."""

    def placed(example: Mapping[str, Any]) -> dict[str, Any]:
        device = next(model.parameters()).device
        dtype = next(each.dtype for each in model.parameters() if each.is_floating_point())
        return {
            name: each.to(device, dtype if each.is_floating_point() else None) if isinstance(each, Tensor) else each
            for name, each in example.items()
        }

    def run() -> Any:
        example = placed(_example(model))
        with as_served(model):
            try:
                found = model(**example)
            except Exception:  # words alone are not enough for every model of words and pictures
                if "pixel_values" in example or "pixel_values" not in signature_of(model.forward).parameters:
                    raise
                pictures = placed(_of_pictures_or_sound(model, "pixel_values"))
                example = {name: each[:2] for name, each in example.items()} | pictures
                found = model(**example)
            if (ids := example.get("input_ids")) is not None:
                mask = torch.ones_like(ids)
                mask[0, :2] = 0
                model(**{**example, "attention_mask": mask})
        return found

    return run
