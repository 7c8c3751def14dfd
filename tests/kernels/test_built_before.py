"""What an earlier process compiled is found by the name that the library gave it, and by nothing else."""

from __future__ import annotations

import shutil
import sys
import types

import pytest
import torch

from layerzero.backends.flashinfer import modules
from layerzero.backends.vllm import library
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.engine import jit
from layerzero.engine.registry import REGISTRY
from layerzero.ops.calls import arguments_of

NO_OTHER_WAY = {
    "aiter.flash_attn": "it compiles into its own package, and nothing was run on AMD's GPUs",
    "flex_attention.cuda": "torch compiles it in the process that calls it",
}
"""Kernels that compile anew in each process."""

PREFILL = (
    "batch_prefill_with_kv_cache_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{q}_dtype_idx_i32_head_dim_qk_{d}_head_dim_vo_{d}"
)
PREFILL += "_posenc_0_use_swa_{swa}_use_logits_cap_{cap}_f16qk_False"
DECODE = (
    "batch_decode_with_kv_cache_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{q}_dtype_idx_i32_head_dim_qk_{d}_head_dim_vo_{d}"
)
DECODE += "_posenc_0_use_swa_{swa}_use_logits_cap_{cap}"
POD = "batch_pod_with_kv_cache_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{q}_head_dim_{d}_posenc_p_0_use_swa_p_{swa}"
POD += "_use_logits_cap_p_False_posenc_d_0_use_swa_d_{swa}_use_logits_cap_d_False_dtype_idx_i32_f16qk_False"
"""Names as flashinfer-python 0.7.2.post1 gave them on an H200; of its FlashAttention 2 one more ending."""


def named(pattern, **values):
    return pattern.format(**{"q": "bf16", "kv": "bf16", "d": 64, "swa": False, "cap": False, **values})


def facts_of(operation, device="H200", **params):
    """A call of the operation's first case, on a GPU that is described."""
    declared = REGISTRY.operation(operation)
    case = declared.cases[0]
    made = arguments_of(declared, case, torch.bfloat16, "cpu")
    made |= {
        name: value.new_zeros((*value.shape[:-1], 64))
        for name, value in made.items()
        if name in ("query", "key", "value", "key_cache", "value_cache")
    }
    return FactsBuilder(declared).of_valid({**declared.schema.neutral, **made, **params}, device=Device.named(device))


@pytest.fixture
def built(monkeypatch, tmp_path):
    """A folder of FlashInfer's, into which modules are put by name."""
    monkeypatch.setattr(modules, "_folders", lambda sm: [tmp_path])

    def put(*names):
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / name / f"{name}.so").touch()
            (tmp_path / name / ".ninja_log").write_text(f"0\t9\t1\t{tmp_path / name / name}.so\tc0ffee")

    return put


@pytest.mark.parametrize(
    ("kernel", "operation", "names"),
    [
        ("flashinfer.paged_decode", "attention.gqa.decode.paged", [named(DECODE)]),
        ("flashinfer.paged_decode_tensor_cores", "attention.gqa.decode.paged", [named(PREFILL) + "_kv_stride_equal"]),
        ("flashinfer.pod.paged", "attention.gqa.mixed.paged", [named(POD), named(PREFILL) + "_kv_stride_equal"]),
        ("flashinfer.block_sparse", "attention.sparse.block", [named(PREFILL) + "_sm90"]),
        ("flashinfer.variable_sparse", "attention.sparse.variable", [named(PREFILL) + "_sm90"]),
    ],
)
def test_modules_are_found_by_the_librarys_names(built, kernel, operation, names):
    prebuilt, facts = REGISTRY.kernel(kernel).prebuilt, facts_of(operation)
    for name in names:
        assert not prebuilt(facts)
        built(name)
    assert prebuilt(facts)


def test_a_window_a_cap_and_another_cache_are_other_modules(built):
    prebuilt = REGISTRY.kernel("flashinfer.paged_decode").prebuilt
    built(named(DECODE, swa=True))
    assert prebuilt(facts_of("attention.gqa.decode.paged", window=(8, 0)))
    assert not prebuilt(facts_of("attention.gqa.decode.paged", softcap=30.0))
    built(named(DECODE, cap=True))
    assert prebuilt(facts_of("attention.gqa.decode.paged", softcap=30.0))
    assert not prebuilt(facts_of("attention.gqa.decode.paged"))


def test_blocks_take_another_module_where_the_gpu_is_no_hopper(built):
    prebuilt = REGISTRY.kernel("flashinfer.block_sparse").prebuilt
    built(named(PREFILL) + "_kv_stride_equal")
    assert prebuilt(facts_of("attention.sparse.block", device="A100"))
    assert not prebuilt(facts_of("attention.sparse.block"))


def test_what_the_driver_compiled_is_built_until_its_cache_is_wiped(monkeypatch, tmp_path):
    """On a Hopper the wheel has PTX alone; on an A100 there is nothing to compile."""
    kernel = REGISTRY.kernel("vllm.flash_attn.v2.paged")
    monkeypatch.setenv("CUDA_CACHE_PATH", str(tmp_path / "driver"))
    assert jit.is_kept(kernel, facts_of("attention.gqa.decode.paged", device="A100"))
    facts = facts_of("attention.gqa.decode.paged")
    assert not jit.is_kept(kernel, facts)
    jit.note(kernel, facts, [])
    assert jit.is_kept(kernel, facts)
    assert not jit.is_kept(kernel, facts_of("attention.gqa.decode.paged", softcap=30.0))
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "1")
    assert not jit.is_kept(kernel, facts)
    monkeypatch.delenv("CUDA_CACHE_DISABLE")
    shutil.rmtree(tmp_path / "driver")
    assert not jit.is_kept(kernel, facts)


@pytest.mark.parametrize(
    ("kernel", "operation"),
    [
        ("vllm.flash_attn.v2.paged", "attention.gqa.decode.paged"),
        ("vllm.flash_attn.v2.ragged", "attention.gqa.prefill.ragged"),
        ("vllm.flash_attn.v2.block_sparse", "attention.sparse.block"),
    ],
)
def test_another_driver_compiles_anew(monkeypatch, tmp_path, kernel, operation):
    kernel, facts = REGISTRY.kernel(kernel), facts_of(operation)
    monkeypatch.setenv("CUDA_CACHE_PATH", str(tmp_path))
    told = tmp_path / "version"
    monkeypatch.setattr(library, "_DRIVER", told)
    for version in ("580.82.07", "590.10"):
        told.write_text(f"{version}\n")
        library.driver_version.cache_clear()
        assert not jit.is_kept(kernel, facts)
        jit.note(kernel, facts, [])
        assert jit.is_kept(kernel, facts)
    library.driver_version.cache_clear()


NORM = ".cache/flashinfer/0.7.2/{}/cached_ops/norm/norm.so"


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A home of FlashInfer's, with a module of norms in the folder of some architectures."""
    monkeypatch.setattr(modules, "version", lambda: "0.7.2")
    monkeypatch.setattr(modules, "_shipped", frozenset)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST", raising=False)
    monkeypatch.delitem(sys.modules, "flashinfer.jit.env", raising=False)

    def put(architectures, *, linked=True):
        file = tmp_path / NORM.format(architectures)
        file.parent.mkdir(parents=True)
        file.touch()
        made = [f"{file.parent}/norm.cuda.o", *([str(file)] if linked else [])]
        lines = ["# ninja log v6", *(f"7\t52\t1795485906241960761\t{each}\t28be5f80fd139907" for each in made)]
        file.with_name(".ninja_log").write_text("\n".join(lines))

    return put


def has_norm(device="H200"):
    return REGISTRY.kernel("flashinfer.rms_norm").prebuilt(facts_of("norm.rms", device=device))


@pytest.mark.parametrize(("named", "folder"), [
    ("9.0", "90a"), ("9.0a", "90a"), ("8.0 9.0", "80_90a"), ("10.0 9.0", "90a_100a"), ("12.0 9.0", "90a_120f"),
    ("9.0 12.0", "90a_120a"), ("9.0 12.1", "90a_121a"), ("9.0 8.9", "89_90a"),
])  # fmt: skip
def test_the_folder_of_architectures_that_are_named_is_the_librarys(home, monkeypatch, named, folder):
    """As CompilationContext of 0.7.2.post1 has them; 12.0 with nvcc 12.9 and before."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", named)
    assert not has_norm()
    home(folder)
    assert has_norm()


def test_a_library_that_was_not_linked_to_its_end_is_none(home, tmp_path):
    home("90a", linked=False)
    assert not has_norm(), "a build that was killed: its next call would compile for a minute"
    log = (tmp_path / NORM.format("90a")).with_name(".ninja_log")
    with log.open("a") as file:
        file.write("\n7\t52\t1795485906241960999\t/elsewhere/norm.so\t28be5f80fd139907\n")
    assert has_norm()
    log.unlink()
    assert not has_norm()


def test_a_library_that_is_loaded_says_where_it_looks(home, monkeypatch, tmp_path):
    """All devices that were visible then are in its name, whatever a variable says since."""
    home("80_90a")
    assert not has_norm()
    folder = tmp_path / NORM.format("80_90a")
    loaded = types.SimpleNamespace(FLASHINFER_JIT_DIR=folder.parents[1])
    monkeypatch.setitem(sys.modules, "flashinfer.jit.env", loaded)
    assert has_norm()
    assert has_norm("A100")
    for other in ("100a", "0.7.2", "flashinfer"):  # where no GPU is visible, no architecture names a folder
        loaded.FLASHINFER_JIT_DIR = tmp_path / other / "cached_ops"
        assert not has_norm()


def test_nothing_that_was_compiled_is_loaded_where_compiling_is_off(home, monkeypatch):
    home("90a")
    assert has_norm()
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert not has_norm()
    monkeypatch.setattr(modules, "_shipped", lambda: frozenset({("norm", "sm90a")}))
    assert has_norm()


@pytest.mark.parametrize(("arch", "device", "runs"), [
    ("sm80", "A100", True), ("sm80", "RTX 3080", True), ("sm80", "L40S", True), ("sm89", "A100", False),
    ("sm90a", "H200", True), ("sm90a", "B200", False), ("sm80", "H200", False),
])  # fmt: skip
def test_what_a_package_brought_runs_on_later_devices_of_a_generation(monkeypatch, arch, device, runs):
    monkeypatch.setattr(modules, "_shipped", lambda: frozenset({("norm", arch)}))
    monkeypatch.setattr(modules, "_folders", lambda sm: [])
    assert has_norm(device) is runs


@pytest.mark.parametrize(("versions", "unchecked", "found"), [
    (("0.7.2+cu129", "0.7.2+cu129"), False, True),
    (("0.7.2+cu129", "0.7.1+cu129"), False, False),
    (("0.7.1+cu129", "0.7.1+cu129"), False, False),
    (("0.7.1+cu129", "0.7.0+cu129"), True, True),
])  # fmt: skip
def test_packages_of_other_versions_count_as_little_as_the_library_lets_them(monkeypatch, versions, unchecked, found):
    installed, provided = versions
    named = {"flashinfer-python": "0.7.2", "flashinfer-jit-cache": installed}
    provider = types.SimpleNamespace(version=provided, modules=("norm",), cuda_architectures=("sm90a",))
    brought = types.SimpleNamespace(__version__=installed, get_jit_cache_providers=lambda: [provider])
    monkeypatch.setattr(modules.importlib.metadata, "version", named.__getitem__)
    monkeypatch.setitem(sys.modules, "flashinfer_jit_cache", brought)
    monkeypatch.setenv("FLASHINFER_DISABLE_VERSION_CHECK", "1" if unchecked else "")
    assert modules._shipped.__wrapped__() == ({("norm", "sm90a")} if found else set())


def test_every_kernel_that_compiles_says_how_another_process_finds_what_was_built():
    silent = {each.id for each in REGISTRY.kernels() if each.jit and not each.builds_apart}
    assert silent == set(NO_OTHER_WAY)
