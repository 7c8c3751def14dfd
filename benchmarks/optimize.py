"""What ``lz.optimize`` gives whole models on a CPU, beside stock and others, in turn in one process.

    python benchmarks/optimize.py minilm llama --dtype bfloat16
    python benchmarks/optimize.py all --dtype bfloat16 --cpu avx2        # as a laptop without bf16 instructions
    python benchmarks/optimize.py minilm vit --dtype float32 --variants stock,lz,inputs,compile,onnxruntime

Random weights. Each round runs every variant once, stock first. One thread counts its own CPU time, which other
processes disturb least; several threads count wall time. A row gives the median of the ratios to stock of the same
dtype, the ratio of the fastest fifths, and the relative distance of the output from the float32 model's.

Variants: ``stock``; ``lz`` after ``lz.optimize(model)``; ``inputs`` after ``lz.optimize(model, inputs)``;
``attention`` alone; ``float32``: stock in float32; ``int8`` after ``lz.optimize(model, weights="int8",
activations="int8")``; ``compile`` after ``torch.compile``; ``onnxruntime`` and ``openvino`` (encoders alone): an
exported graph with dynamic sizes.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import layerzero as lz

CPUS = {"avx2": ("avx2", "avx2", "AVX2"), "avx512": ("avx512_vnni", "avx512", "AVX512_CORE_VNNI")}
VARIABLES = ("LAYERZERO_CPU_FEATURES", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
"""Poorer CPUs, and the variables that present them."""

LENGTHS = (95, 12, 9, 31, 14, 22, 10, 17, 8, 26, 30, 12)
"""Of a padded batch: 286 of 1,140 tokens are real."""


class Run(NamedTuple):
    """What is timed: ``call`` on what ``prepare`` made of the model, which is not timed."""

    call: Callable[[Any], Tensor]
    prepare: Callable[[Any], Any] = lambda model: model


class Workload(NamedTuple):
    """A model in float32, and what is run on it."""

    make: Callable[[], Any]
    runs: dict[str, Run]


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(1, 30000, (batch, length), generator=torch.Generator().manual_seed(0))


def floats(model: Any, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(next(model.parameters()).dtype)


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12
    )
    return transformers.BertModel(config, add_pooling_layer=False)


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=2048,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def mixture() -> Any:
    config = transformers.Qwen3MoeConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_experts=16,
        num_experts_per_tok=4, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=2048,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def unet() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=32, block_out_channels=(64, 128, 256), layers_per_block=1, cross_attention_dim=256,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=8,
    )  # fmt: skip


def dit() -> Any:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=6, attention_head_dim=64, num_layers=6, sample_size=32,
        num_embeds_ada_norm=1000, in_channels=4, out_channels=8,
    )  # fmt: skip


def encode(batch: int, length: int) -> Run:
    tokens = ids(batch, length)
    mask = torch.ones_like(tokens)
    return Run(lambda model: model(input_ids=tokens, attention_mask=mask).last_hidden_state)


def sentences() -> Run:
    tokens = ids(len(LENGTHS), max(LENGTHS))
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    return Run(lambda model: model(input_ids=tokens, attention_mask=mask).last_hidden_state[mask.bool()])


def prompt(length: int) -> Run:
    tokens = ids(1, length)
    return Run(lambda model: model(tokens, logits_to_keep=1).logits)


def decode(length: int, width: int = 1, steps: int = 8) -> Run:
    """Steps of so many tokens after a prompt."""
    tokens = ids(1, length + width * steps)

    def prepare(model: Any) -> tuple[Any, Any]:
        cache = transformers.DynamicCache(config=model.config)
        model(tokens[:, :length], past_key_values=cache, logits_to_keep=1)
        return model, cache

    def call(prepared: tuple[Any, Any]) -> Tensor:
        model, cache = prepared
        rows = tokens[:, length:].split(width, dim=1)
        return torch.cat([model(each, past_key_values=cache).logits for each in rows], dim=1)

    return Run(call, prepare)


def generate(model: Any) -> Tensor:
    longest = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    return model.generate(input_ids=ids(1, 64), **longest).float()


WORKLOADS = {
    "minilm": Workload(bert, {f"{b}x{t}": encode(b, t) for b, t in ((1, 16), (8, 64), (8, 128), (32, 16), (32, 128))}),
    "sentences": Workload(bert, {"12 texts": sentences()}),
    "llama": Workload(
        llama,
        {"prompt 256": prompt(256), "prompt 512": prompt(512), "token": decode(256), "4 tokens": decode(256, 4, 4)},
    ),
    "moe": Workload(mixture, {"prompt 256": prompt(256), "token": decode(64)}),
    "gpt2": Workload(
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=6)),
        {"prompt 256": prompt(256), "token": decode(256)},
    ),
    "vit": Workload(
        lambda: transformers.ViTModel(transformers.ViTConfig(num_hidden_layers=6), add_pooling_layer=False),
        {"224": Run(lambda model: model(floats(model, 1, 3, 224, 224)).last_hidden_state)},
    ),
    "whisper": Workload(
        lambda: transformers.WhisperModel(transformers.WhisperConfig(encoder_layers=4, decoder_layers=1)).encoder,
        {"30 s": Run(lambda model: model(floats(model, 1, 80, 3000)).last_hidden_state)},
    ),
    "t5": Workload(
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(decoder_start_token_id=0, eos_token_id=None)
        ),
        {"generate": Run(generate)},
    ),
    "dit": Workload(
        dit,
        {
            "32x32": Run(
                lambda model: (
                    model(
                        floats(model, 2, 4, 32, 32), timestep=torch.tensor([5, 5]), class_labels=torch.tensor([1, 2])
                    ).sample
                )
            )
        },
    ),
    "unet": Workload(
        unet, {"32x32": Run(lambda model: model(floats(model, 2, 4, 32, 32), 5, floats(model, 2, 77, 256)).sample)}
    ),
}


def variant(name: str, stock: Any, run: Run, budget_s: float) -> Any:
    """A copy of the model as a variant runs it. Raises what the variant raises where it cannot."""
    model = copy.deepcopy(stock)
    if name == "attention":
        lz.register_with_transformers()
        model.set_attn_implementation("layerzero")
    elif name == "lz":
        lz.optimize(model)
    elif name == "inputs":
        lz.optimize(model, lambda: run.call(run.prepare(model)), budget_s=budget_s)
    elif name == "int8":
        lz.optimize(model, weights="int8", activations="int8")
    elif name == "float32":
        model.float()
    elif name == "compile":
        return torch.compile(model)
    elif name in ("onnxruntime", "openvino"):
        return exported(name, model)
    return model


def exported(library: str, model: Any) -> Callable[..., Any]:
    """An encoder of token ids as an ONNX graph in one of the two libraries."""

    class Encoder(torch.nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    model.requires_grad_(False)  # the export takes no parameter with a gradient as a constant
    names = ["input_ids", "attention_mask"]
    axes = {each: {0: "batch", 1: "length"} for each in (*names, "output")}
    path = Path(tempfile.mkdtemp()) / "model.onnx"
    tokens = ids(2, 16)
    torch.onnx.export(
        Encoder(), (tokens, torch.ones_like(tokens)), str(path),
        input_names=names, output_names=["output"], dynamic_axes=axes, dynamo=False,
    )  # fmt: skip
    if library == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # it would beside the others' runs
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

        def run(**inputs: Tensor) -> Any:
            (output,) = session.run(None, {each: inputs[each].numpy() for each in names})
            return SimpleNamespace(last_hidden_state=torch.from_numpy(output))

        return run
    import openvino

    compiled = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_NUM_THREADS": torch.get_num_threads()})

    def call(**inputs: Tensor) -> Any:
        output = compiled({each: inputs[each].numpy() for each in names})[0]
        return SimpleNamespace(last_hidden_state=torch.from_numpy(output.copy()))

    return call


def compare(name: str, dtype: torch.dtype, variants: Sequence[str], only: str, rounds: int, budget_s: float) -> None:
    """Print a row for each variant and run of a workload."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    true = workload.make().eval().to(dtype).float()
    stock = copy.deepcopy(true).to(dtype)
    for what, run in workload.runs.items():
        if only not in what:
            continue
        expected = run.call(run.prepare(true)).double()
        models, times, off, making_s = {}, {}, {}, {}
        for each in variants:
            torch._dynamo.reset()
            began = time.perf_counter()
            try:
                models[each] = variant(each, stock, run, budget_s)
                making_s[each] = time.perf_counter() - began
                output = run.call(run.prepare(models[each])).double()
            except Exception as error:  # noqa: BLE001  # a variant that cannot run this model says so and is left out
                models.pop(each, None)
                print(f"{name:10} {what:11} {each:12} cannot run: {type(error).__name__}: {str(error)[:100]}")
                continue
            off[each], times[each] = ((output - expected).norm() / expected.norm()).item(), []
        for _ in range(rounds):
            for each, model in models.items():
                prepared = run.prepare(model)
                began = clock()
                run.call(prepared)
                times[each].append(clock() - began)
        fifth = max(1, rounds // 5)
        least = {each: statistics.mean(sorted(seconds)[:fifth]) for each, seconds in times.items()}
        for each, seconds in times.items():
            ratio = statistics.median(a / b for a, b in zip(times["stock"], seconds, strict=True))
            print(
                f"{name:10} {what:11} {each:12} {statistics.median(seconds) * 1e3:9.2f} ms  {ratio:5.2f} "
                f"({least['stock'] / least[each]:.2f})  off {off[each]:.1e}  made in {making_s[each]:.1f} s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=[*WORKLOADS, "all"])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--variants", default="stock,lz")
    parser.add_argument("--cpu", choices=CPUS, help="run as on a poorer CPU")
    parser.add_argument("--only", default="", help="runs whose name holds this text")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget-s", type=float, default=60.0)
    given = parser.parse_args()
    if given.cpu and os.environ.get("ATEN_CPU_CAPABILITY") != CPUS[given.cpu][1]:
        os.environ.update(zip(VARIABLES, CPUS[given.cpu], strict=True))
        os.execv(sys.executable, [sys.executable, *sys.argv])  # torch and oneDNN read them once
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(given.threads)
    names = list(WORKLOADS) if "all" in given.workloads else given.workloads
    with torch.no_grad():
        for name in names:
            compare(
                name, getattr(torch, given.dtype), given.variants.split(","), given.only, given.rounds, given.budget_s
            )


if __name__ == "__main__":
    main()
