"""What one rank's error leaves: ranks that all go on agree again, at the same number, whatever failed and where."""

from __future__ import annotations

import pytest

from ranks_of_gloo import two_ranks

RANK = """
import sys, warnings, torch, layerzero as lz
from datetime import timedelta
from layerzero.inspection import arrivals
from layerzero.integrations.optimize.times.report import Optimized
rank, store, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
warnings.simplefilter("ignore")
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
)
lz.configure(distributed_selection="agree", deny=["inductor.*", "vllm.*", "onnxruntime.*", "openvino.*"])
X = torch.randn(4, 64)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)
    def forward(self, x):
        if rank == 0 and case == "forward":
            raise MemoryError("planted")
        return self.linear(self.norm(x))
model = Model()
def failing(*_, **__):
    if rank == 0:
        raise MemoryError("planted")
    return lz.rms_norm(X, torch.ones(64))
def optimize():
    given = {"budget_s": 1e-6 if rank == 0 else 60.0} if case == "budget" else {"inputs": (X,)}
    if case == "taken" and rank == 0:
        Optimized.take_out = failing
    model.train(case == "training" and rank == 0)
    with torch.inference_mode():
        lz.optimize(model, progress=lambda *_: None, **given)
def froze():
    if rank == 0:
        lz.freeze()
    try:
        lz.agree()
    finally:
        if rank == 0:
            lz.thaw()
def arrives():
    real = arrivals.Known
    arrivals.Known = failing if rank == 0 else real
    try:
        lz.agree()
    finally:
        arrivals.Known = real
RUN = {
    "forward": optimize,
    "budget": optimize,
    "training": optimize,
    "taken": optimize,
    "warmup": lambda: lz.warmup(failing, shapes=X),
    "tune": lambda: lz.tune("no.such.operation" if rank == 0 else "elementwise.softmax", [(4, 64)], budget_s=0),
    "froze": froze,
    "own": arrives,
}
said = []
try:
    RUN[case]()
    said.append("ended")
except Exception as error:
    said.append(f"{type(error).__name__}: {error}")
assert not any("forward" in each.__dict__ for each in model.modules())  # what one rank left, all left
lz.rms_norm(X, torch.ones(64))
for _ in range(2):
    try:
        said.append(lz.agree().hash)
    except lz.FrozenChoiceError as error:
        said.append(str(error))
torch.distributed.destroy_process_group()
print("|".join(said))
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["forward", "budget", "training", "taken", "warmup", "tune", "froze", "own"])
def test_ranks_agree_again_after_one_of_them_failed(tmp_path, case):
    one, two = two_ranks(tmp_path, RANK, case)
    if case in ("budget", "training"):  # what one rank alone is short of, or in, is no error
        assert one[0] == two[0] == "ended"
    else:
        assert two[0].startswith("FrozenChoiceError: agree: rank 0: ")
    assert one[1:] == two[1:]
    assert len(one[1]) == len(one[2]) == 64, one


AGAIN = """
import os, sys, torch, layerzero as lz
from datetime import timedelta
rank, store, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
def group(life):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}{life}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
def agreed():
    return [each.hash for each in (lz.agree(), *(lz.agree(every=3) for _ in range(4))) if each is not None]
lz.rms_norm(torch.ones(4, 64), torch.ones(64))
if rank == 0 or case == "1":
    group(1)
    agreed()
    torch.distributed.destroy_process_group()
if rank == 1 and case == "1":  # a fresh process in its place
    os.execv(sys.executable, [sys.executable, "-c", open(store + ".py").read(), "1", store, "2"])
group(2)
print("|".join(agreed()))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_a_rank_that_is_started_anew_agrees_with_one_that_makes_its_group_anew(tmp_path):
    (tmp_path / "store.py").write_text(AGAIN)
    one, two = two_ranks(tmp_path, AGAIN, "1")
    assert one == two
    assert [len(each) for each in one] == [64, 64]
