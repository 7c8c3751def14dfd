"""Where policy comes from: environment variables, scopes, strict mode and names of the specification."""

from __future__ import annotations

import re
import threading
from contextvars import copy_context

import pytest
import torch
from planted_calls import chosen

import layerzero as lz
from drawing import at_once
from layerzero.engine import config
from layerzero.engine.config import environment_settings, plain_yaml


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(lz.PolicyError, match=r"nowhere\.yaml: wanted a file of settings, got: No such file"):
        lz.load_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(("variable", "text", "settings"), [
    ("LAYERZERO_DISABLED", "1", {"enabled": False}),
    ("LAYERZERO_VERBOSE", "1", {"log_selections": True}),
    ("LAYERZERO_DETERMINISTIC", "true", {"deterministic": True}),
    ("LAYERZERO_PREFER", "flashinfer, xformers", {"prefer_sources": ["flashinfer", "xformers"]}),
    ("LAYERZERO_AVOID", "xformers", {"avoid_sources": ["xformers"]}),
    ("LAYERZERO_LOCK_ATTENTION", "flash_attn.v3.causal", {"locks": {"attention": "flash_attn.v3.causal"}}),
    ("LAYERZERO_LOCK", "norm.rms=a, norm.layer=b", {"locks": {"norm.rms": "a", "norm.layer": "b"}}),
    ("LAYERZERO_MEMORY_HEADROOM_MB", "12", {"memory_headroom_mb": 12}),
    ("LAYERZERO_CONFIG", "/nowhere.yaml", {}),
    ("OTHER", "1", {}),
])  # fmt: skip
def test_environment_variables(variable, text, settings):
    assert environment_settings({variable: text}) == settings


def test_settings_of_ranks_may_stand_in_a_section_of_their_own(tmp_path):
    file = tmp_path / "layerzero.yaml"
    file.write_text("distributed: {selection_mode: broadcast, on_version_mismatch: fallback}")
    lz.load_config(file)
    policy = config.CONFIGURATION.policy
    assert [policy[each] for each in ("distributed_selection", "on_version_mismatch")] == [
        "rank0_broadcast",
        "fallback",
    ]


@pytest.mark.parametrize(("variable", "text", "wanted"), [
    ("LAYERZERO_PREFFER", "x", "did you mean 'LAYERZERO_PREFER'"),
    ("LAYERZERO_DISABLED", "maybe", "wanted 1 or 0"),
    ("LAYERZERO_LOCK", "norm.rms", "wanted operation=kernel"),
    ("LAYERZERO_RULES", "x", "set this key in a file"),
    ("LAYERZERO_MEMORY_HEADROOM_MB", "x", "wanted an integer"),
])  # fmt: skip
def test_wrong_environment_variables_are_refused(variable, text, wanted):
    with pytest.raises(lz.PolicyError) as caught:
        environment_settings({variable: text})
    assert wanted in str(caught.value)


@pytest.mark.parametrize("text", [
    "deny: [torch]\ndeny: []\n",
    "cache: {max_size: 5}\ncache: {enabled: false}\n",
    "locks: {norm.rms: torch.rms_norm, norm.rms: reference.norm.rms}\n",
    "rules: [{match: {operation: attention, operation: norm.rms}, avoid: [torch]}]\n",
])  # fmt: skip
def test_a_key_of_a_file_that_comes_twice_is_refused(text, tmp_path):
    file = tmp_path / "layerzero.yaml"
    file.write_text(text)
    with pytest.raises(lz.PolicyError, match=r"layerzero\.yaml: not valid YAML: wanted every key once, got '.*' twice"):
        lz.load_config(file)


def test_a_list_that_is_a_key_twice_is_told_as_text(tmp_path):
    file = tmp_path / "layerzero.yaml"
    file.write_text("? [a, b]\n: 1\n? [a, b]\n: 2\n")
    with pytest.raises(lz.PolicyError, match=r"every key once, got \['a', 'b'\] twice; keep one of them"):
        lz.load_config(file)


def test_a_file_may_merge_twice(tmp_path):
    file = tmp_path / "layerzero.yaml"
    file.write_text("rules: [{match: &one {operation: attention}, avoid: [torch]},\n"
                    "  {match: &other {dtype: float32}, avoid: [torch]},\n"
                    "  {match: {<<: *one, <<: *other}, avoid: [torch]}]\n")  # fmt: skip
    assert plain_yaml(file)["rules"][2]["match"] == {"operation": "attention", "dtype": "float32"}


def test_what_a_file_merges_may_say_a_key_again(tmp_path):
    file = tmp_path / "layerzero.yaml"
    file.write_text("rules: [{match: &every {operation: attention, dtype: float32}, avoid: [torch]},\n"
                    "  {match: {<<: *every, dtype: float64}, avoid: [torch]}]\n")  # fmt: skip
    lz.load_config(file)
    assert len(config.CONFIGURATION.policy.rules) == 2


@pytest.mark.parametrize("twice", [
    {"prefer": ["torch"], "prefer_sources": []},
    {"cache.max_size": 5, "cache": {"max_size": 7}},
    {"perfdb": {"auto_tune": True}, "auto_tune_on_warmup": False},
])  # fmt: skip
def test_a_setting_that_comes_twice_by_two_names_is_refused(twice):
    with pytest.raises(lz.PolicyError, match=r"wanted one value of .*, got two; leave one out"):
        lz.configure(**twice)


@pytest.mark.parametrize(("first", "second", "same", "other"), [
    ("LAYERZERO_DISABLED", "LAYERZERO_ENABLED", "0", "1"),
    ("LAYERZERO_LOG_SELECTIONS", "LAYERZERO_VERBOSE", "1", "0"),
])  # fmt: skip
def test_variables_that_contradict_each_other_are_refused(first, second, same, other):
    assert config.Configuration({first: same, second: "1"}).policy
    with pytest.raises(lz.PolicyError, match=rf"{first} and {second}: wanted one value of .*, got .*; unset one"):
        assert config.Configuration({first: other, second: "1"}).policy


def test_lock_attention_covers_every_operation_that_has_the_kernel(attention, monkeypatch):
    monkeypatch.setenv("LAYERZERO_LOCK_ATTENTION", "torch.sdpa.math")
    config.CONFIGURATION.reset()
    assert chosen(*attention, layout="BSHD") == "torch.sdpa.math"
    assert chosen(attention[0], attention[0], attention[0], layout="BSHD", causal=False) == "torch.sdpa.math"
    assert chosen(attention[0][:, :1], *attention[1:], layout="BSHD") == "torch.sdpa.math"


def test_lock_attention_reaches_kernels_of_paged_caches_and_leaves_other_operations_alone(attention, monkeypatch):
    query, cache = torch.randn(1, 1, 2, 8), torch.randn(2, 4, 2, 8)
    places = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)

    def of_pages():
        return lz.explain("paged_attention", query, cache, cache, *places)

    operation = of_pages().operation
    (reference,) = [each.kernel.id for each in of_pages().candidates if each.kernel.is_reference]
    monkeypatch.setenv("LAYERZERO_LOCK_ATTENTION", reference)
    config.CONFIGURATION.reset()
    assert (of_pages().chosen.kernel.id, of_pages().locked) == (reference, f"lock attention = {reference}")
    assert not lz.explain("attention", *attention, layout="BSHD").locked
    monkeypatch.setenv("LAYERZERO_LOCK_ATTENTION", "torch.sdpa.math")
    monkeypatch.setenv("LAYERZERO_LOCK", f"{operation}={reference}")
    config.CONFIGURATION.reset()
    assert of_pages().locked == f"lock {operation} = {reference}"
    assert chosen(*attention, layout="BSHD") == "torch.sdpa.math"


@pytest.mark.parametrize(("variable", "text", "told"), [
    ("LAYERZERO_DENY", "tocrh", "environment: LAYERZERO_DENY: wanted a library, kernel or glob, got 'tocrh'"),
    ("LAYERZERO_JIT", "soon", "environment: LAYERZERO_JIT: wanted 'background' or 'inline' or 'never', got 'soon'"),
    ("LAYERZERO_CONFIG", "nowhere.yaml", "LAYERZERO_CONFIG: nowhere.yaml: wanted a file of settings, got: No such"),
])  # fmt: skip
def test_wrong_variables_are_named(monkeypatch, norm, variable, text, told):
    monkeypatch.setenv(variable, text)
    with pytest.raises(lz.PolicyError, match=f"^{re.escape(told)}"):
        config.CONFIGURATION.reset()
        lz.rms_norm(*norm)
    monkeypatch.delenv(variable)
    config.CONFIGURATION.reset()


def test_every_problem_of_a_file_is_told():
    with pytest.raises(lz.PolicyError) as caught:
        lz.configure(denny=["torch"], strict_mode=7, jit="soon")
    assert [each.split(": ")[1] for each in caught.value.problems] == [
        "unknown key 'denny'; did you mean 'deny'? See `layerzero config keys`.",
        "strict_mode",
        "jit",
    ]


def test_configure_refuses_unknown_keys_and_resets_with_none():
    with pytest.raises(lz.PolicyError, match="did you mean 'strict_mode'"):
        lz.configure(strict_modes=True)
    lz.configure(strict_mode=True)
    lz.configure(strict_mode=None, prefer=["torch"])
    lz.configure(prefer=None)
    assert config.CONFIGURATION.policy.strict_mode is False


@pytest.mark.parametrize("name", ["perfdb.path", "hub.folder", "hub.lockfile"])
def test_no_path_has_a_nul(name):
    with pytest.raises(lz.PolicyError, match=f"{name}: wanted the path of a file"):
        lz.configure(**{name: "a\0"})


# scopes


def test_a_scope_ends_with_its_block_even_after_an_exception(attention):
    before = chosen(*attention, layout="BSHD")
    with pytest.raises(ZeroDivisionError), lz.scope(locks={"attention": "torch.sdpa.math"}):
        assert chosen(*attention, layout="BSHD") == "torch.sdpa.math"
        raise ZeroDivisionError
    assert chosen(*attention, layout="BSHD") == before
    assert config.SCOPES.active == 0


def test_scopes_nest_and_add_up(attention):
    with lz.prefer("torch.sdpa.math"), lz.prefer("torch.sdpa.math", "torch"):
        policy = config.current_policy()
        assert policy.prefer_sources == ("torch.sdpa.math", "torch.sdpa.math", "torch")


def test_one_threads_block_never_changes_another_threads_choice(attention):
    entered, leave, seen = threading.Event(), threading.Event(), {}

    def holder():
        with lz.scope(locks={"attention": "torch.sdpa.math"}):
            entered.set()
            seen["holder"] = chosen(*attention, layout="BSHD")
            leave.wait()

    thread = threading.Thread(target=holder)
    thread.start()
    entered.wait()
    seen["other"] = chosen(*attention, layout="BSHD")
    lz.attention(*attention, layout="BSHD")
    leave.set()
    thread.join()
    assert seen["holder"] == "torch.sdpa.math"
    assert seen["other"] != "torch.sdpa.math"


def test_what_inherits_a_scope_has_no_settings_of_a_block_that_was_left():
    with lz.scope(debug=True):
        with lz.scope(strict_mode=True):
            inherited = copy_context()  # what a task gets, and each thread without a GIL
        assert inherited.run(config.current_policy) == config.current_policy()
    with lz.scope(layout="BHSD"):  # another thread's
        assert not inherited.run(config.current_policy).debug
        assert inherited.run(config.SCOPES.layers) == ()


def test_configure_inside_a_scope_is_seen(attention):
    with lz.scope(debug=True):
        lz.configure(strict_mode=True)
        assert config.current_policy().strict_mode
        assert config.current_policy().debug
    assert not config.current_policy().debug


def test_a_wrong_scope_does_not_open():
    with pytest.raises(lz.PolicyError), lz.scope(nonsense=1):
        raise AssertionError("must not be reached")
    assert config.SCOPES.active == 0


# strict mode and adaptation


def test_strict_mode_refuses_what_moves_data(attention):
    with lz.scope(strict_mode=True):
        strided = torch.randn(2, 16, 8, 64)[..., ::2]
        report = lz.explain("attention", strided, *attention[1:], layout="BSHD")
        assert not [each for each in report.candidates if each.legal and each.adaptations[1:]]
    report = lz.explain("attention", strided, *attention[1:], layout="BSHD")
    assert "copy query into contiguous memory" in [a.text for a in report.candidates[0].adaptations]


def test_the_configured_layout_decides_where_a_call_names_none(attention):
    square = torch.randn(2, 16, 16, 32)
    with lz.scope(layout="BHSD"):
        assert lz.explain("attention", square, square, square).facts.layout == "BHSD"


def test_selections_are_logged_on_request(norm, caplog):
    with caplog.at_level("INFO", "layerzero"), lz.scope(log_selections=True):
        lz.rms_norm(*norm)
        lz.rms_norm(*norm)
    lines = [record.message for record in caplog.records if record.message.startswith("norm.rms -> ")]
    assert len(lines) == 1


FLAT_NAMES = (
    *("tokenize.encode", "tokenize.decode", "embedding.lookup", "posenc.rope", "posenc.alibi"),
    *("attention.causal", "attention.full", "attention.paged", "mlp.linear", "mlp.fused", "norm.rms", "norm.layer"),
    *("sampling.topk", "sampling.topp", "sampling.speculative"),
)
"""The names that the specification gives operations; those of attention, pages and drafts cover several of ours."""


@at_once("name", FLAT_NAMES)
def test_the_specifications_flat_names_list_kernels_and_take_locks(name):
    first = lz.list_kernels(name)[0].id
    lz.lock(name, first)
    lz.unlock(name)


def test_a_lock_of_speculative_sampling_holds_for_its_calls():
    lz.lock("sampling.speculative", "reference.*")
    drafted, target = torch.tensor([[1]]), torch.full((1, 2, 4), 0.25)
    assert lz.which("verify_speculative", drafted, target)["kernel_id"] == "reference.sampling.verify"
    assert (
        lz.which("sampling.speculative", drafted, target, greedy=True)["kernel_id"]
        == "reference.sampling.verify.greedy"
    )
