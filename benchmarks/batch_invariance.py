"""Bits of rows alone, in batches and in chunks of a prompt, on a Llama of Transformers, with the setting and without.

    python benchmarks/batch_invariance.py --rows 20000
    python benchmarks/batch_invariance.py --device cuda --dtype bfloat16 --shape 1b --steps 20
    python benchmarks/batch_invariance.py --device cuda --kernels "torch.*unsplit*"
    python benchmarks/batch_invariance.py --device cuda --dtype bfloat16 --shape 8b --layers 2 --first

Counts the rows whose logits have other bits than in the whole batch, and times a prompt and a step of one token with
the model's own code, with LayerZero, and with the setting.
``--kernels`` proves kernels that declare it instead, those of this pattern. ``--first`` says of some parts of a batch
which call is the first with other bits. ``--untried`` lets kernels run that never ran before they were shipped.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero.engine.dispatch import ENGINE
from layerzero.ops import FUNCTIONS

SHAPES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "heads": (8, 2), "vocab_size": 1003},
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "heads": (32, 8),
        "vocab_size": 32000,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "heads": (32, 8),
        "vocab_size": 32000,
    },
}
COUNTS = (1, 2, 3, 7, 64, 256)
TOKENS = 20


def model_of(shape: str, device: str, dtype: torch.dtype, layers: int = 0) -> Any:
    """A Llama with random weights; ``layers`` instead of the shape's own number."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict(SHAPES[shape])
    heads, kv_heads = sizes.pop("heads")
    sizes["num_hidden_layers"] = layers or sizes["num_hidden_layers"]
    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=4096)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def chunks(length: int) -> Iterator[tuple[int, ...]]:
    """Where a prompt is cut: in two, before its last token, behind its first, at a tile's end."""
    yield from ((0, 7, length), (0, length - 1, length), (0, 1, 2, length), (0, 16, 17, length))


@torch.no_grad()
def other_bits(model: Any, rows: int, batch: int, device: str) -> tuple[int, int]:
    """Rows whose logits were compared with those of the whole batch, and how many had other bits."""
    generator = torch.Generator().manual_seed(1)
    compared = wrong = 0
    while compared < rows:
        ids = torch.randint(0, model.config.vocab_size, (batch, TOKENS), generator=generator).to(device)
        whole = model(ids).logits
        for count in [each for each in COUNTS if each <= batch]:
            first = int(torch.randint(0, batch - count + 1, (1,), generator=generator))
            found = model(ids[first : first + count]).logits
            compared += count * TOKENS
            wrong += int((found != whole[first : first + count]).any(-1).sum())
        for cuts in chunks(TOKENS):
            cache = None
            for start, end in itertools.pairwise(cuts):
                out = model(ids[:3, start:end], past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                compared += 3 * (end - start)
                wrong += int((out.logits != whole[:3, start:end]).any(-1).sum())
    return compared, wrong


Saw = Callable[[str, str, list[Tensor]], None]
"""What hears of a call: the function, the kernel, and the tensors that it got and gave."""


@contextmanager
def heard(saw: Saw) -> Iterator[None]:
    """Tell of every call of a function of LayerZero, as models make them: ``lz.linear(...)``."""
    kernels: list[str] = []

    def ran(_: object, plan: Any) -> None:
        kernels.append(plan.kernel_id)

    def telling(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            got = [each.clone() for each in (*given, *named.values()) if isinstance(each, Tensor) and each.ndim > 2]
            kernels.clear()
            found = run(*given, **named)
            made = [each for each in (found if isinstance(found, tuple) else (found,)) if isinstance(each, Tensor)]
            written = [each for each in given if isinstance(each, Tensor) and each.ndim > 2]
            saw(name, "+".join(dict.fromkeys(kernels)), [*got, *made, *written])
            return found

        return call

    before = {name: getattr(lz, name) for name in FUNCTIONS}
    ENGINE.watch(ran)
    try:
        for name, run in before.items():
            setattr(lz, name, telling(name, run))
        yield
    finally:
        for name, run in before.items():
            setattr(lz, name, run)
        ENGINE.unwatch(ran)


def part_of(whole: Tensor, like: Tensor, batch: int, rows: slice, tokens: slice) -> Tensor | None:
    """The rows of sequences and tokens, of a tensor whose tokens lie in one axis or in two; None where it has none."""
    if whole.shape[0] == batch * TOKENS:
        whole = whole.view(batch, TOKENS, *whole.shape[1:])
    if whole.shape[0] != batch:
        return None
    cut = whole[rows]
    axis = next((place for place in (1, 2) if cut.ndim > place and cut.shape[place] == TOKENS), None)
    if axis is None:
        return None
    narrow = [slice(None)] * axis
    several = cut[(*narrow, tokens)]
    seen = cut[(*narrow, slice(0, tokens.stop))]  # keys and values of a part behind others
    fits = several if several.numel() == like.numel() else seen
    if fits.ndim == 4 and fits.shape != like.shape and fits.transpose(1, 2).shape == like.shape:
        fits = fits.transpose(1, 2)  # one query is attended to in another layout
    return fits.reshape(like.shape) if fits.numel() == like.numel() else None


class Comparison:
    """The calls of a part of a batch, and how often each differs in the whole."""

    def __init__(self, batch: int, rows: slice, tokens: slice) -> None:
        self.batch, self.rows, self.tokens = batch, rows, tokens
        self.calls: list[tuple[str, str, list[Tensor]]] = []
        self.wrong = Counter[str]()
        self._number = itertools.count()

    def keep(self, name: str, kernel: str, seen: list[Tensor]) -> None:
        """Hear of a call of the part."""
        self.calls.append((name, kernel, [each.clone() for each in seen]))

    def compare(self, name: str, kernel: str, seen: list[Tensor]) -> None:
        """Hear of a call of the whole."""
        place = next(self._number)
        if place >= len(self.calls) or self.calls[place][0] != name:
            self.wrong[f"call {place} is another one: {name}"] += 1
            return
        _, of_part, kept = self.calls[place]
        for which, (one, other) in enumerate(zip(kept, seen, strict=False)):
            want = part_of(other, one, self.batch, self.rows, self.tokens)
            if want is not None and not torch.equal(want, one):
                kernels = kernel if kernel == of_part else f"{of_part}, in the whole {kernel}"
                self.wrong[f"call {place} {name} ({kernels}), tensor {which} of {tuple(one.shape)}"] += 1


@torch.no_grad()
def first_differences(model: Any, batch: int, device: str) -> None:
    """Print for some parts of a batch the first tensor of a call that has other bits than in the whole."""
    ids = torch.randint(0, model.config.vocab_size, (batch, TOKENS), generator=torch.Generator().manual_seed(1))
    ids = ids.to(device)
    counts = [each for each in (1, 2, 3, 7, 64) if each + 5 <= batch]
    parts = [(f"{count} of {batch}", slice(5, 5 + count), (0, TOKENS)) for count in counts]
    parts += [(f"3 in parts {cuts}", slice(0, 3), cuts) for cuts in chunks(TOKENS)]
    for text, rows, cuts in parts:
        found = Comparison(batch, rows, slice(*cuts[-2:]))
        cache, logits = None, torch.empty(0)
        for start, end in itertools.pairwise(cuts):
            found.calls.clear()
            with heard(found.keep):
                out = model(ids[rows, start:end], past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits
        with heard(found.compare):
            whole = model(ids).logits[rows, found.tokens]
        other, first = int((whole != logits).any(-1).sum()), next(iter(found.wrong), "none")
        print(f"{text}: {other} of {whole[..., 0].numel()} rows of logits differ; first: {first}", flush=True)
    ran = Counter[str]()
    with heard(lambda name, kernel, _: ran.update([f"{name}: {kernel}"])):
        model(ids)
    print("; ".join(f"{each} x{count}" for each, count in ran.items()), flush=True)


@torch.no_grad()
def times_ms(model: Any, device: str, batch: int, context: int, steps: int) -> tuple[float, float]:
    """Medians of a prompt, and of a step of one token behind it."""
    ids = torch.randint(0, model.config.vocab_size, (batch, context), device=device)
    prompts = [_timed(lambda: model(ids, use_cache=True), device) for _ in range(3)]
    cache = model(ids, use_cache=True).past_key_values
    step = functools.partial(model, ids[:, -1:], past_key_values=cache, use_cache=True)
    found = [_timed(step, device) for _ in range(steps)]
    return statistics.median(prompts[1:]), statistics.median(found[2:])


def _timed(run: Any, device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def prove(device: str, seconds: float, pattern: str) -> None:
    """Check every kernel that declares batch_invariant or tp_invariant, and that may run here."""
    from layerzero.engine.registry import REGISTRY
    from layerzero.ops import OPERATIONS
    from layerzero.testing import invariance
    from layerzero.testing.sizes import CheckSetting, base_case

    REGISTRY.ready()
    end, tally = time.monotonic() + seconds, {"passed": 0, "wrong": 0, "not tried": 0}
    for operation in OPERATIONS.values():
        for kernel in [each for each in REGISTRY.candidates(operation.name) if fnmatch.fnmatch(each.id, pattern)]:
            for check, declared in (
                (invariance.batches, kernel.batch_invariant),
                (invariance.ranks, kernel.tp_invariant),
            ):
                for dtype in [
                    each for each in operation.dtypes if declared and each in (torch.float32, torch.bfloat16)
                ]:
                    if time.monotonic() > end:
                        print("out of time at", operation.name, kernel.id)
                        print(tally)
                        return
                    setting = CheckSetting(operation, dtype, device, operation.layouts[0] if operation.layouts else "")
                    case, trial = base_case(kernel, setting)
                    if trial is None or trial.reasons:
                        continue
                    found = check(kernel, setting, case)
                    tally[found.status] += 1
                    text = f"{operation.name} {kernel.id} {dtype} {check.__name__}: {found.status}"
                    print(f"{text} {found.message[:230] if found.status == 'wrong' else ''}", flush=True)
    print("kernels that declare invariance on", device, tally, flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--decode-batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--untried", action="store_true")
    parser.add_argument("--kernels", nargs="?", const="*")
    parser.add_argument("--seconds", type=float, default=120.0)
    given = parser.parse_args()
    if given.untried:
        lz.configure(require_vetting=False)
    if given.kernels is not None:
        prove(given.device, given.seconds, given.kernels)
        return
    model = model_of(given.shape, given.device, getattr(torch, given.dtype), given.layers)
    if given.first:
        with lz.scope(batch_invariant=True):
            lz.optimize(model, budget_s=60)
            first_differences(model, given.batch, given.device)
        return
    print(f"{given.shape} {given.dtype} {given.device} torch {torch.__version__} threads {torch.get_num_threads()}")
    step_of = {}
    for name, invariant in (("own code", None), ("LayerZero", False), ("batch_invariant", True)):
        report = None
        with lz.scope(batch_invariant=bool(invariant)):
            if invariant is not None:
                report = lz.optimize(model, budget_s=60)
            compared, wrong = other_bits(model, given.rows if invariant else given.rows // 4, given.batch, given.device)
            prompt, step = times_ms(model, given.device, given.decode_batch, given.context, given.steps)
        step_of[name] = step
        told = f"prompt {prompt:.2f} ms, step {step:.2f} ms, {step / step_of['own code']:.2f} of own code's"
        print(f"{name:16s} rows {compared} other bits {wrong}; {told}", flush=True)
        if report is not None:
            report.undo()


if __name__ == "__main__":
    main()
