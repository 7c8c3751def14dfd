"""One rank of a host measures; the others read its times, or measure for themselves where they keep them elsewhere."""

from __future__ import annotations

import msgspec
import pytest

from layerzero.core.errors import FrozenChoiceError
from layerzero.inspection import arrivals
from ranks_of_gloo import two_ranks

RANK = """
import os, sys
from datetime import timedelta
rank, store, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if case == "one folder":
    os.environ["LAYERZERO_CACHE_DIR"] = store + ".cache"
import torch, layerzero as lz
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
)
lz.configure(distributed_selection="agree", allow=["torch.*"])
found = lz.tune("rms_norm", [(4, 64)], dtype="float32", budget_s=100.0, isolate=False)
hashes = lz.agree().hash, lz.agree().hash
lz.thaw()
lz.configure(distributed_selection="independent")
report = lz.explain("rms_norm", torch.ones(4, 64), torch.ones(64))
print(len(found.contests), report.chosen.provenance, *hashes, sep="|")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one folder", "two folders"])
def test_one_rank_measures_where_times_are_shared(tmp_path, case):
    one, two = two_ranks(tmp_path, RANK, case)
    assert int(one[0]) > 0
    assert (int(two[0]) > 0) == (case == "two folders")
    assert one[1] == two[1] == "measured"
    assert one[2:] == two[2:]


def test_the_lowest_rank_of_each_host_processor_and_file_is_told_to_all():
    def said(host, device, times):
        return msgspec.json.encode(arrivals.Place(host, device, times))

    own = arrivals.place_of("times")
    places = [said("a", "x", "t"), own, said("a", "x", "t"), own, said("b", "x", "t"), said("a", "y", "t")]
    assert arrivals.first_at([*places, said("a", "x", "of rank 6")]) == [0, 1, 0, 1, 4, 5, 6]
    with pytest.raises(FrozenChoiceError, match=r"wanted all ranks in lz\.tune with a budget, or none"):
        arrivals.first_at([own, msgspec.json.encode(arrivals.Arrival())])
