"""``lz.optimize`` on several ranks: a module stays optimised only where it does on all."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero.core.errors import FrozenChoiceError
from layerzero.inspection import agreement
from layerzero.inspection.arrivals import Arrival, arrived
from layerzero.inspection.board import Board
from layerzero.integrations.optimize import entrance
from ranks_of_gloo import two_ranks


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Norm(), Norm()

    def forward(self, x):
        return self.two(self.one(x))


@pytest.fixture
def _several(monkeypatch):
    for module in (agreement, entrance):
        monkeypatch.setattr(module, "ranks_choose", lambda policy: True)
    yield
    if lz.frozen() is not None:
        lz.thaw()


@pytest.fixture
def _all_gain(monkeypatch):
    monkeypatch.setattr(entrance, "time_random_rows", lambda *rest, **options: None)


def heard(monkeypatch, of_all):
    """Let ``lz.optimize`` hear from all ranks what this makes of its own words."""
    real = agreement.agreed_where_ends

    def ending(name, run, words, settle):
        return real(name, run, words, lambda found, kept: settle(found, of_all(kept)))

    monkeypatch.setattr(entrance, "agreed_where_ends", ending)


@pytest.mark.usefixtures("_several", "_all_gain")
@pytest.mark.filterwarnings("ignore:agree")
def test_what_another_rank_left_is_left(monkeypatch):
    heard(monkeypatch, lambda words: {each for each in words if each.startswith("two ")})
    report = lz.optimize(Model().eval())
    assert [each.path for each in report.replaced] == ["two"]
    assert any(each.path == "one" and "another rank left it" in each.why for each in report.left)
    assert lz.frozen().agreed
    report.undo()


def hooks_of_older_versions(model):
    model.one.register_forward_hook(lambda module, args, output: output)
    model.one._is_hooked = True


def forwards_of_newer_versions(model):
    found = pytest.importorskip("transformers.distributed.tensor_parallel")
    if not hasattr(found, "apply_tensor_parallelism"):
        pytest.skip("wanted a Transformers that exchanges the forward of a module that it divides, got an older one")
    found.apply_tensor_parallelism(model, None, {"one": "colwise"})


@pytest.mark.parametrize("divide", [hooks_of_older_versions, forwards_of_newer_versions])
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.usefixtures("_all_gain")
def test_what_tensor_parallel_divides_is_left_by_that_name(divide, weights):
    model = Model().eval()
    model.one = torch.nn.Linear(64, 64)
    divide(model)
    report = lz.optimize(model, weights=weights)
    assert {each.why.removeprefix("weights='int8': ") for each in report.left if each.path == "one"} == {
        "its calls go through Transformers' tensor parallel (tp_plan), which divides it among ranks"
    }
    assert [each.path for each in report.replaced] == ["two"]


@pytest.mark.usefixtures("_several", "_all_gain")
@pytest.mark.filterwarnings("ignore:agree")
def test_a_module_that_another_rank_computes_otherwise_at_some_sizes_is_left(monkeypatch):
    said = []
    heard(monkeypatch, lambda words: said.append(words) or words)
    model = Model().eval()
    lz.optimize(model).undo()

    def slow_at_some(search, report, **options):
        for each in report.replaced:
            each.swap.state.own_at = (True, False, False)

    monkeypatch.setattr(entrance, "time_random_rows", slow_at_some)
    lz.optimize(model).undo()
    assert len(said[0]) == len(said[1]) == 2
    assert not set(said[0]) & set(said[1])


@pytest.mark.usefixtures("_several", "_all_gain")
@pytest.mark.filterwarnings("ignore:agree")
def test_ranks_that_do_not_agree_leave_the_model_as_it_was(monkeypatch):
    def refusing(words):
        raise FrozenChoiceError("agree", ["rank 1 did not come"])

    heard(monkeypatch, refusing)
    model = Model().eval()
    with pytest.raises(FrozenChoiceError, match="rank 1 did not come"):
        lz.optimize(model)
    assert all("forward" not in each.__dict__ for each in model.modules())


def test_what_all_ranks_say_is_common_to_them():
    def said(*words):
        return [msgspec.json.encode(Arrival(words=each)) for each in words]

    ranks = Board((0, 1, 5))
    assert arrived(ranks, said(["a", "b"], ["b", "c"], ["b"])).words == ["b"]
    assert arrived(ranks, said(None, None, None)).words == []
    with pytest.raises(FrozenChoiceError, match=r"wanted all ranks in lz\.optimize, or none, got ranks 0, 5 alone"):
        arrived(ranks, said([], None, ["b"]))


SHARDED = """
import pathlib, sys
import torch, torch.distributed as dist, layerzero as lz
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
mesh = dist.init_device_mesh("cpu", (2,))
for each in (*model.model.layers, model):
    fully_shard(each, mesh=mesh)
ids = torch.arange(12)[None]
with torch.no_grad():
    before = model(ids).logits
    report = lz.optimize(model)
    after = model(ids).logits
torch.testing.assert_close(after, before)
assert lz.frozen().agreed
said = f"{[each.path for each in report.replaced]} {lz.agree().hash}"
pathlib.Path(sys.argv[1], f"rank{dist.get_rank()}").write_text(said)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_of_a_sharded_model_agree_by_an_environment_variable_alone(tmp_path):
    pytest.importorskip("transformers")
    script = tmp_path / "script.py"
    script.write_text(SHARDED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(script), str(tmp_path)]
    environment = {**os.environ, "LAYERZERO_DISTRIBUTED_SELECTION": "agree"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    one, two = (tmp_path.joinpath(f"rank{rank}").read_text() for rank in (0, 1))  # what both print runs together
    assert one == two
    assert "model.norm" in one


EXCHANGES = """
import datetime, sys, torch, torch.distributed as dist, layerzero as lz
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
rank, store, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
)
runs = []

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.last = torch.nn.RMSNorm(64), torch.nn.Linear(64, 64)

    def forward(self, x):
        runs.append(rank)
        out = self.last(self.norm(x))
        if case == "own":
            dist.all_reduce(out)
        return out

model = Model().eval()
if case == "sharded":
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
if case == "wrapped":
    model.register_buffer("sent", torch.ones(3))
    model = torch.nn.parallel.DistributedDataParallel(model).eval()
report = lz.optimize(model, torch.ones(4, 64), rounds=1 + 4 * rank, isolate=False)
print(len(runs), any("exchange tensors with other ranks" in each.why for each in report.left), sep="|")
"""


@pytest.mark.parametrize(("case", "exchanges"), [("own", True), ("sharded", True), ("wrapped", True), ("alone", False)])
def test_inputs_whose_calls_exchange_tensors_run_once_on_each_rank(tmp_path, case, exchanges):
    for runs, left in two_ranks(tmp_path, EXCHANGES, case):
        assert (runs == "1", left) == (exchanges, str(exchanges))
