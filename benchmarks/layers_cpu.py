"""What lies between the attentions on a CPU: products beside every kernel for them, and what torch computes in pieces.

    python benchmarks/layers_cpu.py --threads 2

*Products*: ``lz.linear`` with a packed weight, M of 1, 16, 128 and 512 rows, 768 to 4096 wide, in two dtypes: the
kernel that a user gets before anything is measured here, over the quickest legal one. *Pieces*: the public functions
beside the same written with torch: positions as Transformers applies them, silu times up (in two tensors, and in the
halves of one), GELU by tanh, and a token drawn of the likeliest that add up to 0.9, by sorting. All of a call take
turns in one race; medians. Run it in a fresh cache folder: tables that ship are what chooses then; on a busy machine
its figures are those of parallel regions that wait for a core.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import layerzero as lz
from layerzero.testing.generate import RandomCall
from layerzero.tuning.measurement.contest import contest
from layerzero.tuning.measurement.timing import Effort

ROWS = (1, 16, 128, 512)
WIDTHS = ((768, 768), (3072, 768), (768, 3072), (2048, 2048), (4096, 4096))
"""Features out and in."""

VOCAB, SHARE = 128256, 0.9


def products(dtype: torch.dtype) -> Iterator[tuple[str, RandomCall]]:
    """Calls of lz.linear with weights that are packed once."""
    for features, inputs in WIDTHS:
        weight = torch.randn(features, inputs).to(dtype) / inputs**0.5
        packed = lz.PackedWeight(weight)
        for rows in ROWS:
            arguments = {"input": torch.randn(rows, inputs).to(dtype), "weight": weight, "packed": packed}
            name = f"{rows}x{inputs} by {features}"
            yield name, RandomCall("linear", arguments, name)


def in_halves(tensor: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Positions as models of Transformers apply them: (B, S, H, D), tables (S, D)."""
    first, second = tensor.chunk(2, -1)
    return tensor * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def by_sorting(logits: Tensor) -> Tensor:
    """A token of the likeliest that add up to SHARE."""
    probabilities, order = logits.softmax(-1).sort(-1, descending=True)
    kept = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities > SHARE, 0.0)
    return order.gather(-1, torch.multinomial(kept, 1)).squeeze(-1)


def pieces(dtype: torch.dtype) -> Iterator[tuple[str, RandomCall, Callable[[], Any]]]:
    """Calls, and the same in torch."""
    for tokens in ROWS:
        query, key = (torch.randn(1, tokens, heads, 64).to(dtype) for heads in (32, 8))
        angles = torch.outer(torch.arange(tokens), 1e4 ** -(torch.arange(32) / 32))
        half = {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
        cos, sin = (torch.cat((each, each), -1) for each in half.values())
        yield (
            f"rope {tokens} x 32 and 8 heads of 64",
            RandomCall("rope", {"query": query, "key": key, "layout": "BSHD", **half}, "rope"),
            lambda query=query, key=key, cos=cos, sin=sin: (in_halves(query, cos, sin), in_halves(key, cos, sin)),
        )
        gate, up = (torch.randn(tokens, 8192).to(dtype) for _ in range(2))
        yield (
            f"silu_mul {tokens} x 8192",
            RandomCall("silu_mul", {"input": gate, "up": up}, "silu_mul"),
            lambda gate=gate, up=up: functional.silu(gate) * up,
        )
        joined = torch.cat((gate, up), -1)
        yield (
            f"silu_mul {tokens} x 8192, halves of one",
            RandomCall("silu_mul", {"input": joined}, "silu_mul"),
            lambda joined=joined: functional.silu(joined[:, :8192]) * joined[:, 8192:],
        )
        yield (
            f"gelu by tanh {tokens} x 8192",
            RandomCall("gelu", {"input": gate, "approximate": "tanh"}, "gelu"),
            lambda gate=gate: functional.gelu(gate, approximate="tanh"),
        )
    for rows in (1, 16) if dtype is torch.float32 else ():
        logits = torch.randn(rows, VOCAB) * 3
        yield (
            f"sample_topp {rows} x {VOCAB}",
            RandomCall("sample_topp", {"logits": logits, "top_p": SHARE, "seed": 7}, "sample_topp"),
            lambda logits=logits: by_sorting(logits),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32,bfloat16")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    effort = Effort(30, 0.4, fill=True)
    for dtype in (getattr(torch, each) for each in asked.dtype.split(",")):
        ratios = []
        print(f"\n| {str(dtype)[6:]} product | chosen | us | quickest | us | ratio |\n|---|---|---|---|---|---|")
        for name, call in products(dtype):
            found = contest(call, effort=effort)
            times = {kernel.id: measured.median_us for kernel, measured in found.times.items()}
            chosen, best = str(found.report.kernel_id), min(times, key=times.__getitem__)
            ratio = times[chosen] / times[best] if chosen in times else math.nan
            ratios.append(ratio)
            print(
                f"| {name} | {chosen} | {times.get(chosen, math.nan):.0f} | {best} | {times[best]:.0f} | {ratio:.2f} |"
            )
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        print(f"\n{len(ratios)} products in {dtype}: {mean:.3f} in the geometric mean, {max(ratios):.2f} at worst")
        print(f"\n| {str(dtype)[6:]} | chosen | lz, us | torch, us | times as fast |\n|---|---|---|---|---|")
        for name, call, stock in pieces(dtype):
            run = getattr(lz, call.function)
            beside = {"lz": lambda run=run, call=call: run(**call.arguments), "torch": stock}
            found = contest(call, effort=effort, beside=beside)
            ours, theirs = (statistics.median(found.others[each]) for each in ("lz", "torch"))
            print(f"| {name} | {found.report.kernel_id} | {ours:.1f} | {theirs:.1f} | {theirs / ours:.2f} |")
    print("\nload of the machine:", *(f"{each:.2f}" for each in os.getloadavg()))


if __name__ == "__main__":
    main()
