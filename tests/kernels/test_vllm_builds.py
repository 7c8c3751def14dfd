"""Where vLLM's versions keep their operators, and what these take; no GPU is needed to ask for either."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import layerzero as lz
from layerzero.backends.vllm import library, rows

OLD, NEW = "_C.abi3.so", "_C_stable_libtorch.abi3.so"


@pytest.fixture
def vllm(monkeypatch, tmp_path):
    """A folder that is found as vllm, and which of its libraries are loaded."""
    loaded = []
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(library, "_MARKS", {})
    monkeypatch.setattr(torch.ops, "load_library", lambda path: loaded.append(path.rsplit("/", 1)[-1]))
    library.operators.cache_clear()
    yield tmp_path / "vllm", loaded
    library.operators.cache_clear()


@pytest.mark.parametrize(
    ("present", "wanted", "loaded"),
    [
        ([OLD], "_C.abi3.so", OLD),
        ([OLD, NEW], "_C.abi3.so", OLD),
        ([NEW], "_C.abi3.so", NEW),
        (["_moe_C_stable_libtorch.abi3.so"], "_moe_C.abi3.so", "_moe_C_stable_libtorch.abi3.so"),
    ],
)
def test_operators_are_found_in_the_library_that_a_version_keeps_them_in(vllm, present, wanted, loaded):
    folder, seen = vllm
    for name in present:
        (folder / name).touch()
    library.operators(wanted, "_C")
    assert seen == [loaded]


def test_a_library_that_is_nowhere_is_told(vllm):
    with pytest.raises(ImportError, match=r"wanted _C\.abi3\.so next to .*, got none: a vllm without CUDA kernels"):
        library.operators(OLD, "_C")
    assert vllm[1] == []


@pytest.mark.parametrize("parameters", [6, 7])
def test_experts_are_chosen_by_an_operator_with_or_without_rows_that_count_for_nothing(monkeypatch, parameters):
    given = []

    def topk_softmax(*arguments):
        given.append(arguments)

    topk_softmax._schema = types.SimpleNamespace(arguments=[None] * parameters)
    names = types.SimpleNamespace(topk_softmax=types.SimpleNamespace(default=topk_softmax))
    monkeypatch.setattr(rows, "operators", lambda *_: names)
    rows._load_moe(None)(torch.randn(3, 8), top_k=2, renormalize=True, scale=1.0)
    assert len(given[0]) == parameters
    assert given[0][5:] == (None,) * (parameters - 5)


@pytest.mark.parametrize(
    ("torch_version", "install"),
    [
        ("2.11.0", "pip install vllm==0.20.0"),
        ("2.14.0", "pip install vllm==0.33.0, then prove it here: `layerzero vet --backend vllm`"),
    ],
)
def test_the_version_that_fits_torch_is_the_one_to_install(torch_version, install):
    query = torch.empty(1, 8, 128, 128, dtype=torch.bfloat16, device="meta")
    report = lz.explain(
        "attention", query, query, query, layout="BHSD", device="H100", libraries={"torch": torch_version}
    )
    (reason,) = [each for each in report.reasons("vllm.flash_attn.v3") if each.code == "NOT_INSTALLED"]
    assert reason.hint == f"Install it: {install}"
