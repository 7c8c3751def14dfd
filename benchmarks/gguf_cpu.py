"""Decoding a Llama of random GGUF weights on a CPU through ``lz.optimize``, beside llama.cpp.

    python benchmarks/gguf_cpu.py [--format Q4_K_M] [--hidden 2048 --inner 5632 --layers 2] [--mapped | --unmapped]

Needs ``llama-cpp-python`` and ``gguf``. Both models have the same weights, and each writes one token a turn in one
process. The products alone and the model without any follow in each turn: what is left of a step is the host's. One
thread is measured by its CPU time, several by the clock. The table has the lower quartile of all turns, which other
work on the machine moves least. Transformers' own module for GGUF's blocks stands in for what loads the file.

llama.cpp reads weights in the mapped file, of which a kernel of Linux may make pages of 2 MB. Transformers copies them
to memory that often has pages of 4 KB; ``--mapped`` lets both read the file,
``--unmapped`` neither.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.integrations.gguf.utils import GgufLinear

import layerzero as lz
from layerzero.backends import ggml
from layerzero.ops.quantize.gguf import NUMBERS
from layerzero.ops.quantize.schemes import scheme_of

TYPES = {name: number for number, name in NUMBERS.items()}
NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip
SIZES = {
    "hidden": 2048, "inner": 5632, "layers": 2, "width": 64, "kv-heads": 4, "vocabulary": 8000,
    "threads": 1, "turns": 60, "budget": 300,
}  # fmt: skip
PROMPT = 64


class Blocks(GgufLinear):
    """Transformers' module for GGUF's blocks, whose own product of few rows needs a kernel of the hub."""

    def forward(self, x: Tensor) -> Tensor:
        """Dequantise in parts, and multiply."""
        return self._unpack_matmul(x.reshape(-1, self.in_features)).view(*x.shape[:-1], -1)


def kind_of(text: str, name: str, layer: int) -> str:
    """The type of a tensor; of Q4_K_M some are Q6_K."""
    if text != "Q4_K_M":
        return text
    return "Q6_K" if name == "lm_head" or (name in ("v_proj", "down_proj") and layer % 2 == 0) else "Q4_K"


def products(model: LlamaForCausalLM) -> Iterator[tuple[torch.nn.Module, str, int]]:
    """Each product's parent, its name there, and its layer."""
    for number, layer in enumerate(model.model.layers):
        for name in NAMES:
            yield layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp, name, number
    yield model, "lm_head", 0


def made(args: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama whose products are random blocks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden, intermediate_size=args.inner, num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // args.width, num_key_value_heads=args.kv_heads, head_dim=args.width,
        vocab_size=args.vocabulary, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(getattr(torch, args.dtype)).eval().requires_grad_(False)
    for seed, (parent, name, layer) in enumerate(products(model)):
        kind = kind_of(args.format, name, layer)
        outputs, inputs = getattr(parent, name).weight.shape
        of, blocks = lz.WeightFormat("gguf", kind), Blocks(inputs, outputs, TYPES[kind])
        drawn = scheme_of(of).random(of, outputs, inputs, torch.Generator().manual_seed(seed))
        blocks.weight = torch.nn.Parameter(drawn.data, requires_grad=False)
        setattr(parent, name, blocks)
    return model.eval()


def written(path: Path, model: LlamaForCausalLM) -> None:
    """The same weights as llama.cpp reads them."""
    config, file = model.config, gguf.GGUFWriter(path, "llama")
    file.add_context_length(2048)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_rope_dimension_count(config.head_dim)
    file.add_vocab_size(config.vocab_size)
    file.add_tokenizer_model("none")
    file.add_tensor("token_embd.weight", model.model.embed_tokens.weight.float().numpy())
    norms = [f"blk.{layer}.{of}_norm" for layer in range(config.num_hidden_layers) for of in ("attn", "ffn")]
    for name in ("output_norm", *norms):
        file.add_tensor(f"{name}.weight", np.ones(config.hidden_size, np.float32))
    for parent, name, layer in products(model):
        at, blocks = f"blk.{layer}.{NAMES[name]}" if name in NAMES else "output", getattr(parent, name)
        kind = gguf.GGMLQuantizationType(blocks.ggml_type)
        file.add_tensor(f"{at}.weight", blocks.weight.numpy(), raw_dtype=kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def mapped(path: Path, model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with its weights where they lie in the file."""
    known = {each.name: each.data for each in gguf.GGUFReader(path, "c").tensors}  # not written through
    for parent, name, layer in products(model):
        data = known[f"blk.{layer}.{NAMES[name]}.weight" if name in NAMES else "output.weight"]
        getattr(parent, name).weight = torch.nn.Parameter(torch.from_numpy(data), requires_grad=False)
    return model


def stepping(model: LlamaForCausalLM, prompt: Tensor) -> Callable[[], object]:
    """What writes a token behind a prompt."""
    cache, token = DynamicCache(config=model.config), torch.tensor([[5]])
    model(prompt, past_key_values=cache, use_cache=True)
    return lambda: model(token, past_key_values=cache, use_cache=True)


def without_products(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with products that give unwritten memory."""

    def nothing(self: GgufLinear, rows: Tensor) -> Tensor:
        return rows.new_empty((*rows.shape[:-1], self.out_features))

    for parent, name, _ in products(model):
        getattr(parent, name).forward = types.MethodType(nothing, getattr(parent, name))
    return model


def alone(model: LlamaForCausalLM) -> Callable[[], None]:
    """ggml's products of a step, one after the other."""
    multiply = ggml.of_thread().products
    each = [getattr(parent, name) for parent, name, _ in products(model)]
    calls = [(of.ggml_type, of.weight, torch.randn(1, of.in_features)) for of in each]

    def run() -> None:
        for call in calls:
            multiply(*call)

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="Q4_K_M")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--mapped", action="store_true")
    parser.add_argument("--unmapped", action="store_true")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    model, prompt = made(args), torch.randint(0, args.vocabulary, (1, PROMPT))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        written(Path(folder) / "model.gguf", model)
        theirs = llama_cpp.Llama(
            str(Path(folder) / "model.gguf"), n_ctx=max(512, PROMPT + args.turns), verbose=False,
            n_threads=args.threads, n_threads_batch=args.threads, use_mmap=not args.unmapped,
        )  # fmt: skip
        theirs.eval(prompt[0].tolist())
        model = mapped(Path(folder) / "model.gguf", model) if args.mapped else model
        bare, floor = stepping(without_products(made(args)), prompt), alone(model)
        report = lz.optimize(model, activations="int8", budget_s=args.budget)
        print("kernels:", *sorted({each.kernel for each in report.replaced if each.kernel}))
        print("left:", *sorted({each.why[:120] for each in report.left}), sep="\n  ")
        runs = {"llama.cpp": lambda: theirs.eval([5]), "LayerZero": stepping(model, prompt)}
        runs |= {"products alone": floor, "without products": bare}
        clock, times = time.thread_time if args.threads == 1 else time.perf_counter, {name: [] for name in runs}
        for _ in range(args.turns):
            for name, run in runs.items():
                begin = clock()
                run()
                times[name].append(clock() - begin)
    size = sum(getattr(parent, name).weight.nbytes for parent, name, _ in products(model))
    where = "the file" if args.mapped else "memory"
    print(f"{args.format} {args.dtype} in {where}, {args.layers} x {args.hidden} / {args.inner}, {size >> 20} MiB")
    first = statistics.quantiles(times["llama.cpp"])[0]
    for name, each in times.items():
        quartile = statistics.quantiles(each)[0]
        print(f"  {name:17} {quartile * 1e3:6.2f} ms a token, {first / quartile:.2f} of llama.cpp's tokens a second")


if __name__ == "__main__":
    main()
