"""What an operator says means what it says: names of operations, of kernels, and what is told."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch

import layerzero as lz
from layerzero.engine.registry import REGISTRY

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


def test_verbose_prints():
    script = "import torch, layerzero as lz; [lz.rms_norm(torch.randn(4, 8), torch.randn(8)) for _ in range(9)]"
    environment = os.environ | {"LAYERZERO_VERBOSE": "1"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    chosen = lz.which("rms_norm", torch.randn(4, 8), torch.randn(8))["kernel_id"]
    assert set(run.stderr.splitlines()) == {f"layerzero: norm.rms -> {chosen}"}


def test_who_listens_hears_choices_as_log_records(caplog, capsys):
    with caplog.at_level(logging.INFO, logger="layerzero"), lz.scope(log_selections=True):
        lz.rms_norm(torch.randn(4, 8), torch.randn(8))
    assert [record.message.split(" -> ")[0] for record in caplog.records] == ["norm.rms"]
    assert capsys.readouterr().err == ""
