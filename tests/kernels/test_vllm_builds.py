"""Where vLLM's versions keep their operators, and what these take; no GPU is needed to ask for either."""

from __future__ import annotations

import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import layerzero as lz
from layerzero.backends import shape_cache
from layerzero.backends.vllm import library, rows
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.engine.legality import limit_findings
from layerzero.engine.registry import REGISTRY

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


@pytest.mark.parametrize(("device", "beyond"), [("H200", 16), ("B200", 0)])
def test_a_gate_loads_32_bytes_at_a_time_on_blackwell(monkeypatch, device, beyond):
    began = []

    def silu_and_mul(output, joined):
        began.append(joined.data_ptr() % 32)
        output.copy_(torch.nn.functional.silu(joined[..., :16]) * joined[..., 16:])

    names = types.SimpleNamespace(silu_and_mul=types.SimpleNamespace(default=silu_and_mul))
    monkeypatch.setattr(rows, "operators", lambda *_: names)
    joined = torch.randn(131 * 32 + 4)[4:].view(131, 32)
    assert joined.data_ptr() % 32 == 16
    operation = REGISTRY.operation("mlp.silu_mul.joined")
    facts = FactsBuilder(operation).build(joined, device=Device.named(device))
    assert not list(limit_findings(REGISTRY.kernel("vllm.silu_mul"), facts))
    got = REGISTRY.kernel("vllm.silu_mul").load(facts)(joined)
    assert began == [beyond]
    assert torch.equal(got, torch.nn.functional.silu(joined[:, :16]) * joined[:, 16:])


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


class OnGpu(torch.Tensor):
    """A tensor that says it lies elsewhere."""

    is_cuda = True


def test_a_thread_has_a_context_before_descriptors_are_made(monkeypatch):
    """Once in each thread, and where it has the tensor's device; an operator's own guard makes another one's."""
    made, current = [], [None]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    monkeypatch.setattr(shape_cache, "_BOUND", shape_cache._Bound())
    rows, elsewhere = torch.zeros(1), torch.zeros(1).as_subclass(OnGpu)
    for each in (rows, elsewhere, elsewhere):
        shape_cache.give_context(each)
    assert made == [elsewhere.device]
    with ThreadPoolExecutor(1) as other:
        current[0] = 1
        other.submit(shape_cache.give_context, elsewhere).result()
        assert len(made) == 1
        current[0] = None
        other.submit(shape_cache.give_context, elsewhere).result()
    assert len(made) == 2
