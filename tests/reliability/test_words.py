"""What an operator says means what it says: names of operations, of kernels, and what is told."""

from __future__ import annotations

import logging
import os
import re
import sys

import pytest
import torch

import layerzero as lz
from layerzero.core.evidence import Measurement
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage import archive, connections
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.storage.store import StoreLedger, TimeStore

QUERY, KEY = torch.randn(2, 1, 4, 64), torch.randn(2, 8, 2, 64)
PAGED = (
    *(QUERY, torch.randn(4, 16, 2, 64), torch.randn(4, 16, 2, 64)),
    *(torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([20, 5], dtype=torch.int32)),
)


def refused(word, **call):
    with lz.scope(**word):
        contiguous = lz.explain("attention", QUERY, KEY, KEY, layout="BSHD").reasons("torch.sdpa.math")
        paged = lz.explain("paged_attention", *PAGED).reasons("torch.paged_gather")
    return ["POLICY_DENIED" in [str(reason.code) for reason in reasons] for reasons in (contiguous, paged)]


@pytest.mark.parametrize(("pattern", "both"), [
    ("attention.gqa.decode", [True, False]),
    ("attention.gqa.decode.paged", [False, True]),
    ("attention.gqa.decode.*", [False, True]),
    ("attention.gqa.*", [True, True]),
    ("attention.gqa.decode*", [True, True]),
    ("attention", [True, False]),
    ("paged_attention", [False, True]),
])  # fmt: skip
def test_an_operations_name_means_itself(pattern, both):
    assert refused({"rules": [{"match": {"operation": pattern}, "deny": "torch.*"}]}) == both
    names = REGISTRY.operations_named(pattern)
    assert [name in names for name in ("attention.gqa.decode", "attention.gqa.decode.paged")] == both


def test_a_lock_on_an_operation_leaves_those_below_alone():
    lz.lock("attention.gqa.decode", "torch.sdpa.math")
    assert lz.explain("attention", QUERY, KEY, KEY, layout="BSHD").locked
    assert not lz.explain("paged_attention", *PAGED).locked


@pytest.mark.parametrize("say", [
    lambda: lz.lock("attention.gqa", "torch.sdpa.math"),
    lambda: lz.configure(rules=[{"match": {"operation": "attention.gqa"}, "deny": "torch"}]),
    lambda: lz.list_kernels("attention.gqa"),
])  # fmt: skip
def test_a_prefix_alone_is_no_name(say):
    with pytest.raises((lz.PolicyError, KeyError), match=r"did you mean 'attention\.gqa\.\*', all below it\?"):
        say()


@pytest.mark.parametrize("say", [
    lambda name: lz.configure(deny=[name]),
    lambda name: lz.configure(prefer=["torch", name]),
    lambda name: lz.scope(allow=[name]),
    lambda name: lz.prefer(name),
    lambda name: lz.avoid(name),
    lambda name: lz.configure(isolate=[name]),
    lambda name: lz.configure(isolation={"pythons": {name: sys.executable}}),
    lambda name: lz.configure(backend_containers={name: {"image": "an/image:1.0"}}),
    lambda name: lz.scope(rules=[{"match": {"rows": ">4"}, "deny": name}]),
])  # fmt: skip
def test_a_misspelt_name_is_an_error_that_names_the_nearest(say):
    for name, close in (("zentroch", "zentorch"), ("torch.rms_nrm", "torch.rms_norm"), ("flash_atn.*", "flash_attn")):
        with pytest.raises(lz.PolicyError, match=rf"got '{name.replace('*', '[*]')}', which names none .* '{close}'"):
            say(name)
    for name in ("zentorch", "zen*", "torch.rms_norm", "user.*", "reference", "flash_attn.v3.causal"):
        say(name)


def test_a_programs_own_kernels_have_names_once_they_are_registered():
    with pytest.raises(lz.PolicyError, match="registers itself it registers first"):
        lz.configure(prefer=["mine.fast"])
    lz.register_kernel("norm.rms", "mine.fast")(lambda input, weight, eps: input)
    lz.configure(prefer=["mine.fast"])


def test_files_and_variables_are_looked_at_by_the_first_choice(tmp_path, monkeypatch):
    call = torch.randn(4, 8), torch.randn(8)
    (tmp_path / "a.yaml").write_text("deny: [mine.slow]")
    lz.load_config(tmp_path / "a.yaml")
    with pytest.raises(lz.PolicyError, match=r"a\.yaml: deny: wanted a library, .* got 'mine\.slow'"):
        lz.rms_norm(*call)
    lz.register_kernel("norm.rms", "mine.slow")(lambda input, weight, eps: input)
    lz.rms_norm(*call)
    monkeypatch.setenv("LAYERZERO_AVOID", "zentroch")
    CONFIGURATION.reset()
    with pytest.raises(lz.PolicyError, match=r"environment: LAYERZERO_AVOID: .* did you mean 'zentorch'"):
        lz.explain("rms_norm", *call)
    assert any("'zentroch', which names none" in issue for issue in lz.doctor().issues)


TYPO = r"wanted a kernel of rms_norm, got 'torch.rmsnorm', which names none here; did you mean 'torch\.rms_norm'\? "
FOREIGN = r"wanted a kernel of rms_norm, got 'torch.sdpa.math', which serves attention\..* `layerzero kernels rms_norm`"


@pytest.mark.parametrize(("kernel", "text"), [("torch.rmsnorm", TYPO), ("torch.sdpa.math", FOREIGN)])
@pytest.mark.parametrize("where", ["lock", "configure", "scope", "file", "environment", "environment of one"])
def test_a_lock_on_no_kernel_of_its_operation_is_refused_wherever_it_stands(kernel, text, where, tmp_path, monkeypatch):
    said = {"file": f"{tmp_path}/a.yaml: locks: rms_norm: ", "lock": "lock: locks: rms_norm: "}
    said |= {"environment": "environment: LAYERZERO_LOCK: rms_norm: "}
    said |= {"environment of one": "environment: LAYERZERO_LOCK_RMS_NORM: rms_norm: "}
    with pytest.raises(lz.PolicyError, match=f"^{said.get(where, f'{where}: locks: rms_norm: ')}{text}"):
        if where == "lock":
            lz.lock("rms_norm", kernel)
        elif where == "configure":
            lz.configure(locks={"rms_norm": kernel})
        elif where == "scope":
            lz.scope(locks={"rms_norm": {"kernel": kernel, "otherwise": "select"}})
        elif where == "file":
            (tmp_path / "a.yaml").write_text(f"locks: {{rms_norm: {kernel}}}")
            lz.load_config(tmp_path / "a.yaml")
        elif where == "environment":
            monkeypatch.setenv("LAYERZERO_LOCK", f"layer_norm=torch.layer_norm,rms_norm={kernel}")
            CONFIGURATION.reset()
        else:
            monkeypatch.setenv("LAYERZERO_LOCK_RMS_NORM", kernel)
            CONFIGURATION.reset()
        if where in ("file", "environment", "environment of one"):
            assert any(re.search(text, issue) for issue in lz.doctor().issues)
        lz.rms_norm(torch.randn(4, 8), torch.randn(8))  # what nobody refused before, the first call does
    CONFIGURATION.reset()


def test_a_lock_on_a_library_that_is_not_installed_or_on_one_of_many_operations_is_none_of_these():
    for operation, kernel in (
        ("attention", "flash_attn.v3"),
        ("attention.*", "flashinfer.paged_decode"),
        ("rms_norm", "apex*"),
        ("rms_norm", "reference"),
    ):
        lz.lock(operation, kernel)


def test_what_only_a_plugin_can_be_called_is_a_warning(monkeypatch):
    monkeypatch.setattr(REGISTRY.plugins, "unknown", lambda: ["secret"])
    with lz.scope(deny=["hidden.rms"]), pytest.warns(lz.LayerZeroWarning, match="left out may have it: secret"):
        lz.which("rms_norm", torch.randn(4, 8), torch.randn(8))


@pytest.mark.parametrize("kernel_id", [None, 5, "", "a b", "a,b", "a*", "x" * 201])
def test_a_kernel_has_a_name_that_policies_can_say(kernel_id):
    with pytest.raises(lz.RegistrationError, match="id: wanted a name such as"):
        lz.register_kernel("norm.rms", kernel_id)(lambda input, weight: input)
    lz.list_kernels()


def test_a_platform_is_one_there_is():
    with pytest.raises(lz.RegistrationError, match=r"platform: wanted cpu, cuda, .* got 'cudda'; did you mean 'cuda'"):
        lz.register_kernel("norm.rms", "a.b", platform=["cpu", "cudda"])(lambda input, weight: input)


def test_verbose_prints(monkeypatch, capsys):
    given = torch.randn(4, 8), torch.randn(8)
    chosen = lz.which("rms_norm", *given)["kernel_id"]
    monkeypatch.setenv("LAYERZERO_VERBOSE", "1")
    CONFIGURATION.reset()
    for _ in range(9):
        lz.rms_norm(*given)
    assert set(capsys.readouterr().err.splitlines()) == {f"layerzero: norm.rms -> {chosen}"}


def test_who_listens_hears_choices_as_log_records(caplog, capsys):
    with caplog.at_level(logging.INFO, logger="layerzero"), lz.scope(log_selections=True):
        lz.rms_norm(torch.randn(4, 8), torch.randn(8))
    assert [record.message.split(" -> ")[0] for record in caplog.records] == ["norm.rms"]
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize("name", ["cuda", "cuda:7"])
def test_a_device_that_is_not_here_is_said_so(name):
    with pytest.raises(ValueError, match=rf"device: wanted a device of this machine, .*'H100'.*; got '{name}'"):
        lz.explain("rms_norm", torch.randn(4, 8), torch.randn(8), device=name)


NO_UNICODE = "a file named \udcff.so"
"""What a name of a file gives that is no UTF-8."""


def test_a_kernel_whose_error_is_no_unicode_costs_no_call(folder):
    ENGINE.ledger = StoreLedger(FileLedger(folder))

    def breaks(input, weight, *, eps):
        raise ValueError(NO_UNICODE)

    lz.register_kernel("norm.rms", "mine.breaks", priority=100)(breaks)
    lz.configure(unmeasured="priority", allow=["torch", "mine.breaks"])
    x, weight = torch.randn(4, 64), torch.ones(64)
    with pytest.warns(lz.LayerZeroFallbackWarning, match="mine.breaks failed"):
        result = lz.rms_norm(x, weight)
    torch.testing.assert_close(result, torch.nn.functional.rms_norm(x, (64,), weight))
    (errors,) = FileLedger(folder).failures().values()
    assert errors == (r"ValueError: a file named \udcff.so",)


def test_a_cache_folder_that_is_no_unicode_keeps_times(tmp_path, kernel):
    lz.configure(perfdb={"path": os.fsdecode(os.fsencode(tmp_path) + b"/\xff.sqlite")})
    facts = lz.facts("rms_norm", torch.empty(4, 64), torch.empty(64))
    store = TimeStore()
    store.record(kernel, facts, Measurement(10.0, 12.0, 0.01, 20, noise=0.02))
    assert store.evidence([kernel], facts)[kernel.id].time_us == 10.0
    assert archive.damage(store.database.path) == ""
    assert archive.prediction_error(store.database.path).points == 1
    assert len(archive.read_database(store.database.path)) == 1
    assert connections.set_aside(store.database.path) == []


def test_a_file_that_no_fresh_one_mends_is_left_for_a_while(tmp_path, kernel, monkeypatch):
    def never(*_):
        raise connections.ForeignError("it is none, whatever is there")

    monkeypatch.setattr(connections, "check", never)
    lz.configure(perfdb={"path": str(tmp_path / "times.sqlite")})
    facts = lz.facts("rms_norm", torch.empty(4, 64), torch.empty(64))
    store = TimeStore()
    with pytest.warns(lz.LayerZeroWarning, match="set aside"):
        for _ in range(20):
            store.record(kernel, facts, Measurement(10.0, 12.0, 0.01, 20, noise=0.02))
            store.evidence([kernel], facts)
    assert len(connections.set_aside(store.database.path)) < 10
