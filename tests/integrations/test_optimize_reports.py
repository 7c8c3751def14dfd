"""What ``lz.optimize`` tells: memory and its bound, time by modules, what was measured, and by whom."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import layerzero as lz
from decoders import greedy, made, output, tokens, transformers
from layerzero.core.device import Device
from layerzero.engine.registry import REGISTRY
from layerzero.integrations.optimize.swaps.weights import wants_packed
from layerzero.integrations.optimize.times.module_times import OUTSIDE
from layerzero.integrations.optimize.times.workload import stock_of
from layerzero.tuning.storage.archive import differs
from layerzero.tuning.storage.environment import surroundings

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning"),
    pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroWarning"),
]


PACKED = wants_packed(torch.empty(0))


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize("limit", [0, 20_000, 10**9])
def test_packed_forms_stay_within_their_limit(limit: int) -> None:
    """Prompts and tokens in turn, by whichever kernels; the values are stock's."""
    model, stock = made(), made()
    report = lz.optimize(model, memory_limit=limit)
    for preferred in ("torch.onednn_linear_packed", "zentorch.linear_packed", None):
        for length in (9, 1):
            ids = tokens(1, length)
            if preferred is None:
                got = output(model, ids)
            else:
                with lz.prefer(preferred):
                    got = output(model, ids)
            torch.testing.assert_close(got, output(stock, ids), rtol=1e-4, atol=1e-4)
            assert report.extra_bytes <= limit
    assert "MB of forms" in str(report)
    if limit < 10**9:
        assert sum(each.barred for each in report.packs) > 0
    else:
        assert report.extra_bytes > 0
        assert not sum(each.barred for each in report.packs)


@pytest.mark.usefixtures("packs")
def test_a_bound_goes_with_copies_and_other_weights_and_is_gone_after_undo() -> None:
    model, stock = made(), made(kind="Llama")
    report = lz.optimize(model, memory_limit=20_000)
    output(model, tokens())
    twin = copy.deepcopy(model)
    torch.testing.assert_close(output(twin, tokens()), output(stock, tokens()), rtol=1e-4, atol=1e-4)
    (budget,) = {id(each.budget): each.budget for each in _packs(twin)}.values()
    assert budget.used <= 20_000
    assert budget is not report.packs[0].budget
    other = {name: value * 0.9 for name, value in stock.state_dict().items()}
    for each in (model, stock):
        each.load_state_dict(other, assign=True)
    torch.testing.assert_close(output(model, tokens()), output(stock, tokens()), rtol=1e-4, atol=1e-4)
    assert report.extra_bytes <= 20_000
    report.undo()
    assert report.extra_bytes == 0
    assert torch.equal(output(model, tokens()), output(stock, tokens()))


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize("limit", [None, 10**9])
def test_undo_lets_go_of_weights_at_once_so_that_torch_may_swap_them(limit: int | None) -> None:
    """``swap_tensors`` takes no weight that anything refers to weakly, as packed forms do."""
    model = made()
    report = lz.optimize(model, memory_limit=limit)
    output(model, tokens())
    assert report.replaced
    gc.disable()
    try:
        report.undo()
        assert not any(weakref.getweakrefcount(each) for each in model.parameters())
    finally:
        gc.enable()


def _packs(model: Any) -> list[Any]:
    states = [vars(each).get("_layerzero") for each in model.modules()]
    parts = [part for state in states for part in getattr(state, "parts", (state,))]
    return [each for each in parts if hasattr(each, "forms_for")]


@pytest.mark.parametrize("limit", [-1, True])
def test_a_limit_that_is_none_is_refused(limit: int) -> None:
    with pytest.raises(lz.InvalidCallError, match="memory_limit: wanted bytes from 0"):
        lz.optimize(made(), memory_limit=limit)


@pytest.mark.usefixtures("unmeasured")
def test_time_is_told_by_modules_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerzero.integrations.optimize.selection.LEAST", -1e9)  # all is kept, however slow
    model = made()
    ids = tokens()
    expected = greedy(model, ids, 4)
    report = lz.optimize(model, lambda: greedy(model, ids, 4), rounds=1, isolate=False, graph=True)
    found = report.spent
    assert found is not None
    assert set(found.before) == set(found.after)
    assert {"layer, LayerZero's", "Embedding, untouched", OUTSIDE} <= set(found.before)
    assert found.modules["layer, LayerZero's"] == 2
    assert all(share.host_s > 0 and share.device_s is None for share in found.after.values())
    total = sum(share.host_s for share in found.before.values())
    assert 0 < found.before["Embedding, untouched"].host_s < total
    assert "time of a run" in str(report)
    assert OUTSIDE in str(report)
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    assert "step" in {each.kind for each in report.replaced}
    assert torch.equal(greedy(model, ids, 4), expected)


@pytest.mark.usefixtures("unmeasured")
def test_a_gain_names_what_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sends norms to other kernels where a language for them is installed: another stock, another gain."""
    report = lz.optimize(made(), {"input_ids": tokens()}, rounds=1, isolate=False)
    assert f"before is torch {torch.__version__}, transformers {transformers.__version__} with sdpa, on " in str(report)
    assert f"{torch.get_num_threads()} threads of " in report.stock
    assert "TORCH_DISABLE_NATIVE_JIT" not in report.stock
    assert "before is" not in str(lz.optimize(made()))
    node = SimpleNamespace(dsl_name="cutedsl")
    line = "; torch's own cutedsl kernel for _fused_rms_norm, which TORCH_DISABLE_NATIVE_JIT=1 turns off"
    for library in ((), ("aten",)):  # torch 2.15 names it
        graphs = {(*library, "_fused_rms_norm", "CPU"): [node], (*library, "bmm", "CUDA"): [node]}
        monkeypatch.setitem(sys.modules, "torch._native.registry", SimpleNamespace(_graphs=graphs))
        assert stock_of(nn.Linear(2, 2), torch.device("cpu")).endswith(line)


_TWICE = """
    import json, sys, warnings
    import torch, layerzero as lz
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)).eval()
    x = torch.randn(32, 256)
    report = lz.optimize(model, (x,), rounds=1, isolate=False)
    noisy = sum(each.too_noisy for each in report.tuned.choices)
    print(json.dumps({"measured": len(report.tuned.contests), "known": report.tuned.known, "noisy": noisy,
                      "left": report.tuned.left, "text": str(report)}))
"""


def optimized_apart(folder: Any, **more: str) -> dict[str, Any]:
    """What another process tells that shares a folder of measured times."""
    environment = os.environ | {"LAYERZERO_CACHE_DIR": str(folder)} | more
    done = subprocess.run(  # this interpreter, and the lines above
        [sys.executable, "-c", textwrap.dedent(_TWICE)], capture_output=True, text=True, env=environment, check=False
    )
    assert not done.returncode, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def one_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder of measured times, and what the process told that wrote them."""
    folder = tmp_path_factory.mktemp("times")
    return folder, optimized_apart(folder, OMP_NUM_THREADS="1")


@pytest.mark.slow
def test_a_second_process_measures_nothing_again(one_folder: Any) -> None:
    """But for calls whose times were too noisy to decide."""
    folder, first = one_folder
    second = optimized_apart(folder, OMP_NUM_THREADS="1")
    assert first["measured"] > 0
    assert first["known"] == first["left"] == 0
    assert second["measured"] <= first["noisy"]
    assert second["known"] == first["measured"] - second["measured"]
    assert f"{second['known']} were known" in second["text"]


@pytest.mark.slow
def test_times_of_another_machine_are_refused_with_a_reason(one_folder: Any) -> None:
    """One folder for two: everything is measured again, and the report says why."""
    folder, first = one_folder
    second = optimized_apart(folder, OMP_NUM_THREADS="2")
    assert second["known"] == 0
    assert second["measured"] >= first["measured"] > 0
    assert "known times do not count here: threads: wanted 2, got 1" in second["text"]


def test_what_differs_between_machines_is_named() -> None:
    here = surroundings(Device.detect("cpu")).environment(REGISTRY.kernel("torch.onednn_linear_packed"))[0]
    assert not differs(here, here)
    assert (
        differs(here, msgspec.structs.replace(here, device="Another")) == f"device: wanted {here.device}, got Another"
    )
    other = msgspec.structs.replace(here, version="0.1", threads=99)
    assert differs(here, other) == f"torch's version: wanted {here.version or 'none'}, got 0.1"


def test_two_models_in_eight_threads_one_undone_meanwhile() -> None:
    """Again and again: who is within a forward while it is taken away ends with stock's values."""
    before = {name: id(value) for name, value in vars(nn.functional).items()}
    forwards = {kind: kind.forward for kind in (nn.Linear, transformers.LlamaForCausalLM)}
    first, second, stock = made(), made(), made()
    expected = output(stock, tokens())
    wrong: list[str] = []
    stop = threading.Event()

    def run(model: Any) -> None:
        try:
            while not stop.is_set():
                error = (output(model, tokens()) - expected).abs().max().item()
                if error > 1e-3:
                    wrong.append(f"{error}")
        except Exception as error:  # noqa: BLE001  # told by the test
            wrong.append(repr(error))

    lz.optimize(second, graph=True)
    threads = [threading.Thread(target=run, args=(each,)) for each in (first, second) * 4]
    for each in threads:
        each.start()
    reports = []
    for _ in range(3):
        reports.append(lz.optimize(first))
        reports[-1].undo()
    stop.set()
    for each in threads:
        each.join()
    assert not wrong, wrong[:3]
    assert all(each.replaced for each in reports)
    assert {name: id(value) for name, value in vars(nn.functional).items()} == before
    assert {kind: kind.forward for kind in forwards} == forwards
    assert torch.equal(output(first, tokens()), expected)


def test_modules_whose_proof_is_over_are_told() -> None:
    model = made()
    report = lz.optimize(model)
    assert report.replaced
    assert "run their own code now" not in str(report)
    for each in model.modules():
        each.another = True
    assert f"{len(report.states)} run their own code now: what their proof rests on changed" in str(report)


@pytest.mark.usefixtures("packs")
def test_a_pickled_report_keeps_its_text_and_numbers_and_refuses_undo() -> None:
    model = made()
    model.report = report = lz.optimize(model)
    assert report.is_on
    output(model, tokens())
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    again = torch.load(memory, weights_only=False)
    for kept in (pickle.loads(pickle.dumps(report)), again.report, pickle.loads(pickle.dumps(again.report))):
        assert str(kept) == str(report)
        assert dataclasses.replace(kept, _text="", time=report.time) == dataclasses.replace(report, _joined=[])
        assert not kept.is_on
        with pytest.raises(ValueError, match=r"wanted the report that lz.optimize returned.* got a pickle's"):
            kept.undo()
    assert torch.equal(output(again, tokens()), output(made(), tokens()))
    twin = copy.deepcopy(model)
    copy.copy(twin.report).undo()
    assert torch.equal(output(twin, tokens()), output(made(), tokens()))
    assert report.is_on
    assert not twin.report.is_on
