"""`layerzero vet`: what it asks, says and ends with."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import torch
from packaging.version import Version
from typer.testing import CliRunner

import layerzero as lz
from layerzero.cli.app import main
from layerzero.core.device import Device
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Verdict
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.proofs import how_to_vet
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.verification.vetting import class_pairs


def layerzero(*arguments):
    return CliRunner().invoke(main, list(arguments))


proven = pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="what this torch compiles is untried")


@proven
@pytest.mark.slow  # in test_vetting_demands.py it vets recorded calls
def test_the_command_vets_and_says_what_was_found(plugin):
    answer = layerzero("vet", "--operation", "rms_norm", "--shapes", "4x64", "--dtype", "float32", "--json")
    assert answer.exit_code == 0, answer.output
    data = json.loads(answer.stdout)
    assert data["counts"] == {"passed": 1}
    assert data["classes"][0]["kernel_id"] == "plug.rms"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
def test_the_command_exits_with_one_where_a_kernel_is_wrong(planted):
    answer = layerzero("vet", "--kernel", "planted.mutates", "--shapes", "4x64", "--dtype", "float32")
    assert answer.exit_code == 1
    assert "planted.mutates for norm.rms float32" in answer.stdout


@pytest.mark.slow
def test_it_says_nothing_twice_and_tells_why_there_is_nothing_to_do(plugin):
    ask = ("vet", "rms_norm", "--kernel", "plug.rms", "--dtype", "float32")
    answer = layerzero(*ask, "--shapes", "4x64,9x64")
    assert answer.stdout.count("plug.rms for norm.rms float32") == 2
    assert answer.stderr == ""
    assert "each class of these calls has a verdict" in layerzero(*ask, "--shapes", "4x64").stdout
    layerzero(*ask)
    assert "other sizes need --shapes" in layerzero(*ask).stdout
    assert "no such kernel has this operation" in layerzero("vet", "layer_norm", "--kernel", "plug.rms").stdout


def test_cases_that_are_no_call_in_a_dtype_are_left_out():
    """A linear layer's case that names float32 for its result is none of float64."""
    found = class_pairs(REGISTRY.kernels("mlp.linear"), "mlp.linear", Device.detect("cpu"))
    assert {torch.float32, torch.float64} <= {facts["dtype"] for _, facts in found}


def test_sizes_that_no_kernel_takes_are_no_verdicts():
    ask = ("vet", "--kernel", "torch.sdpa.flash", "--dtype", "float64", "--shapes", "1x4x2x8192")
    assert "is one that the limits of torch.sdpa.flash allow" in layerzero(*ask).stdout


QUERY = torch.randn(1, 5, 4, 8)
DECODE = torch.randn(2, 1, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
WIDE = torch.randn(4, 96, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("function", "arguments", "options"),
    [
        ("rms_norm", (torch.randn(3000, 512), torch.randn(512)), {}),
        ("rms_norm", (torch.randn(2, 30, 64), torch.randn(64)), {}),
        ("layer_norm", (WIDE, (96,), WIDE[0], WIDE[0]), {}),
        ("attention", (QUERY, QUERY, QUERY), {"layout": "BSHD"}),
        ("attention", (QUERY, QUERY, QUERY), {"layout": "BHSD"}),
        ("attention", DECODE, {}),
    ],
)
@pytest.mark.slow
def test_the_hint_of_a_refusal_vets_the_class_that_was_refused(function, arguments, options):
    facts = lz.facts(function, *arguments, **options)
    kernel = lz.explain(facts).chosen.kernel
    words = shlex.split(re.search("`layerzero (.*)`", how_to_vet(kernel, facts)).group(1))
    answer = layerzero(*words)
    assert answer.exit_code == 0, answer.output
    assert ENGINE.ledger.verdict(kernel, facts) is Verdict.PASSED


@pytest.mark.parametrize(
    ("function", "arguments", "options"),
    [
        ("rms_norm", (torch.randn(2, 3, 4, 64), torch.randn(64)), {}),
        ("layer_norm", (torch.randn(2, 4, 8), (4, 8)), {}),
        ("attention", (QUERY, QUERY, QUERY), {"causal": False, "attn_mask": torch.zeros(1, 1, 5, 5), "layout": "BSHD"}),
        ("attention", (QUERY, QUERY, QUERY[..., :4].contiguous()), {"layout": "BSHD"}),
    ],
)
@pytest.mark.slow  # test_vetting_demands has a recorded call where slow tests are left out
def test_what_shapes_cannot_say_is_vetted_from_a_recorded_call(function, arguments, options, tmp_path):
    facts = lz.facts(function, *arguments, **options)
    kernel = lz.explain(facts).chosen.kernel
    assert "--manifest FILE" in how_to_vet(kernel, facts)
    with lz.record(tmp_path / "calls.json"):
        getattr(lz, function)(*arguments, **options)
    answer = layerzero("vet", "--kernel", kernel.id, "--manifest", str(tmp_path / "calls.json"))
    assert answer.exit_code == 0, answer.output
    assert ENGINE.ledger.verdict(kernel, facts) is Verdict.PASSED


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--kernel", "nobody.*"), "--kernel: wanted a library or kernel, got 'nobody.*'"),
        (("--backend", "nobody"), "--backend: wanted a library or kernel, got 'nobody'"),
        (("--shapes", "4by64"), "got '4by64'"),
        (("--module", "no_such_module"), "--module no_such_module: wanted a module that imports"),
    ],
)
def test_a_question_without_sense_is_an_error(arguments, text):
    answer = layerzero("vet", *arguments)
    assert answer.exit_code == 2
    assert text in answer.stderr


def test_functions_refuse_names_of_no_kernel_too():
    with pytest.raises(ValueError, match="vet: backends: wanted a library or kernel, got 'nobody', which names none"):
        lz.vet("rms_norm", backends=["nobody"])
    with pytest.raises(TypeError, match=r"vet: kernels: wanted a list .*got 'torch\.rms_norm'; pass \['torch"):
        lz.vet("rms_norm", kernels="torch.rms_norm")
    with pytest.raises(ValueError, match=r"tune: leave_out: .* 'torhc', which names none here"):
        lz.tune("rms_norm", [(4, 64)], leave_out=["torhc"])


@proven
def test_declared_kernels_are_never_asked_about_unless_named():
    assert lz.vet() == ()
    assert isinstance(REGISTRY.kernel("torch.rms_norm"), Kernel)
