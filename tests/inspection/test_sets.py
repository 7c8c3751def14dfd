"""Sets of operations: their names, what a machine has for them, and words that name none."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import layerzero as lz
from drawing import mostly
from layerzero.cli.app import main
from layerzero.core.device import Device
from layerzero.inspection.model_sets import OperationSupport, served, set_named
from layerzero.ops import OPERATIONS, SET_ALIASES, SETS

EVERY = sorted({name for each in SETS.values() for name in each.operations})


@pytest.mark.parametrize("name", SETS)
def test_sets_name_operations_once(name):
    assert set(SETS[name].operations) <= set(OPERATIONS)
    assert len(set(SETS[name].operations)) == len(SETS[name].operations)


@pytest.mark.parametrize("name", SETS)
def test_every_operation_of_a_set_finds_a_kernel_for_its_named_calls(name):
    for finding in served(name, Device.detect("cpu")):
        assert finding.chosen, finding
        assert finding.served is not OperationSupport.REFERENCE, finding
        assert str(finding).startswith(f"{finding.operation}: {finding.served} ({finding.dtype}): calls get ")
        assert finding.dtype == "float32" or name == "quantised"


def test_what_is_optimised_has_a_librarys_kernel_for_each_call():
    for finding in served("decoder", Device.detect("cpu")):
        libraries = {kernel.partition(".")[0] for kernel in finding.kernels}
        assert not libraries & {"torch", "reference"}
        if finding.served in (OperationSupport.OPTIMISED, OperationSupport.PARTLY, OperationSupport.PREPARED):
            assert finding.kernels
        else:
            assert not finding.kernels


def test_another_device_is_asked_about_in_its_own_dtype():
    found = {each.operation: each for each in served("decoder", Device.named("H200"))}
    assert {each.dtype for each in found.values()} == {"bfloat16"}
    assert "cuda" not in found["posenc.rope"].refused.partition("must be")[2], "what could never run here is not told"


@pytest.mark.parametrize(("word", "name"), SET_ALIASES.items())
def test_a_set_has_other_words(word, name):
    assert set_named(word) == SETS[name]
    assert set_named(f"{word}, {name}").operations == SETS[name].operations


def test_a_word_that_names_no_set_gets_the_nearest():
    with pytest.raises(ValueError, match="got 'encoders'; did you mean 'encoder'"):
        lz.doctor(asked_for="encoders")
    with pytest.raises(ValueError, match=r"with commas between them, got 'norm\.rmss'"):
        lz.doctor(asked_for="norm.layer, norm.rmss")
    told = CliRunner().invoke(main, ["doctor", "--for", "nothing"])
    assert told.exit_code == 2
    assert (
        "wanted one of decoder, encoder, diffusion, embedding, quantised, experts, serving, or operations"
        in told.output
    )


def test_a_set_may_be_named_by_its_operations():
    found = served("norm.rms, attention.causal, activation.gelu,norm.rms,", Device.detect("cpu"))
    assert [each.operation for each in found if not each.operation.startswith("attention.")] == [
        "norm.rms",
        "activation.gelu",
    ]
    told = CliRunner().invoke(main, ["ready", "--for", "norm.rms,activation.gelu"])
    assert "2 operations of norm.rms,activation.gelu find kernels" in " ".join(told.output.split())


def test_doctor_tells_a_line_for_each_operation():
    told = CliRunner().invoke(main, ["doctor", "--for", "encoder", "--json"])
    found = json.loads(told.output)["asked_for"]
    assert [each["operation"] for each in found] == list(SETS["encoder"].operations)
    assert all(str(each) in str(lz.doctor(asked_for="encoder")) for each in served("encoder"))
    assert "asked_for" not in lz.doctor().to_dict()


def test_what_a_caller_has_to_prepare_is_told():
    """Packed weights are what products on a CPU gain from most: "torch alone" would be no answer."""
    found = {each.operation: each for each in served("decoder", Device.detect("cpu"))}
    product = found["mlp.linear"]
    packs = [kernel.id for kernel in lz.list_kernels("mlp.linear") if "packed" in kernel.id]
    if not set(packs) & set(product.kernels):
        pytest.skip("no library here packs weights")
    assert product.served is OperationSupport.PREPARED
    assert product.handles == ("packed",)
    assert "may run them, with packed=" in str(product)
    assert "PackedWeight" in product.refused
    assert found["norm.rms"].handles == ()


@pytest.mark.parametrize("name", mostly(SETS, {max(SETS, key=lambda name: len(SETS[name].operations)), "quantised"}))
def test_a_set_fits_on_a_screen(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    told = CliRunner().invoke(main, ["doctor", "--for", name])
    hints = sum(len(each) // 90 + 2 for each in lz.doctor().issues)
    assert len(told.output.splitlines()) <= 47 + hints
    for operation in SETS[name].operations:
        assert operation in told.output
    assert "libraries are usable" in told.output
    assert "bpe_openai" not in told.output


def test_decoders_are_asked_about_all_that_lies_between_attentions():
    asked = set(SETS["decoder"].operations)
    assert {"embedding.lookup", "posenc.qk_norm_rope", "kv.rope_append", "kv.rope_append.paged"} <= asked
