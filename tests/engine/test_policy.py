"""What an operator says: files, environment, configure, locks, rules and scopes, in that order of strength."""

from __future__ import annotations

import re
import threading

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.engine import config
from layerzero.engine.config import Configuration, environment_settings
from layerzero.engine.settings import SETTINGS


@pytest.fixture
def norm():
    return torch.randn(4, 32), torch.randn(32)


@pytest.fixture
def attention():
    query, key = torch.randn(2, 16, 8, 32), torch.randn(2, 16, 2, 32)
    return query, key, key.clone()


def chosen(*tensors, **call):
    return lz.which("attention" if tensors[0].ndim == 4 else "rms_norm", *tensors, **call)["kernel_id"]


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


def test_the_exact_operation_beats_a_glob(attention):
    lz.lock("attention.gqa.prefill", "torch.sdpa.math")
    lz.lock("attention.*", "torch.sdpa.cpu_flash")
    assert chosen(*attention, layout="BSHD") == "torch.sdpa.math"


def test_an_alias_of_a_kernel_is_accepted(attention):
    lz.lock("attention.causal", "torch.sdpa.causal")
    assert chosen(*attention, layout="BSHD") == "torch.sdpa.cpu_flash"


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
    ("explain_enabled: false", "knows only the default True"),
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


def test_every_setting_without_a_feature_refuses_other_values():
    for name, setting in SETTINGS.items():
        if setting.built:
            continue
        lz.configure(**({name: setting.default} if "." not in name and setting.default is not None else {}))
        other = {bool: not setting.default, int: 7, str: "x"}.get(setting.kind, "x")
        with pytest.raises(lz.PolicyError, match="knows only the default"):
            section, _, key = name.partition(".")
            lz.configure(**({section: {key: other}} if key else {name: other}))


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
