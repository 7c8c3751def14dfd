"""Warmup builds for shapes, for a manifest, or for what a model calls, and says what it did not build, and why."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch

import layerzero as lz
from compiled_norms import compiled_norm
from layerzero.serving import warmup


@pytest.fixture
def compiled():
    loads = []
    compiled_norm(loads.append)
    lz.configure(allow=["mine", "torch"])
    return loads


@pytest.mark.usefixtures("compiled")
def test_a_second_time_says_that_it_is_built():
    built = lz.warmup("rms_norm", [(8, 64)], device="cpu")
    assert [(each.kernel_id, each.error) for each in built] == [("mine.compiled", "")]
    again = lz.warmup("rms_norm", [(8, 64)], device="cpu")
    assert again == []
    assert [each.why for each in again.skipped if each.kernel_id == "mine.compiled"] == ["it was built before"]
    assert any("POLICY_DENIED" in each.why for each in again.skipped), "the others say why they are refused"


def test_what_a_model_calls_is_built(compiled):
    weight, told = torch.randn(64), []
    built = lz.warmup(lambda x: lz.rms_norm(x, weight), torch.randn(8, 64), progress=lambda *each: told.append(each))
    assert [each.kernel_id for each in built] == ["mine.compiled"]
    assert compiled == [64]
    assert [each[1:] for each in told] == [(0, 1), (1, 1)]


def test_what_a_manifest_lists_is_built(compiled, tmp_path):
    file = tmp_path / "workload.json"
    with lz.record(file):
        lz.rms_norm(torch.randn(8, 32), torch.randn(32))
    assert [each.operation for each in lz.warmup(manifest=file, device="cpu")] == ["norm.rms"]
    assert compiled == [32]
    with pytest.raises(ValueError, match="manifest: wanted it alone"):
        lz.warmup("rms_norm", [(8, 64)], manifest=file)


def test_a_dtype_that_nothing_would_hear_is_refused(compiled, tmp_path):
    file, weight = tmp_path / "workload.json", torch.randn(64)
    with lz.record(file):
        lz.rms_norm(torch.randn(8, 64), weight)
    with pytest.raises(ValueError, match="manifest: wanted it alone, got shapes, a dtype or parameters, too"):
        lz.warmup("rms_norm", dtype="float32", manifest=file)
    with pytest.raises(ValueError, match=r"^dtype: wanted with an operation's name alone, .*; give the model"):
        lz.warmup(lambda x: lz.rms_norm(x, weight), torch.randn(8, 64), dtype="bfloat16")
    assert compiled == []


def test_what_calls_of_one_class_compile_each_is_built(compiled, tmp_path):
    """Of a class three calls stand for all; a kernel that compiles for each width needs every width."""
    kernel = next(each for each in lz.list_kernels("rms_norm") if each.id == "mine.compiled")
    lz.unregister_kernel("mine.compiled")
    lz.register_backend([dataclasses.replace(kernel, build_key=lambda facts: facts.size("hidden"))])
    file = tmp_path / "workload.json"
    with lz.record(file, model="m1"):
        for width in (33, 36, 40, 44, 52, 36):
            for rows in (8, 9):
                lz.rms_norm(torch.randn(rows, width), torch.randn(width))
    assert not lz.readiness_check(file, device="cpu")
    assert len(lz.warmup(manifest=file, model="m1", device="cpu")) == 5
    assert sorted(set(compiled)) == [33, 36, 40, 44, 52]
    assert lz.readiness_check(file, device="cpu")


def test_what_other_calls_would_not_choose_is_not_built_for_each(compiled, tmp_path):
    """A kernel that compiles for every size is built for the calls that stand for a class, and chosen for none."""
    kernel = next(each for each in lz.list_kernels("rms_norm") if each.id == "mine.compiled")
    lz.unregister_kernel("mine.compiled")
    lz.register_backend([dataclasses.replace(kernel, build_key=lambda facts: facts.size("hidden"), priority=0)])
    file = tmp_path / "workload.json"
    with lz.record(file):
        for width in (33, 36, 40, 44, 52):
            lz.rms_norm(torch.randn(8, width), torch.randn(width))
    assert len(lz.warmup(manifest=file, device="cpu")) == 3
    assert lz.readiness_check(file, device="cpu")


def test_what_fails_to_build_is_tried_once_for_each_artefact(tmp_path):
    def load(facts):
        tried.append(facts.size("hidden"))
        raise RuntimeError("no such compiler")

    tried = []
    backend = lz.Backend("mine", "does not compile", origin="code")
    lz.register_backend(
        [
            lz.Kernel(
                id="mine.broken",
                operations=("norm.rms",),
                backend=backend,
                load=load,
                accepts=("eps",),
                jit=True,
                build_key=lambda facts: facts.size("hidden"),
            )
        ]
    )
    lz.configure(allow=["mine", "torch"])
    with lz.record(tmp_path / "workload.json"):
        for width in (33, 36, 40, 44, 52):
            for rows in (8, 9):
                lz.rms_norm(torch.randn(rows, width), torch.randn(width))
    built = lz.warmup(manifest=tmp_path / "workload.json", device="cpu")
    assert sorted(tried) == [33, 36, 40, 44, 52]
    assert len(built) == 5
    assert all("no such compiler" in each.error for each in built)


def test_a_manifest_of_another_model_is_an_error(tmp_path):
    file = tmp_path / "workload.json"
    with lz.record(file, model="m1"):
        lz.rms_norm(torch.randn(8, 32), torch.randn(32))
    with pytest.raises(ValueError, match="wanted a manifest of the model 'm2', got one of 'm1'"):
        lz.warmup(manifest=file, model="m2", device="cpu")
    with pytest.raises(ValueError, match="model: wanted it along with a manifest"):
        lz.warmup("rms_norm", [(8, 64)], model="m1", device="cpu")


def test_a_manifest_of_the_model_itself_holds_for_its_configuration(tmp_path):
    file, model = tmp_path / "workload.json", torch.nn.RMSNorm(32)
    with lz.record(file, model=model):
        lz.rms_norm(torch.randn(8, 32), model.weight.detach())
    same, wider = torch.nn.RMSNorm(32), torch.nn.RMSNorm(64)
    assert lz.readiness_check(file, model=same, device="cpu").calls == 1
    with pytest.raises(ValueError, match=r"wanted a manifest of the model 'RMSNorm .*', got one of 'RMSNorm "):
        lz.readiness_check(file, model=wider, device="cpu")
    assert lz.readiness_check(file, model=None, device="cpu").calls == 1
    with pytest.raises(ValueError, match=r"model: wanted a name or a torch\.nn\.Module, got 3"):
        lz.readiness_check(file, model=3, device="cpu")


@pytest.mark.usefixtures("compiled")
def test_a_call_that_memory_does_not_hold_is_skipped(monkeypatch):
    monkeypatch.setattr("layerzero.tuning.verification.build_child.available_bytes", lambda: 20_000.0)
    built = lz.warmup("rms_norm", [(8, 64), (1 << 40, 64)], device="cpu")
    assert [each.kernel_id for each in built] == ["mine.compiled"]
    (left,) = [each for each in built.skipped if each.kernel_id == "*"]
    assert left.call == f"norm.rms {1 << 40}x64 float32"
    assert left.why.startswith("too little memory: making its tensors takes 536870912 MiB, and 0 MiB may be used")


@pytest.mark.slow
def test_grouped_heads_and_caches_have_calls_to_build_for():
    looked_at = []
    lz.configure(allow=["torch"])
    shapes = [((1, 16, 8, 64), (1, 16, 2, 64))]
    lz.warmup("attention", shapes, device="cpu", layout="BSHD", progress=lambda text, *_: looked_at.append(text))
    lz.warmup("paged_attention", device="cpu", progress=lambda text, *_: looked_at.append(text))
    assert any(text.startswith("attention.gqa.prefill") for text in looked_at)
    assert any(".paged" in text for text in looked_at)


def test_what_warmup_did_is_told_in_lines():
    built = warmup.Artefact("mine.a", "norm.rms", 1.25)
    failed = warmup.Artefact("mine.b", "norm.rms", 0.5, "RuntimeError: no\nmore")
    skipped = [warmup.Skipped("mine.c", f"norm.rms {rows}x8", "it was built before") for rows in (1, 2)]
    memory = warmup.Skipped("*", "norm.rms 9x9", "too little memory: 1")
    other = warmup.Skipped("mine.d", "norm.rms 1x8", "[PLATFORM_MISMATCH] made for cuda, this device is cpu")
    assert str(warmup.Warmed([built, failed], [*skipped, memory, other])).splitlines() == [
        "mine.a for norm.rms built in 1.2 s",
        "mine.b for norm.rms did not build: RuntimeError: no",
        "mine.c was not built for norm.rms 1x8 and 1 more: it was built before",
        "no kernel was built for norm.rms 9x9: too little memory: 1",
        "not for this device: 1 kernels that compile",
    ]
    assert str(warmup.Warmed()) == "nothing had to be built"


def _closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, object(), _closed()], ids=["none", "another", "closed"])
def test_a_service_has_no_error_stream(monkeypatch, stream):
    """A daemon starts without one, ``pythonw`` and some notebooks, too; nothing that shows progress may need it."""
    monkeypatch.setattr("sys.stderr", stream)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8)).eval()
    assert lz.optimize(model, (torch.ones(2, 8),), budget_s=1)
    with lz.scope(log_selections=True):
        lz.rms_norm(torch.ones(3, 24), torch.ones(24))
