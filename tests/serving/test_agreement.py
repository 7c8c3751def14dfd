"""Ranks hold the same choices: the lowest rank's, where all can run them; else nothing is frozen, and all are told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero.asking.freeze import snapshot
from layerzero.serving import agreement

X, WEIGHT = torch.randn(4, 64), torch.ones(64)


@pytest.fixture(autouse=True)
def _two_kernels():
    lz.register_kernel("norm.rms", "mine.one", supported_dtypes=["float32"])(_norm)
    lz.register_kernel("norm.rms", "mine.two", supported_dtypes=["float32"])(_norm)
    yield
    if lz.frozen() is not None:
        lz.thaw()
    for name in ("mine.one", "mine.two"):
        lz.unregister_kernel(name)


def _norm(input, weight, *, eps):
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)


def of_rank(kernel):
    """The class of a call, and what a rank tells that chose this kernel for it."""
    lz.rms_norm(X, WEIGHT)
    found = snapshot()
    name = next(name for name, each in found.choices.items() if each.call.operation == "norm.rms" and not each.scoped)
    choice = msgspec.structs.replace(found.choices[name], kernel=kernel, version="")
    return name, msgspec.structs.replace(found, choices={name: choice}).sealed()


def ranks(monkeypatch, others, problems=()):
    """Let ``agree`` find other ranks that told this."""
    told = iter([[msgspec.json.encode(each) for each in others], [list(problems) for _ in others]])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(agreement, "_gathered", lambda value, group: [*next(told), value])  # this one is the last


def test_one_process_freezes_what_it_chose():
    lz.rms_norm(X, WEIGHT)
    found = lz.agree()
    assert lz.frozen() is not None
    assert found.hash == lz.thaw().hash


def test_the_lowest_ranks_kernel_runs_on_all(monkeypatch):
    name, told = of_rank("mine.two")
    assert lz.which("rms_norm", X, WEIGHT)["kernel_id"] != "mine.two"
    ranks(monkeypatch, [told])
    found = lz.agree()
    assert found.choices[name].kernel == "mine.two"
    assert lz.which("rms_norm", X, WEIGHT)["kernel_id"] == "mine.two"


def test_a_kernel_that_another_rank_cannot_run_freezes_nothing(monkeypatch):
    lz.rms_norm(X, WEIGHT)
    ranks(monkeypatch, [snapshot()], ["norm.rms: wanted mine.two, this process would choose torch.rms_norm"])
    with pytest.raises(lz.FrozenChoiceError, match=r"rank 0: norm\.rms: wanted mine\.two"):
        lz.agree()
    assert lz.frozen() is None


def test_other_versions_are_told_by_rank(monkeypatch):
    ranks(monkeypatch, [msgspec.structs.replace(snapshot(), torch="1.13.0").sealed()])
    with pytest.raises(lz.FrozenChoiceError, match=r"rank 1: torch: wanted 1\.13\.0, got"):
        lz.agree()
    assert lz.frozen() is None


def test_a_rank_that_fails_is_told_on_every_rank(monkeypatch):
    """The others wait for what it tells; an error that only one rank raised left them there."""
    lz.rms_norm(X, WEIGHT)
    ranks(monkeypatch, [snapshot()])

    def failing(_):
        raise RuntimeError("planted")

    monkeypatch.setattr(agreement, "adopt", failing)
    with pytest.raises(lz.FrozenChoiceError, match="rank 1: RuntimeError: planted"):
        lz.agree()


def test_choices_that_are_frozen_already_are_refused_on_every_rank(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(agreement, "_gathered", lambda value, group: [b"", value])
    with pytest.raises(lz.PolicyError, match=r"agree: choices are frozen already on rank 0; wanted lz\.thaw"):
        lz.agree()


def test_a_rank_that_is_not_in_the_group_is_told_so(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(lz.PolicyError, match="agree: wanted a rank of the group, got one outside"):
        lz.agree(torch.distributed.GroupMember.NON_GROUP_MEMBER)
    assert lz.frozen() is None


def test_ranks_of_a_group_are_told_by_their_numbers_among_all(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_global_rank", lambda group, rank: rank + 4)
    ranks(monkeypatch, [snapshot()], ["norm.rms: wanted mine.two, this process would choose torch.rms_norm"])
    with pytest.raises(lz.FrozenChoiceError, match=r"rank 4: norm\.rms: wanted mine\.two"):
        lz.agree("a group")


def test_ranks_that_called_nothing_are_warned(monkeypatch):
    ranks(monkeypatch, [snapshot()])
    with pytest.warns(lz.LayerZeroWarning, match="agree: wanted calls that were made or warmed up, got none"):
        lz.agree()


def test_a_document_of_another_version_is_told_by_rank(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(agreement, "_gathered", lambda value, group: [value, b'{"format": 1}'])
    with pytest.raises(lz.FrozenChoiceError, match="rank 1: wanted a document of this version, got"):
        lz.agree()
    assert lz.frozen() is None


@pytest.mark.parametrize(
    ("config", "wanted"), [("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo", "cpu"), ("cuda:nccl", "cuda:3")]
)
def test_bytes_are_exchanged_where_the_group_can(monkeypatch, config, wanted):
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert agreement._exchanged_on(None) == torch.device(wanted)


def test_classes_of_all_ranks_are_held_and_the_lowest_rank_counts():
    name, one = of_rank("mine.one")
    other = msgspec.structs.replace(one.choices[name], kernel="mine.two")
    more = msgspec.structs.replace(one, choices={name: other, "only there": other})
    found = agreement.merged([one, more])
    assert found.choices[name].kernel == "mine.one"
    assert found.choices["only there"].kernel == "mine.two"
    assert found.hash == agreement.merged([one, more]).hash == found.sealed().hash


RANK = """
import sys, torch, layerzero as lz
rank, store, warmed = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "warmup"
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
def norm(input, weight, *, eps):
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)
for name, priority in (("mine.one", 50), ("mine.two", 60 if rank else 40)):
    lz.register_kernel("norm.rms", name, priority=priority, supported_dtypes=["float32"])(norm)
lz.configure(unmeasured="priority", deny=["torch.*", "zentorch.*", "vllm.*", "onnxruntime.*", "inductor.*"])
x, weight = torch.randn(4, 64), torch.ones(64)
if warmed:
    lz.warmup(lambda x: lz.rms_norm(x, weight), shapes=x)
    lz.configure(memory_headroom_mb=99)
    from layerzero.core.evidence import Measurement
    from layerzero.engine.registry import REGISTRY
    from layerzero.tuning.measuring.winner import record_times
    if not rank:  # tuned there alone
        times = {"mine.one": 1.0, "mine.two": 50.0}
        facts = lz.facts("rms_norm", x, weight)
        record_times(facts, {REGISTRY.kernel(name): Measurement(us, us, 0.0, 30) for name, us in times.items()})
else:
    lz.rms_norm(x, weight)
before = lz.which("rms_norm", x, weight)["kernel_id"]
found = lz.agree()
print(before, lz.which("rms_norm", x, weight)["kernel_id"], found.hash, len(found.choices))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["step", "warmup"])
def test_two_processes_agree(tmp_path: Path, first):
    """After a step, and in the order that documents give: warmup, settings, a new winner, agree."""
    store = tmp_path / "store"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(store), first],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [each.communicate() for each in started]
    assert [each.returncode for each in started] == [0, 0], said
    (one, one_after, one_hash, one_count), (two, two_after, two_hash, two_count) = (out.split() for out, _ in said)
    assert one_count == two_count == "1"
    assert (one, two) == ("mine.one", "mine.two")
    assert (one_after, two_after) == ("mine.one", "mine.one")
    assert one_hash == two_hash
