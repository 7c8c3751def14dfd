"""What an operator says: files, environment, configure, locks, rules and scopes, in that order of strength."""

from __future__ import annotations

import json

import pytest
import torch
from planted_calls import chosen

import layerzero as lz
from layerzero.backends import builtin_kernels
from layerzero.core.capability import platforms_of
from layerzero.engine import config
from layerzero.engine.config import Configuration

# locks


def test_a_lock_skips_scoring_and_takes_effect_on_the_next_call(attention):
    assert chosen(*attention, layout="BSHD") != "torch.sdpa.math"
    lz.lock("attention.causal", "torch.sdpa.math")
    assert chosen(*attention, layout="BSHD") == "torch.sdpa.math"
    assert chosen(*attention, layout="BSHD", causal=False) != "torch.sdpa.math"
    lz.unlock("attention.causal")
    assert chosen(*attention, layout="BSHD") != "torch.sdpa.math"


def test_a_lock_never_skips_legality(attention):
    lz.lock("attention", "torch.sdpa.flash")
    with pytest.raises(lz.NoKernelFoundError, match="PLATFORM_MISMATCH") as caught:
        lz.attention(*attention, layout="BSHD")
    assert "unlock it" in str(caught.value)
    assert next(iter(lz.explain("attention", *attention, layout="BSHD").failures)) == "torch.sdpa.flash", "asked first"
    lz.lock("attention", "torch.sdpa.flash", otherwise="select")
    report = lz.explain("attention", *attention, layout="BSHD")
    assert report.chosen is not None
    assert any("is not legal here" in note for note in report.notes)


def test_explain_tells_what_a_lock_costs(attention):
    lz.lock("attention.gqa.prefill", "torch.sdpa.math")
    report = lz.explain("attention", *attention, layout="BSHD")
    assert any("the lock costs" in note and "would be chosen without it" in note for note in report.notes)


@pytest.mark.parametrize("first", ["norm.rms", "rms_norm", "norm.*"])
@pytest.mark.parametrize("second", ["norm.rms", "rms_norm", "norm.*"])
def test_the_later_lock_holds_however_both_are_spelled(first, second):
    asked = torch.ones(2, 8), torch.ones(8)

    def locked():
        return lz.explain("rms_norm", *asked).locked

    lz.lock(first, "torch.rms_norm")
    with lz.scope(locks={second: "reference.norm.rms"}):
        assert locked() == f"lock {second} = reference.norm.rms"
        with lz.scope(locks={first: "torch.rms_norm"}):
            assert locked() == f"lock {first} = torch.rms_norm"
    lz.lock(second, "reference.norm.rms")
    assert locked() == f"lock {second} = reference.norm.rms"
    lz.lock("layer_norm", "torch.layer_norm")
    assert locked() == f"lock {second} = reference.norm.rms"
    lz.unlock(second)
    assert locked() == (f"lock {first} = torch.rms_norm" if first != second else "")


@pytest.mark.parametrize(("locks", "kernel"), [
    ({"attention.gqa.prefill": "torch.sdpa.math", "attention.*": "torch.sdpa.cpu_flash"}, "torch.sdpa.math"),
    ({"attention": "torch.sdpa.math", "attention.*": "torch.sdpa.cpu_flash"}, "torch.sdpa.cpu_flash"),
    ({"attention.*": "torch.sdpa.cpu_flash", "attention": "torch.sdpa.math"}, "torch.sdpa.math"),
    ({"attention.causal": "torch.sdpa.math", "attention": "torch.sdpa.cpu_flash"}, "torch.sdpa.math"),
    ({"attention": "torch.sdpa.math", "*": "torch.sdpa.cpu_flash"}, "torch.sdpa.math"),
])  # fmt: skip
def test_in_one_source_the_lock_of_fewest_operations_holds_then_the_last(attention, locks, kernel, tmp_path):
    with lz.scope(locks=locks):
        assert chosen(*attention, layout="BSHD") == kernel
    lz.configure(locks=locks)
    assert chosen(*attention, layout="BSHD") == kernel
    lz.configure(locks=None)
    (tmp_path / "lz.yaml").write_text(json.dumps({"locks": locks}))
    lz.load_config(tmp_path / "lz.yaml")
    assert chosen(*attention, layout="BSHD") == kernel
    lz.lock("*", "torch.sdpa.math")
    assert chosen(*attention, layout="BSHD") == "torch.sdpa.math"


def test_an_alias_of_a_kernel_is_accepted(attention):
    lz.lock("attention.causal", "torch.sdpa.causal")
    assert chosen(*attention, layout="BSHD") == "torch.sdpa.cpu_flash"
    for name in ("flash_attn.v3", "flash_attn.v2", "flashinfer", "xformers"):
        lz.lock("attention.causal", f"{name}.causal")  # the specification's names


@pytest.mark.parametrize(("operation", "kernel", "text"), [
    ("attention.gqa.prefil", "torch.sdpa.math", "did you mean 'attention.gqa.prefill'"),
    ("rms_norm", "torch.sdpa.math", "wanted a kernel of rms_norm, got 'torch.sdpa.math', which serves attention"),
])  # fmt: skip
def test_a_lock_on_nothing_is_refused(operation, kernel, text):
    with pytest.raises(lz.PolicyError, match=text):
        lz.lock(operation, kernel)


def test_unlocking_what_is_not_locked_says_what_is():
    lz.lock("rms_norm", "torch.rms_norm")
    with pytest.raises(lz.PolicyError, match="locked: rms_norm"):
        lz.unlock("layer_norm")


# preference, avoidance, exclusion


def test_prefer_avoid_deny_allow(attention):
    lz.configure(unmeasured="priority")
    base = {each.kernel.id: each.score for each in lz.explain("attention", *attention, layout="BSHD").candidates}
    with lz.prefer("torch.sdpa.math"), lz.avoid("torch.sdpa.cpu_flash"):
        scores = {each.kernel.id: each.score for each in lz.explain("attention", *attention, layout="BSHD").candidates}
    assert scores["torch.sdpa.math"] == base["torch.sdpa.math"] + 20
    assert scores["torch.sdpa.cpu_flash"] == base["torch.sdpa.cpu_flash"] - 50
    with lz.scope(deny=["torch.sdpa.cpu_flash"]):
        refused = lz.explain("attention", *attention, layout="BSHD").reasons("torch.sdpa.cpu_flash")
        assert [reason.code for reason in refused] == [lz.ReasonCode.POLICY_DENIED]
    with lz.scope(allow=["torch"]):
        report = lz.explain("attention", *attention, layout="BSHD")
        assert {each.kernel.source for each in report.candidates if each.legal} <= {"torch", "reference"}


def test_disabled_runs_torch_only(attention):
    @lz.register_kernel("attention.gqa.prefill", "user.fast", priority=100)
    def fast(query, key, value, *, causal=False, scale=None):
        raise AssertionError("must not run")

    assert chosen(*attention, layout="BSHD") == "user.fast"
    with lz.disabled():
        assert chosen(*attention, layout="BSHD") == "torch.sdpa.cpu_flash"
        lz.attention(*attention, layout="BSHD")
    lz.configure(enabled=False)
    assert chosen(*attention, layout="BSHD") == "torch.sdpa.cpu_flash"


def test_disabled_computes_half_precision_as_torch_does_where_it_emulates():
    call = [torch.empty(size, 256, dtype=torch.bfloat16, device="meta") for size in (64, 512)]
    laptop = {"device": "Laptop", "libraries": {}}
    assert lz.explain("linear", *call, **laptop).kernel_id == "torch.linear_widened"
    with lz.disabled():
        assert lz.explain("linear", *call, **laptop).kernel_id == "torch.linear"


def test_without_fallback_the_reference_is_refused(norm):
    with lz.scope(fallback_enabled=False, allow=["reference"]):
        with pytest.raises(lz.NoKernelFoundError, match="fallback_enabled"):
            lz.rms_norm(*norm)


def test_deterministic_mode_takes_deterministic_kernels_only(norm):
    @lz.register_kernel("norm.rms", "user.noisy", priority=100)
    def noisy(input, weight, *, eps=1e-6):
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    assert chosen(*norm) == "user.noisy"
    with lz.deterministic():
        assert chosen(*norm) != "user.noisy"
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen(*norm) != "user.noisy"
        lz.rms_norm(*norm)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("device", "refused"), [("CPU", False), ("H100", True)])
def test_deterministic_mode_leaves_torchs_kernels_on_a_cpu(device, refused):
    """Elsewhere torch's own dispatch may take a kernel that adds up by atomics."""
    pages = torch.empty(4, 16, 2, 64, device="meta")
    table, lens = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((2, 2), (2,)))
    call = torch.empty(2, 1, 8, 64, device="meta"), pages, pages, table, lens
    with lz.deterministic():
        report = lz.explain("paged_attention", *call, device=lz.Device.named(device))
    codes = [each.code for each in report.reasons("torch.paged_gather")]
    assert (lz.ReasonCode.NON_DETERMINISTIC in codes) is refused
    assert all(each.deterministic for each in builtin_kernels() if "cpu" in platforms_of(each))


def test_the_callers_sdpa_kernel_context_is_respected(attention):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    lz.attention(*attention, layout="BSHD")  # a plan made outside the context must not serve inside
    with sdpa_kernel(SDPBackend.MATH):
        report = lz.explain("attention", *attention, layout="BSHD")
        assert [str(r.code) for r in report.reasons("torch.sdpa.cpu_flash")] == ["POLICY_DENIED"]
        assert report.kernel_id.startswith(("torch.sdpa.math", "reference.")), (
            "other libraries are not what was asked for"
        )
        before = len(cached("attention"))
        lz.attention(*attention, layout="BSHD")
        assert len(cached("attention")) == before + 1


def cached(function):
    from layerzero.engine.functions import CALLS

    return CALLS[function].dispatcher.cache.current


# rules


def test_rules_hold_where_their_facts_hold(norm):
    rules = [{"match": {"operation": "norm.*", "hidden": ">=32", "dtype": "float32"}, "avoid_sources": ["torch"]}]
    lz.configure(rules=rules)
    torch_kernel = next(each for each in lz.explain("rms_norm", *norm).candidates if each.kernel.id == "torch.rms_norm")
    assert {term.name for term in torch_kernel.terms} >= {"avoid"}
    narrow = lz.explain("rms_norm", torch.randn(4, 31), torch.randn(31))
    torch_kernel = next(each for each in narrow.candidates if each.kernel.id == "torch.rms_norm")
    assert "avoid" not in {term.name for term in torch_kernel.terms}


@pytest.mark.parametrize(("rule", "text"), [
    ({"match": {"hiden": 3}, "prefer": "x"}, "did you mean 'hidden'"),
    ({"match": {"hidden": 3}}, "wanted prefer, avoid or deny"),
    ({"prefer": "x"}, "wanted `match:`"),
    ({"match": {"hidden": 3}, "prefers": "x"}, "did you mean 'prefer'"),
    ({"match": {"operation": "norm.rmz"}, "prefer": "x"}, "unknown operation 'norm.rmz'"),
])  # fmt: skip
def test_wrong_rules_are_refused(rule, text):
    with pytest.raises(lz.PolicyError, match=text):
        lz.configure(rules=[rule])


def test_the_specifications_names_for_facts_work(attention):
    rules = [
        {"match": {"op": "attention.*", "seq_len": "<=16", "num_kv_heads": 2, "is_causal": True}, "deny": "zentorch"}
    ]
    with lz.scope(rules=rules):
        report = lz.explain("attention", *attention, layout="BSHD")
    assert report.facts["num_heads"] == 8


# where settings come from


def test_later_origins_win(tmp_path):
    file = tmp_path / "layerzero.yaml"
    file.write_text("version: 1\nmemory_headroom_mb: 1\nstrict_mode: true\ndebug: true\nlayout: BHSD\n")
    configuration = Configuration({"LAYERZERO_CONFIG": str(file), "LAYERZERO_STRICT_MODE": "0", "LAYERZERO_DEBUG": "0"})
    configuration.configure(debug=True)
    effective = configuration.effective_with_origin({"layout": "BSHD"})
    assert effective["memory_headroom_mb"] == (1, str(file))
    assert effective["strict_mode"] == (False, "environment")
    assert effective["debug"] == (True, "configure")
    assert effective["layout"] == ("BSHD", "scope")
    assert effective["deterministic"] == (False, "default")


def test_what_adds_up_says_every_place_that_it_comes_from(tmp_path):
    file = tmp_path / "layerzero.yaml"
    file.write_text("locks: {norm.rms: torch.rms_norm}\ndeny: [zentorch]\nprefer: [torch]\n")
    variables = {"LAYERZERO_LOCK_ATTENTION": "torch.sdpa.math", "LAYERZERO_PREFER": "zentorch"}
    configuration = Configuration({"LAYERZERO_CONFIG": str(file), **variables})
    effective = configuration.effective_with_origin({"deny": ["xformers"]}, {"deny": ["vllm"]})
    locks = {"norm.rms": "torch.rms_norm", "attention": "torch.sdpa.math"}
    assert effective["locks"] == (locks, f"{file}, environment")
    assert effective["deny"] == (["zentorch", "xformers", "vllm"], f"{file}, scope")
    assert effective["prefer_sources"] == (["zentorch"], "environment")
    alone = Configuration({"LAYERZERO_LOCK_ATTENTION": "torch.sdpa.math"}).effective_with_origin({"deny": ["vllm"]})
    assert (alone["locks"][1], alone["deny"][1]) == ("environment", "scope")
    again = Configuration({"LAYERZERO_CONFIG": str(file), "LAYERZERO_LOCK": "norm.rms=reference.norm.rms"})
    assert again.effective_with_origin()["locks"][1] == "environment", "nothing of the file is left"


def test_load_config_changes_the_next_call(tmp_path, norm):
    file = tmp_path / "layerzero.yaml"
    file.write_text("locks:\n  norm.rms: reference.norm.rms\n")
    lz.load_config(file)
    lz.rms_norm(*norm)  # a reference that was asked for is no fallback: nothing is said
    assert chosen(*norm) == "reference.norm.rms"


@pytest.mark.parametrize(("text", "wanted"), [
    ("strict_mod: true", "did you mean 'strict_mode'"),
    ("strict_mode: 3", "strict_mode: wanted true or false, got 3"),
    ("deny: torch", "deny: wanted a list of texts, got 'torch'; write [torch]"),
    ("deny: [torch, 3]", "deny: wanted a list of texts, got ['torch', 3]"),
    ("3: 4", "unknown key 3. See `layerzero config keys`."),
    ("plugins: 5", "plugins: wanted a list of texts, or a text, got 5"),
    ("strict_mod: 1\njit: soon", "'strict_mode'? See `layerzero config keys`.\n"),
    ("cache: {max_sise: 3}", "did you mean 'cache.max_size'"),
    ("cache: 3", "wanted a section"),
    ("explain_enabled: false", "explain_enabled: wanted True, got False"),
    ("distributed: {version_check_interval_s: 60}", "_interval_s'; lz.agree(every=n) compares versions at each n-th"),
    ("distributed: {verify_selections: true}", "verify_selections'; lz.agree() verifies"),
    ("rolling_update: {max_concurrent_updates: 1}", "'rolling_update'; `layerzero rolling-update --help` has these"),
    ("memory_headroom_mb: -1", "at least 0"),
    ("layout: SBHD", "wanted None or 'BSHD' or 'BHSD'"),
    ("- a", "wanted keys and values"),
    ("a: [", "not valid YAML"),
    ("version: 2", "version: wanted 1"),
    ("locks: {attention.causal: 3}", "wanted a kernel id"),
])  # fmt: skip
def test_wrong_files_are_refused_and_change_nothing(tmp_path, text, wanted):
    file = tmp_path / "layerzero.yaml"
    file.write_text(text)
    before = config.CONFIGURATION.policy
    with pytest.raises(lz.PolicyError) as caught:
        lz.load_config(file)
    assert wanted in str(caught.value)
    assert config.CONFIGURATION.policy is before
