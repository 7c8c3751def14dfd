"""A process that serves tiny models by vLLM, with its own attention and with LayerZero's: prints JSON of what they did.

python serve_vllm.py '{"root": "/tmp/models", "kinds": ["Llama"], "options": {}}'
"""

from __future__ import annotations

import gc
import json
import logging
import random
import sys
from pathlib import Path
from typing import Any

MARK = "ENGINE SAID "
BACKENDS = {"own": {}, "layerzero": {"attention_backend": "CUSTOM"}}
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "skip_tokenizer_init": True}
OPTIONS |= {"max_num_seqs": 8, "max_num_batched_tokens": 64, "enable_chunked_prefill": True, "block_size": 32}
OPTIONS |= {"kv_cache_memory_bytes": 2**26, "disable_log_stats": True, "seed": 0}
"""Prompts are longer than a step, so that they come in chunks; more of them than sequences run at once."""


def prompts(turn: int) -> list[dict[str, Any]]:
    """Twelve, every second one behind a shared prefix of 100 tokens; some repeat themselves, as drafts want it."""
    shared, own = random.Random(5), random.Random(turn)
    prefix = [shared.randrange(250) for _ in range(100)]
    made = []
    for place in range(12):
        body = [own.randrange(250) for _ in range(own.randint(3, 120))]
        made.append((prefix if place % 2 else []) + (body[:5] * 8 if place % 3 == 0 else body))
    return [{"prompt_token_ids": each} for each in made]


def heard() -> list[dict[str, Any]]:
    """Four prompts with a sound each, of different lengths; the text begins with what starts a transcript."""
    import numpy as np
    from tiny_models import AUDIO

    draw, made = np.random.default_rng(0), []
    for place in range(4):
        sound = draw.standard_normal(AUDIO - 3000 * place).astype("float32"), 16000
        encoder = {"prompt": "", "multi_modal_data": {"audio": sound}}
        decoder = {"prompt_token_ids": [1, 2, *range(5, 8 + place)]}
        made.append({"encoder_prompt": encoder, "decoder_prompt": decoder})
    return made


def implementations(worker: Any) -> list[str]:
    """The classes of a worker's attention layers."""
    layers = worker.model_runner.vllm_config.compilation_config.static_forward_context.values()
    return sorted({type(each.impl).__name__ for each in layers if hasattr(each, "impl")})


def replaced(worker: Any) -> list[str]:
    """Layers of the model that LayerZero computes, by the names of their classes."""
    module = "layerzero.integrations.vllm_operators"
    return sorted({type(each).__name__ for each in worker.get_model().modules() if type(each).__module__ == module})


def served(root: str, kind: str, backend: str, options: dict[str, Any]) -> dict[str, Any]:
    """Tokens of two turns, the second of which finds prefixes; of an encoder embeddings, of a Whisper one turn."""
    import vllm

    encodes, hears = kind == "Bert", kind == "Whisper"
    pooling = {"runner": "pooling", "max_num_batched_tokens": 512, "skip_tokenizer_init": False}
    hearing = {"max_model_len": 100, "max_num_seqs": 3, "max_num_batched_tokens": 256, "skip_tokenizer_init": False}
    more = pooling if encodes else hearing if hears else {}
    engine = vllm.LLM(model=str(Path(root) / kind), **OPTIONS | more | BACKENDS[backend] | options)
    try:
        said = {name: engine.collective_rpc(ask) for name, ask in (("layers", implementations), ("replaced", replaced))}
        if encodes:
            found = engine.embed(prompts(0), use_tqdm=False)
            return said | {"result": [list(each.outputs.embedding) for each in found]}
        wanted = vllm.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
        asked = [heard()] if hears else [prompts(turn) for turn in (0, 1)]
        turns = [engine.generate(each, wanted, use_tqdm=False) for each in asked]
        return said | {"result": [list(each.outputs[0].token_ids) for turn in turns for each in turn]}
    finally:
        del engine
        gc.collect()


class Heard(logging.Handler):
    """What LayerZero logged, and what was warned of."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def main() -> None:
    """Serve every kind with every backend, and print what came of it."""
    asked = json.loads(sys.argv[1])
    heard, found = Heard(), dict[str, Any]()
    log = logging.getLogger("layerzero")
    log.addHandler(heard)
    log.setLevel(logging.INFO)
    logging.captureWarnings(capture=True)  # that a reference runs is a warning the first time
    logging.getLogger("py.warnings").addHandler(heard)
    for kind in asked["kinds"]:
        for backend in asked.get("backends", BACKENDS):
            heard.texts.clear()
            try:
                said = served(asked["root"], kind, backend, asked.get("options", {}) | asked.get(backend, {}))
            except Exception as error:  # noqa: BLE001  # one kind says nothing of the next
                said = {"error": f"{type(error).__name__}: {error}"}
            found[f"{kind} {backend}"] = said | {"log": list(heard.texts)}
    sys.stdout.write(f"{MARK}{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
