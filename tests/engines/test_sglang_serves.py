"""SGLang itself on the CPU, by its own attention and by LayerZero's: the same tokens.

`make test-engines` runs this beside vLLM, in the same virtual environment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import serve_sglang
import tiny_models

MISSING = [name for name in ("sglang", "transformers", "zmq", "orjson") if importlib.util.find_spec(name) is None]
STAND_INS = Path(__file__).parent / "stand_ins"

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(bool(MISSING), reason=f"wanted SGLang, got none of {', '.join(MISSING)}: make test-engines"),
]


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        (["Llama", "Mistral", "Qwen2"], {"page_size": 1}),
        (["Llama", "Mistral", "Qwen3"], {"page_size": 16, "chunked_prefill_size": 64}),
    ],
    ids=["a token a page", "pages of 16 and chunks"],
)
def test_both_backends_write_the_same_tokens(tmp_path, kinds, options):
    for kind in kinds:
        tiny_models.write(tmp_path, kind)
    path = os.pathsep.join([str(STAND_INS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    request = json.dumps({"root": str(tmp_path), "kinds": kinds, "options": options})
    command = [sys.executable, serve_sglang.__file__, request]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith(serve_sglang.MARK)]
    assert said, done.stdout[-2000:] + done.stderr[-6000:]
    found = json.loads(said[0].removeprefix(serve_sglang.MARK))
    for kind in kinds:
        assert found[f"{kind} layerzero"] == found[f"{kind} own"]
        assert len({token for each in found[f"{kind} own"] for token in each}) > 10, "tokens that say something"
