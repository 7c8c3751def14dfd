"""What a user must not notice: the same tokens, logits as near to the truth, the same perplexity.

    python benchmarks/same_tokens.py                 # every model of the tests that writes text, then a trained one
    python benchmarks/same_tokens.py Llama Mixtral --device cuda

Each model (small, random weights, those of the tests) writes 64 tokens greedily in float32 after prompts of three
lengths, padded on the left where the model can be: stock, with ``attn_implementation="layerzero"``, after
``lz.optimize``, and after ``lz.optimize(graph=True)``. Then each runs 20 draws of prompts in bfloat16: how far a
token's farthest logit is from the same weights' in float64, over stock's own, in the median and for one token of a
hundred. At last a model of 400,000 weights learns to write this project's pages byte by byte, and is asked for the
perplexity of pages that it has not seen.

A difference in tokens is told with the place where it begins and how far apart stock's two best logits are there: where
they are as near as rounding, either is right.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import pathlib
import sys
from typing import Any

import torch
import transformers

import layerzero as lz

PROJECT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT / "tests" / "integrations"))
import architectures  # noqa: E402  # the models of the tests

TOKENS = 64
ROOM = {"max_position_embeddings": 128, "n_positions": 128, "max_target_positions": 128}
"""The models of the tests have room for 64 tokens, prompt included."""

DRAWS = 20
"""Of prompts without padding, 1,020 tokens. Not the farthest of all: in bfloat16 one token of a thousand of DeepseekV3
takes another expert than in float64, stock's as well as ours, and is 30 times farther off than others."""

WINDOW, BATCH, STEPS = 128, 16, 500
"""Of the model that is trained, in bytes; it reads batches of windows."""

WRITERS = architectures.generating()


def made(architecture: architectures.Architecture, device: str) -> tuple[Any, Any]:
    """The stock model and the one with LayerZero's attention, of the same weights."""
    lz.register_with_transformers()
    sizes = {name: ROOM.get(name, value) for name, value in architecture.sizes.items()}
    eager, ours = dataclasses.replace(architecture, sizes=sizes).pair()
    if type(eager)._supports_sdpa:
        eager.set_attn_implementation("sdpa")  # what a user has
    return eager.to(device), ours.to(device)


def drawn(kind: str, device: str, padded: str, seed: int) -> dict[str, Any]:
    """Prompts of three lengths, padded on one side; or of one, where a model's state would read what pads them."""
    torch.manual_seed(seed)
    return {name: each.to(device) for name, each in architectures.inputs(kind, padded).items()}


def written(model: Any, call: dict[str, Any]) -> torch.Tensor:
    """The tokens of greedy generation, those of the prompt left out."""
    call = {name: each for name, each in call.items() if not name.startswith("decoder_")}
    told = {"min_new_tokens": TOKENS, "max_new_tokens": TOKENS, "do_sample": False}
    return model.generate(**call, **told, pad_token_id=0)[:, -TOKENS:].cpu()


def differing(stock: Any, call: dict[str, Any], wanted: torch.Tensor, got: torch.Tensor) -> str:
    """An empty text where the tokens are the same; else where they are not, and how near stock's choice was."""
    if torch.equal(wanted, got):
        return ""
    row, place = (wanted != got).nonzero()[0].tolist()
    told = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    call = {name: each for name, each in call.items() if not name.startswith("decoder_")}
    made = stock.generate(**call, **told, output_logits=True, return_dict_in_generate=True)
    best = made.logits[place][row].float().topk(2).values
    said = f"row {row} from token {place}: {wanted[row, place]}, got {got[row, place]}"
    return f"{said}; stock's best two {best[0] - best[1]:.1e} apart"


def farther(truths: list[torch.Tensor], stock: list[torch.Tensor], got: list[torch.Tensor]) -> list[float]:
    """How far a token's farthest logit is from the truth, over stock's: the median, and of one token of a hundred."""
    wide, narrow = (
        torch.cat([(each - truth).abs().amax(-1).flatten() for each, truth in zip(some, truths, strict=True)])
        for some in (got, stock)
    )
    return [(wide.quantile(share) / narrow.quantile(share)).item() for share in (0.5, 0.99)]


@torch.no_grad()
def compared(architecture: architectures.Architecture, device: str) -> tuple[list[str], list[list[float]]]:
    """What differs in tokens, and the distances in bfloat16: LayerZero's attention alone, optimized, and in steps."""
    stock, ours = made(architecture, device)
    padded = "none" if architecture.kind == "hybrid" else "left"
    call = drawn(architecture.kind, device, padded, 0)
    wanted, alone = written(stock, call), written(ours, call)
    optimized, stepping = copy.deepcopy(stock), copy.deepcopy(stock)
    lz.optimize(optimized)
    lz.optimize(stepping, graph=True)
    texts = [
        differing(stock, call, wanted, each) for each in (alone, written(optimized, call), written(stepping, call))
    ]

    full = [drawn(architecture.kind, device, "none", number) for number in range(DRAWS)]

    def logits(model: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        calls = [
            {name: each.to(dtype) if each.is_floating_point() else each for name, each in call.items()} for call in full
        ]
        return [model.to(dtype)(**each).logits.double() for each in calls]

    narrow = stock.bfloat16()
    near = logits(narrow, torch.bfloat16)
    exact = copy.deepcopy(narrow)
    if hasattr(exact, "set_experts_implementation"):  # torch's grouped products take no float64
        exact.set_experts_implementation("eager")
    truth = logits(exact, torch.float64)
    found = [logits(ours, torch.bfloat16)]
    lz.optimize(narrow)
    found.append(logits(narrow, torch.bfloat16))
    return texts, [farther(truth, near, each) for each in found]


def trained(device: str) -> tuple[Any, torch.Tensor]:
    """A small Llama that read this project's pages, and pages that it did not read, as bytes."""
    pages = sorted((PROJECT / "docs").rglob("*.md"))
    held = [each for number, each in enumerate(pages) if number % 8 == 0]
    text, unread = (
        torch.tensor(list(b"\n".join(each.read_bytes() for each in some)), device=device)
        for some in ([each for each in pages if each not in held], held)
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=2 * WINDOW, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(device)
    print(f"a model of {sum(each.numel() for each in model.parameters())} weights reads {len(text)} bytes")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    for step in range(STEPS):
        starts = torch.randint(0, len(text) - WINDOW, (BATCH,))
        ids = torch.stack([text[start : start + WINDOW] for start in starts.tolist()])
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"  step {step} of {STEPS}: {loss.item() / math.log(2):.2f} bits a byte", flush=True)
    return model.eval(), unread


@torch.no_grad()
def perplexity(model: Any, text: torch.Tensor) -> float:
    """Of a text, a window at a time: the exponential of the mean surprise of a byte."""
    windows = text[: len(text) // WINDOW * WINDOW].view(-1, WINDOW)
    losses = [
        torch.nn.functional.cross_entropy(
            model(part).logits[:, :-1].double().flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
        ).item()
        for part in windows.split(32)
    ]
    return math.exp(sum(losses) / (windows.numel() - len(windows)))


def perplexities(device: str) -> dict[str, list[float]]:
    """Of stock, LayerZero's attention, and optimized, by dtype."""
    model, unread = trained(device)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        stock, ours, optimized = (copy.deepcopy(model).to(dtype) for _ in range(3))
        ours.set_attn_implementation("layerzero")
        lz.optimize(optimized)
        found[str(dtype)[6:]] = [perplexity(each, unread) for each in (stock, ours, optimized)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models, as in tests/integrations/architectures.py; default: all")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    if unknown := set(asked.names) - {each.name for each in WRITERS}:
        parser.error(f"names: wanted some of {', '.join(each.name for each in WRITERS)}, got {', '.join(unknown)}")
    transformers.utils.logging.set_verbosity_error()
    wrong = 0
    print("| model | kind | 64 tokens: attention | optimized | in steps | bf16 over stock's: attention | optimized |")
    print("|---|---|---|---|---|---|---|")
    count, worst = 0, [0.0, 0.0]
    for each in WRITERS:
        if asked.names and each.name not in asked.names:
            continue
        texts, ratios = compared(each, asked.device)
        wrong += any(texts) or any(math.isnan(ratio) for way in ratios for ratio in way)  # max() passes over NaN
        cells = [text or "same" for text in texts] + [f"{median:.2f}, {far:.2f}" for median, far in ratios]
        print(f"| {each.name} | {each.kind} | {' | '.join(cells)} |", flush=True)
        count, worst = count + 1, [max(kept, *found) for kept, found in zip(worst, ratios, strict=True)]
    print(f"\n{count} models, {wrong} with other tokens or NaN; ", end="")
    print(f"farthest from float64 {worst[0]:.2f} and {worst[1]:.2f}\n")
    if not asked.names:
        for dtype, values in perplexities(asked.device).items():
            print(f"perplexity, {dtype}: stock {values[0]:.4f}, attention {values[1]:.4f}, optimized {values[2]:.4f}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
