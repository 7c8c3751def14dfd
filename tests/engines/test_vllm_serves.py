"""vLLM itself on the CPU, by its own attention and by LayerZero's: the same tokens.

`make test-engines` runs this in a virtual environment of its own, where vLLM has all that it needs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import serve_vllm
import tiny_models

MISSING = [name for name in ("vllm", "transformers", "xgrammar", "zmq") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        bool(MISSING), reason=f"wanted a whole vLLM, got none of {', '.join(MISSING)}: make test-engines"
    ),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


SLOW = "slow reference"
"""Words of the warning that a reference runs."""


def serve(root, kinds, *, processes=False, environment=None, **asked):
    """What a process says that serves these kinds by both backends; of those that vLLM starts, what they write."""
    for kind in kinds:
        if not (root / kind).exists():
            tiny_models.write(root, kind)
    environment = {**os.environ, **(environment or {})} | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function that asks workers for their classes
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    request = json.dumps({"root": str(root), "kinds": kinds, **asked})
    command = [sys.executable, serve_vllm.__file__, request]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith(serve_vllm.MARK)]
    assert found, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(found[0].removeprefix(serve_vllm.MARK)) | {"written": done.stdout + done.stderr}


def the_same(found, kind, impl="LayerZeroAttentionImpl", stock="CPUAttentionBackendImpl"):
    """Both backends' results, which are of vLLM's own class and of LayerZero's, and no call of which was slow."""
    own, ours = found[f"{kind} own"], found[f"{kind} layerzero"]
    assert "error" not in own, own
    assert "error" not in ours, ours
    assert {name for each in own["layers"] for name in each} == {stock}
    assert {name for each in ours["layers"] for name in each} == {impl}
    assert not [text for text in ours["log"] if SLOW in text]
    assert SLOW not in found["written"], "a worker's own log reaches nobody, its warnings are written"
    return own["result"], ours["result"]


@pytest.fixture(scope="module")
def decoders(root):
    return serve(root, [*tiny_models.DECODERS])


@pytest.mark.parametrize("kind", tiny_models.DECODERS)
def test_chunks_and_shared_prefixes_write_the_same_tokens(decoders, kind):
    own, ours = the_same(decoders, kind)
    assert ours == own
    assert len({token for each in own for token in each}) > 10, "tokens that say something"


def test_an_encoder_embeds_the_same(root):
    own, ours = the_same(serve(root, ["Bert"]), "Bert")
    assert ours == [pytest.approx(each, abs=1e-5) for each in own]


def test_a_decoder_over_an_encoder_writes_the_same_tokens(root):
    found = serve(root, ["Whisper"])
    own, ours = found["Whisper own"], found["Whisper layerzero"]
    assert [set(each) for each in own["layers"]] == [{"CPUAttentionBackendImpl", "CrossAttentionImpl"}]
    assert [set(each) for each in ours["layers"]] == [{"LayerZeroAttentionImpl", "CrossAttentionImpl"}]
    assert ours["result"] == own["result"]
    assert len({token for each in own["result"] for token in each}) > 5, "tokens that say something"


DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
LATENT = {"max_num_batched_tokens": 512, "block_size": 16, "compilation_config": {"custom_ops": ["none"]}}
"""vLLM takes no chunks of it on a CPU; its own rotation there (vllm-cpu 0.32.0) brings other tokens."""


@pytest.fixture(scope="module")
def latent(root):
    own = {"attention_backend": "CPU_MLA"}  # where a CPU has AMX, vLLM's choice computes bfloat16 alone
    found = serve(root, ["DeepseekV2"], options=LATENT, own=own)
    return the_same(found, "DeepseekV2", "LayerZeroLatentImpl", "CPUMLAImpl")


def test_latent_attention_writes_the_same_tokens(latent):
    own, ours = latent
    assert ours == own


def test_drafts_of_deepseek_write_the_tokens_of_no_drafts(root, latent):
    options = LATENT | {"speculative_config": DRAFTS}
    found = serve(root, ["DeepseekV2"], backends=["layerzero"], options=options)
    assert found["DeepseekV2 layerzero"]["result"] == latent[0]


def test_drafts_of_n_grams_write_the_same_tokens(root):
    found = {}
    for backend in serve_vllm.BACKENDS:  # a second engine with drafts fails in numba, in vLLM itself (0.32.0)
        found |= serve(root, ["Llama"], backends=[backend], options={"speculative_config": DRAFTS})
    own, ours = the_same(found, "Llama")
    assert ours == own


def test_a_cache_of_float8_writes_the_same_tokens(root):
    options = {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}
    found = serve(root, ["Llama", "Mistral"], options=options)
    for kind in ("Llama", "Mistral"):
        own, ours = the_same(found, kind)
        assert ours == own


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=["a worker", "two ranks"])
def test_processes_that_vllm_starts_know_the_backend(root, options):
    own, ours = the_same(serve(root, ["Llama"], processes=True, options=options), "Llama")
    assert ours == own


OPERATORS = "LAYERZERO_VLLM_OPERATORS"
EACH = "rms_norm,gemma_rms_norm,silu_and_mul,gelu_and_mul,rotary_embedding"
REPLACED = {
    "Llama": {"RMSNorm", "SiluAndMul", "RotaryEmbedding"},
    "Gemma2": {"GemmaRMSNorm", "GeluAndMul", "RotaryEmbedding"},
    "Qwen3": {"RMSNorm", "SiluAndMul", "RotaryEmbedding"},
    "GptOss": {"RMSNorm", "YaRNScalingRotaryEmbedding"},
}
"""Layers besides attention that LayerZero computes, of kinds that have them."""


@pytest.fixture(scope="module")
def with_operators(root):
    return serve(root, [*REPLACED], backends=["layerzero"], environment={OPERATORS: EACH})


@pytest.mark.parametrize("kind", REPLACED)
def test_norms_activations_and_rotations_write_the_same_tokens(decoders, with_operators, kind):
    ours = with_operators[f"{kind} layerzero"]
    assert [set(each) for each in ours["replaced"]] == [REPLACED[kind]]
    assert ours["result"] == decoders[f"{kind} own"]["result"]


def test_operators_are_replaced_one_by_one_in_every_process(root):
    found = serve(root, ["Llama"], backends=["own"], processes=True, environment={OPERATORS: "rms_norm"})
    assert found["Llama own"]["replaced"] == [["RMSNorm"]]


def test_all_leaves_out_what_gains_nothing_on_a_cpu(root):
    found = serve(root, ["Llama"], backends=["own"], environment={OPERATORS: "all"})
    assert found["Llama own"]["replaced"] == [["RMSNorm", "SiluAndMul"]]


def test_an_operator_that_vllm_has_not_is_told_and_vllm_serves(root):
    found = serve(root, ["Llama"], backends=["own"], environment={OPERATORS: "rms_norms"})["Llama own"]
    assert found["replaced"] == [[]]
    assert found["result"]
    assert any("wanted all, or some of rms_norm" in text for text in found["log"])


def test_what_layerzero_has_no_argument_for_is_refused_when_the_engine_is_made(root):
    found = serve(root, ["Llama"], backends=["layerzero"], options={"kv_cache_dtype": "int8_per_token_head"})
    assert "kv_cache_dtype" in found["Llama layerzero"]["error"]
