"""Write with a decoder: one line makes each step one replayed CUDA graph, and ``generate`` stays as it was.

pip install -e ".[cpu,transformers]"

The model is random and small; put ``AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16")`` in its place. On a
CPU the same code runs without a graph.
"""

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import layerzero as lz

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}


def write(model: LlamaForCausalLM, prompt: torch.Tensor, words: int) -> tuple[list[int], float]:
    """Write greedily; the words, and seconds for each."""
    started = time.perf_counter()
    told = {"max_new_tokens": words, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    written = model.generate(prompt, **told)[0, prompt.shape[1] :].tolist()
    return written, (time.perf_counter() - started) / words


def main(words: int = 12) -> None:
    """Write stock, optimised, and stock again."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=4096, eos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    prompt = torch.randint(1, 4096, (1, 64), device=DEVICE)
    with torch.no_grad():
        write(model, prompt, 4)
        wanted, stock_s = write(model, prompt, words)
        report = lz.optimize(model, graph=True)
        write(model, prompt, 4)  # captures the step
        got, ours_s = write(model, prompt, words)
    print(report)
    print(f"stock {stock_s * 1e3:.2f} ms a word, optimised {ours_s * 1e3:.2f} ms")
    same = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b), words)
    print(f"the first {same} of {words} words are the same")
    report.undo()


if __name__ == "__main__":
    main()
