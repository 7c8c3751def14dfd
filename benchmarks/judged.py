"""The calls that LayerZero is judged on: those of the first measurements, and random ones between what is tuned."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from layerzero.ops.attention.sweep import Heads, decode_case, prefill_case
from layerzero.ops.norm.declare import norm_case
from layerzero.ops.paged.declare import paged_case
from layerzero.tuning.measurement.jobs import Job

LLAMA, WIDE, GEMMA = Heads(32, 8, 128), Heads(16, 16, 64), Heads(16, 4, 256)
DIFFUSION, UNET = Heads(24, 24, 128), Heads(10, 10, 64)

PUBLISHED = (
    *(Heads(28, 4, 128), Heads(64, 8, 128), Heads(40, 40, 128), Heads(48, 8, 128), Heads(32, 4, 128)),
    *(
        Heads(16, 2, 128),
        Heads(12, 12, 64),
        Heads(20, 20, 64),
        Heads(14, 2, 64),
        Heads(25, 5, 64),
        Heads(71, 1, 64),
        Heads(8, 4, 256),
    ),
    *(Heads(32, 32, 96), Heads(32, 32, 80), Heads(16, 16, 72), Heads(8, 1, 256)),
)
"""Heads of models that no grid was made for: Qwen2.5, Llama 70B and 13B, Mixtral, Qwen3, ViT, Whisper, Falcon, Gemma,
Phi-3, Phi-2, SigLIP and others."""

NAMED_ON_GPU = (
    *(prefill_case(LLAMA, 1, seq, causal=True) for seq in (128, 512, 2048, 8192, 32768)),
    *(prefill_case(LLAMA, batch, seq, causal=True) for batch, seq in ((4, 2048), (16, 512), (64, 128))),
    prefill_case(WIDE, 8, 1024, causal=True),
    prefill_case(DIFFUSION, 2, 4096, causal=False),
    prefill_case(WIDE, 32, 256, causal=False),
    prefill_case(UNET, 2, 4096, causal=False),
    prefill_case(GEMMA, 2, 2048, causal=True),
    *(decode_case(LLAMA, batch, context) for batch, context in ((1, 512), (1, 8192), (64, 2048), (64, 8192))),
    *(paged_case(LLAMA, batch, context) for batch, context in ((1, 4096), (64, 2048))),
)
"""Nineteen cases."""

NAMED_ON_CPU = (
    prefill_case(LLAMA, 1, 128, causal=True),
    prefill_case(LLAMA, 1, 512, causal=True),
    prefill_case(WIDE, 2, 128, causal=False),
    prefill_case(WIDE, 1, 256, causal=True),
    decode_case(LLAMA, 1, 512),
    decode_case(LLAMA, 4, 1024),
    decode_case(WIDE, 1, 1024),
    decode_case(WIDE, 8, 256),
    paged_case(LLAMA, 1, 1024),
    paged_case(LLAMA, 4, 512),
)
NORMS_ON_GPU = ((1, 4096), (7, 5120), (64, 4096), (300, 3072), (2048, 2560), (4096, 4096), (16384, 8192))
NORMS_ON_CPU = ((1, 4096), (3, 768), (64, 1024), (200, 2048), (512, 1024), (900, 768))


def judged_jobs(
    device: str, seed: int, count: int, dtypes: tuple[str, ...], *, published: bool = False
) -> list[tuple[str, Job]]:
    """(group, job) of everything that is judged; ``named``, ``random`` and ``norm`` are the groups.

    ``published`` leaves random calls alone, with heads of models that no grid was made for.
    """
    if published:
        drawn = list(_random(seed, count, gpu=device == "cuda", heads=PUBLISHED))
        return [("published", Job(name, case, dtype)) for dtype in dtypes for name, case in drawn]
    gpu = device == "cuda"
    named, norms = (NAMED_ON_GPU, NORMS_ON_GPU) if gpu else (NAMED_ON_CPU, NORMS_ON_CPU)
    drawn = list(_random(seed, count, gpu=gpu))
    found = []
    for dtype in dtypes:
        found += [("named", Job(name, case, dtype)) for name, case in named]
        found += [("random", Job(name, case, dtype)) for name, case in drawn]
        operations = ("norm.rms", "norm.layer", "norm.add_rms")
        cases = [norm_case(operation, *size) for operation in operations for size in norms]
        found += [("norm", Job(name, case, dtype)) for name, case in cases]
    return found


def _random(seed: int, count: int, *, gpu: bool, heads: tuple[Heads, ...] = ()) -> Iterator[tuple[str, object]]:
    """Attention between the tuned sizes: half prefill, a third decoding, the rest over pages."""
    draw = random.Random(seed)
    tuned = (LLAMA, WIDE, GEMMA, DIFFUSION, LLAMA, WIDE, UNET, Heads(40, 8, 128)) if gpu else (LLAMA, WIDE)
    heads = heads or tuned

    def size(low: int, high: int) -> int:
        drawn = math.exp(draw.uniform(math.log(low), math.log(high)))
        step = draw.choice((1, 8, 64)) if drawn > 128 else 1
        return max(low, round(drawn / step) * step)

    for _ in range(count):
        kind, chosen = draw.random(), draw.choice(heads)
        if kind < 0.5:
            batch = size(1, 48 if gpu else 4)
            longest = min(16384 if gpu else 480, (32768 if gpu else 512) // batch)
            causal = chosen not in (DIFFUSION, UNET) and draw.random() < 0.75
            shortest = 128 if gpu else 48
            yield prefill_case(chosen, batch, size(min(shortest, longest), longest), causal=causal)
        else:
            batch = size(1, 64 if gpu else 12)
            context = size(128, min(16384 if gpu else 2000, (2**19 if gpu else 2**13) // batch))
            if kind < 0.85:
                yield decode_case(chosen, batch, context)
            else:
                yield paged_case(chosen, batch, context)
