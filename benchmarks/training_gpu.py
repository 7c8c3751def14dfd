"""A training step of a Llama of 1B parameters on a GPU: stock, ``lz.optimize(training=True)`` and Liger's own patch.

    STEPS=training bash benchmarks/gpu.sh results     conformance of the kernels with gradients first, then this
    python benchmarks/training_gpu.py --batch 4 --length 1024 --functions linear_cross_entropy
    python benchmarks/training_gpu.py --device cpu --layers 1 --width 64 --vocab 1000 --batch 2 --length 32

First each kernel with gradients alone, forward and back, beside torch's; then steps forward and back, without an
optimizer. Random bfloat16 weights, one copy of the model for each way. Ways take turns, the first round does not count,
medians are compared; memory is the highest of a step above what lay there before it. Kernels that wait for a verdict
run here, and compile. A model with each loss has it whatever the time; ``lz.optimize`` decides by these texts. Wanted
are 0.85 of stock's time, 0.6 of its memory, 1.02 of Liger's time. H200, torch 2.11, Triton 3.6, 2026-11-27, before
chunks became larger: stock 79.1 ms and 12,870 MiB, ``lz.optimize`` without the loss 67.3 and 11,814, Liger's patch 88.4
and 5359.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch
import transformers
from transformers.models.llama import modeling_llama

import layerzero as lz
from layerzero.integrations.optimize.models import training

CHUNKS = "torch.linear_cross_entropy_chunked"
LOCKED = {"lz.optimize, torch's chunks": CHUNKS, "lz.optimize, Liger's loss": "liger.linear_cross_entropy"}


def measured(step: Any, device: torch.device) -> tuple[float, int]:
    """Seconds, and the bytes that it took at most."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated() if cuda else 0, time.perf_counter()
    step()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() - before if cuda else 0


def raced(steps: dict[str, Any], rounds: int, device: torch.device) -> None:
    """Ways in turn; the first one named is what the others are compared with."""
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in list(steps.items()):
            try:
                taken = measured(step, device)
            except Exception as error:  # noqa: BLE001  # told in its place
                print(f"  {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                del steps[name]
                continue
            if turn:
                found[name].append(taken)
    done = {name: each for name, each in found.items() if name in steps and each}
    medians = {name: [statistics.median(column) for column in zip(*each, strict=True)] for name, each in done.items()}
    if not medians:
        return
    first = next(iter(medians.values()))
    for name, (seconds, memory) in medians.items():
        share = f", {memory / 2**20:.0f} MiB: {memory / first[1]:.2f}" if first[1] else ""
        print(f"  {name}: {seconds * 1e3:.2f} ms: {seconds / first[0]:.2f}{share}", flush=True)


def kernels_alone(asked: argparse.Namespace, device: torch.device) -> None:
    """Each legal kernel of the functions that a decoder trains with; torch's own first."""
    rows, width, dtype = asked.batch * asked.length, asked.width, torch.bfloat16
    made = lambda *shape: torch.randn(shape, device=device, dtype=dtype).requires_grad_()  # noqa: E731
    heads, target = max(width // 64, 1), torch.randint(asked.vocab, (rows,), device=device)
    split = asked.batch, asked.length, heads, width // heads
    calls: dict[str, tuple[Any, ...]] = {
        "rms_norm": (made(rows, width), made(width)),
        "layer_norm": (made(rows, width), (width,), made(width), made(width)),
        "silu_mul": (made(rows, 4 * width), made(rows, 4 * width)),
        "cross_entropy": (made(rows, asked.vocab), target),
        "linear_cross_entropy": (made(rows, width), made(asked.vocab, width), target),
        "attention": (made(*split), made(*split), made(*split)),
    }
    for function, call in calls.items():
        if function not in (asked.functions or calls):
            continue
        more = {"causal": True, "layout": "BSHD"} if function == "attention" else {}
        run = getattr(lz, function)
        report = lz.explain(function, *call, **more)
        names = [each.kernel.id for each in report.candidates if each.legal and not each.kernel.is_reference]
        names.sort(key=lambda name: not name.startswith("torch."))

        def step(name: str, run: Any = run, call: Any = call, more: Any = more, report: Any = report) -> None:
            with lz.scope(locks={report.operation: name}):
                result = run(*call, **more)
            result.backward(torch.ones_like(result))
            for each in call:
                if isinstance(each, torch.Tensor):
                    each.grad = None

        print(f"{function} {[tuple(each.shape) for each in call if isinstance(each, torch.Tensor)]}", flush=True)
        raced({name: lambda name=name, step=step: step(name) for name in names}, asked.rounds, device)


def model_of(asked: argparse.Namespace, device: torch.device) -> Any:
    torch.manual_seed(0)
    heads = max(asked.width // 64, 1)
    config = transformers.LlamaConfig(
        vocab_size=asked.vocab, hidden_size=asked.width, intermediate_size=4 * asked.width,
        num_hidden_layers=asked.layers, num_attention_heads=heads, num_key_value_heads=max(heads // 4, 1),
        rope_theta=500000.0, tie_word_embeddings=True,
    )  # fmt: skip
    with device:
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"batch": 4, "length": 1024, "layers": 16, "width": 2048, "vocab": 128256, "rounds": 7}
    for name, number in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--functions", nargs="*", help="measured alone; all where left out")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    ids = torch.randint(asked.vocab, (asked.batch, asked.length), device=device)
    with lz.scope(require_vetting=False, allow_jit_compile=True):
        kernels_alone(asked, device)
        stock, ours, forced, ligers = (model_of(asked, device) for _ in range(4))
        given = {"input_ids": ids, "labels": ids, "use_cache": False}
        print(lz.optimize(ours, training=True, inputs=given), flush=True)
        training.LOSES = float("-inf")
        print(lz.optimize(forced, training=True, inputs=given), flush=True)
        own, changed = dict(vars(modeling_llama)), dict(vars(modeling_llama))
        try:
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(model=ligers)  # it changes the module, too, for every Llama of the process
            changed = dict(vars(modeling_llama))
            vars(modeling_llama).update(own)
        except ImportError as error:
            print(f"Liger's patch: {error}", flush=True)

        def step(model: Any, module: dict[str, Any] = own, lock: str = "") -> None:
            with ExitStack() as put_back:
                put_back.callback(vars(modeling_llama).update, own)
                vars(modeling_llama).update(module)
                if lock:
                    put_back.enter_context(lz.scope(locks={"loss.linear_cross_entropy": lock}))
                model(**given).loss.backward()
                model.zero_grad(set_to_none=True)

        steps = {"stock": lambda: step(stock), "lz.optimize": lambda: step(ours)}
        steps |= {name: lambda lock=lock: step(forced, lock=lock) for name, lock in LOCKED.items()}
        if changed != own:
            steps["Liger's patch"] = lambda: step(ligers, changed)
        print(f"a step of {asked.batch} x {asked.length} tokens, {asked.layers} layers of {asked.width}", flush=True)
        raced(steps, asked.rounds, device)


if __name__ == "__main__":
    main()
