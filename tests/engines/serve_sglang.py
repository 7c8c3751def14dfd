"""A process that serves tiny models by SGLang, with its own attention and with LayerZero's: prints JSON of tokens.

python serve_sglang.py '{"root": "/tmp/models", "kinds": ["Llama"], "options": {"page_size": 16}}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from serve_vllm import MARK, prompts

BACKENDS = {"own": "torch_native", "layerzero": "layerzero"}
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "disable_cuda_graph": True, "skip_tokenizer_init": True}
OPTIONS |= {"max_total_tokens": 8192, "skip_server_warmup": True, "log_level": "error", "sampling_backend": "pytorch"}
OPTIONS |= {"grammar_backend": "none", "disable_hybrid_swa_memory": True, "mem_fraction_static": 0.2}


def served(root: str, kind: str, backend: str, options: dict[str, Any]) -> list[list[int]]:
    """Tokens of two turns, the second of which finds prefixes."""
    import sglang

    named = BACKENDS[backend]
    engine = sglang.Engine(model_path=str(Path(root) / kind), attention_backend=named, **OPTIONS | options)
    try:
        wanted = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        ids = [[each["prompt_token_ids"] for each in prompts(turn)] for turn in (0, 1)]
        turns = [engine.generate(input_ids=each, sampling_params=wanted) for each in ids]
        return [list(each["output_ids"]) for turn in turns for each in turn]
    finally:
        engine.shutdown()


def main() -> None:
    """Serve every kind with every backend, and print what came of it."""
    import layerzero.integrations.sglang

    layerzero.integrations.sglang.register()
    asked = json.loads(sys.argv[1])
    found = {
        f"{kind} {backend}": served(asked["root"], kind, backend, asked.get("options", {}))
        for kind in asked["kinds"]
        for backend in BACKENDS
    }
    sys.stdout.write(f"{MARK}{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
