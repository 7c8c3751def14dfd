"""What ``lz.optimize`` tells: memory and its bound, time by modules, what was measured, and by whom."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import layerzero as lz
from decoders import greedy, made, tokens, transformers
from layerzero.core.device import Device
from layerzero.engine.registry import REGISTRY
from layerzero.integrations.optimize.swaps.weights import wants_packed
from layerzero.integrations.optimize.times.module_times import OUTSIDE
from layerzero.integrations.optimize.times.report import Optimized, Replaced
from layerzero.integrations.optimize.times.workload import stock_of
from layerzero.tuning.storage.archive import differs
from layerzero.tuning.storage.environment import surroundings

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning"),
    pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroWarning"),
]

PACKED = wants_packed(torch.empty(0))


def output(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids, **more).logits
    return logits


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
    graphs = {("_fused_rms_norm", "CPU"): [node], ("bmm", "CUDA"): [node]}
    monkeypatch.setitem(sys.modules, "torch._native.registry", SimpleNamespace(_graphs=graphs))
    told = stock_of(nn.Linear(2, 2), torch.device("cpu"))
    assert told.endswith("; torch's own cutedsl kernel for _fused_rms_norm, which TORCH_DISABLE_NATIVE_JIT=1 turns off")


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


def test_prefill_and_decode_get_kernels_of_their_own() -> None:
    """Of one attention: a kernel that is liked for prompts runs there, another one for tokens."""
    model = made()
    lz.optimize(model)
    ids = tokens(1, 9)

    def run() -> None:
        cache = transformers.DynamicCache(config=model.config)
        output(model, ids, past_key_values=cache)
        output(model, ids[:, :1], past_key_values=cache)

    with torch.no_grad():
        found = lz.trace(model, ids)
        operations = {row.operation for row in found.rows if row.function == "attention"}
        cache = transformers.DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        later = lz.trace(model, ids[:, :1], past_key_values=cache)
    run()
    operations |= {row.operation for row in later.rows if row.function == "attention"}
    assert operations == {"attention.gqa.prefill", "attention.gqa.decode"}


def test_self_and_cross_attention_are_chosen_apart() -> None:
    config = transformers.BartConfig(
        vocab_size=101, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BartModel(config).eval()
    given = {"input_ids": tokens(2, 11), "decoder_input_ids": tokens(2, 5), "use_cache": False}
    with torch.no_grad():
        expected = model(**given)[0]
        report = lz.optimize(model)
        assert "attention" in {each.kind for each in report.replaced}, report
        torch.testing.assert_close(model(**given)[0], expected, rtol=1e-4, atol=1e-4)
        found = lz.trace(model, **given)
    shapes = {}
    for row in found.rows:
        if row.function == "attention":
            shapes[row.layer] = dict(row.shapes)
    kinds = {"encoder.layers.0", "decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"}
    assert set(shapes) == kinds
    lengths = {path: (each["query"][-3], each["key"][-3]) for path, each in shapes.items()}
    assert len({str(each) for each in shapes.values()}) == 3, lengths


def test_undo_after_a_state_dict_was_loaded_keeps_what_was_loaded() -> None:
    model, other = made(), made()
    with torch.no_grad():
        for each in other.parameters():
            each.mul_(0.7)
    report = lz.optimize(model, graph=True)
    greedy(model, tokens(), 4)
    model.load_state_dict(other.state_dict())
    report.undo()
    assert torch.equal(output(model, tokens()), output(other, tokens()))
    assert not any("_layerzero" in vars(each) for each in model.modules())
    again = lz.optimize(model)
    assert again.replaced
    torch.testing.assert_close(output(model, tokens()), output(other, tokens()), rtol=1e-4, atol=1e-4)


def test_an_adapter_around_a_layers_product_is_never_passed_over() -> None:
    """As peft wraps products: before, and put in after the model was optimized."""

    class Adapted(nn.Module):
        def __init__(self, inside: nn.Linear) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.base_layer = inside
            self.down = nn.Linear(inside.in_features, 2, bias=False)
            self.up = nn.Linear(2, inside.out_features, bias=False)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.base_layer(rows) + self.up(self.down(rows))
            return result

    def wrap(model: Any) -> Any:
        heads = model.model.layers[0].self_attn
        heads.q_proj = Adapted(heads.q_proj)
        model.model.layers[1].mlp.up_proj = Adapted(model.model.layers[1].mlp.up_proj)
        return model.eval()

    plain = output(made(), tokens())
    expected = output(wrap(made()), tokens())
    assert not torch.allclose(plain, expected, rtol=1e-2)
    before = wrap(made())
    report = lz.optimize(before, graph=True)
    torch.testing.assert_close(output(before, tokens()), expected, rtol=1e-4, atol=1e-4)
    report.undo()
    assert torch.equal(output(before, tokens()), expected)
    later = made()
    report = lz.optimize(later, graph=True)
    tokens_before = greedy(later, tokens(), 6)
    wrap(later)
    torch.testing.assert_close(output(later, tokens()), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(greedy(later, tokens(), 6), greedy(wrap(made()), tokens(), 6))
    assert tokens_before.shape == (2, 15)
    report.undo()
    assert torch.equal(output(later, tokens()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_an_adapter_merges_past_torchs_count_are_packed_anew(dtype: torch.dtype) -> None:
    """As peft merges, and takes back: through .data, which torch does not count as a write."""

    def add(model: Any, factor: float) -> None:
        generator = torch.Generator().manual_seed(3)
        for each in model.modules():
            if isinstance(each, nn.Linear):
                delta = torch.randn(each.weight.shape, generator=generator) * 0.1 * factor
                each.weight.data += delta.to(dtype)

    model, other = made().to(dtype), made().to(dtype)
    report = lz.optimize(model)
    before = output(model, tokens())
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    for factor in (1.0, -1.0):
        add(model, factor)
        add(other, factor)
        expected = output(other, tokens())
        error = (output(model, tokens()) - expected).abs().max() / expected.abs().max()
        assert error < tolerance
        assert factor < 0 or (before - expected).abs().max() / expected.abs().max() > 2 * tolerance
    report.undo()


def test_a_version_of_transformers_that_nobody_tried_is_left_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    expected = output(model, tokens())
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "6.0.1")
    report = lz.optimize(model, graph=True)
    assert any("Transformers 6.0.1 is not one that was tested" in each.why for each in report.left), report
    assert not {each.kind for each in report.replaced} & {"attention", "layer", "step"}
    torch.testing.assert_close(output(model, tokens()), expected, rtol=1e-4, atol=1e-4)
    report.undo()
    assert torch.equal(output(model, tokens()), expected)


def test_a_model_on_the_meta_device_is_left_with_a_reason() -> None:
    with torch.device("meta"):
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=1
        )
        model = transformers.LlamaForCausalLM(config).eval()
    report = lz.optimize(model, graph=True)
    assert any("meta" in each.why for each in report.left), report
    assert not any("_layerzero" in vars(each) for each in model.modules())
    assert not report.is_on


@pytest.mark.usefixtures("unmeasured")
def test_optimized_on_one_prompt_it_serves_whatever_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an unpadded prefill; then left padding, tokens after it, gradients, another dtype: equal to stock."""
    monkeypatch.setattr("layerzero.integrations.optimize.selection.LEAST", -1e9)  # all is kept, however slow
    model, stock = made("Qwen3"), made("Qwen3")
    report = lz.optimize(model, {"input_ids": tokens(1, 9)}, rounds=1, isolate=False)
    assert {"attention", "layer"} <= {each.kind for each in report.replaced}
    assert all(each.error is None or each.error < 1e-4 for each in report.replaced)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, :5], mask[1, :2] = 0, 0
    seen = mask.bool()
    got, expected = (output(each, tokens(3, 12), attention_mask=mask)[seen] for each in (model, stock))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    given = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    assert torch.equal(model.generate(tokens(3, 12), **given), stock.generate(tokens(3, 12), **given))
    for each in (model, stock):
        each(tokens(), labels=tokens()).loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)
    wide = [output(each.double(), tokens()) for each in (model, stock)]
    torch.testing.assert_close(*wide, rtol=1e-6, atol=1e-6)
    half = [output(each.bfloat16(), tokens()).float() for each in (model, stock)]
    truth = wide[1].float()
    off = [(each - truth).square().mean().sqrt() for each in half]  # the farthest logit alone is 0.7 to 1.5 of stock's
    assert off[0] <= 1.5 * off[1]
    report.undo()
    assert torch.equal(output(model, tokens()), output(stock, tokens()))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rounds": 0}, "rounds: wanted"),
        ({"memory_limit": "1GB"}, "memory_limit: wanted"),
        ({"memory_limit": 1.5}, "wanted bytes"),
        ({"budget_s": "10"}, "budget_s: wanted seconds from 0 or None, got '10'"),
        ({"budget_s": float("nan")}, "budget_s: wanted seconds"),
        ({"budget_s": -1.0}, "budget_s: wanted seconds"),
        ({"graph": "no"}, "graph: wanted True or False, got 'no'"),
        ({"isolate": None}, "isolate: wanted True or False"),
    ],
)
def test_numbers_that_mean_nothing_are_refused_before_anything_is_looked_at(given, said):
    with pytest.raises(lz.InvalidCallError, match=said):
        lz.optimize(torch.nn.Linear(4, 4), **given)


def test_memory_of_forms_that_are_yet_to_be_made_is_told_as_such() -> None:
    model = made()
    report = lz.optimize(model)
    assert not report.extra_bytes
    assert "made when a kernel first wants one" in str(report)
    greedy(model, tokens(), 2)
    assert ("made when a kernel first wants one" in str(report)) == (not report.extra_bytes)


def test_long_lists_are_folded_between_their_entries() -> None:
    kernels = ", ".join(f"library.kernel_{number}" for number in range(7))
    report = Optimized([Replaced("layers.0", "Layer", "layer", "lz.linear", kernels, 0.5)], [])
    lines = str(report).splitlines()[:5]
    assert max(map(len, lines)) < 90
    assert lines[1].split()[0] == "layers.0"
    assert lines[1].endswith("5.0e-01")
    assert " ".join(line.split("lz.linear")[-1].removesuffix("5.0e-01").strip() for line in lines[1:]) == kernels


def test_whoever_passes_inputs_that_the_model_does_not_take_is_told_how_it_was_called() -> None:
    with pytest.raises(TypeError, match="positional arguments") as caught:
        lz.optimize(nn.Sequential(nn.Linear(4, 4)).eval(), ["one text", "another", "a third"])
    (note,) = caught.value.__notes__
    assert note.startswith("lz.optimize ran model(*inputs); inputs may be a function")
