"""diffusers on small random models: UNets, SD3, Flux, Wan, an autoencoder, by the backend's name and by processors."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as processors know it
from diffusers_models import MODELS, autoencoder, flux, randn, sd3, unet, unet_xl, wan

import layerzero as lz
from drawing import mostly
from layerzero.engine.dispatch import ENGINE

diffusers = pytest.importorskip("diffusers", "0.36", reason="needs diffusers >= 0.36")

from layerzero.integrations import diffusers as integration  # noqa: E402  # it imports nothing of diffusers itself
from layerzero.integrations.optimize.attention import diffusers as attention  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> Iterator[None]:
    """diffusers keeps the backend that was set last for the whole process."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    before = Registry._active_backend
    torch.manual_seed(0)
    yield
    Registry._active_backend = before


@contextmanager
def attentions() -> Iterator[list[tuple[str, Any]]]:
    calls: list[tuple[str, Any]] = []

    def watch(function: Any, plan: Any) -> None:
        if function.name == "attention":
            calls.append((plan.kernel_id, plan))

    ENGINE.watch(watch)
    try:
        yield calls
    finally:
        ENGINE.unwatch(watch)


def run(model: Any, call: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**call)[0]


@pytest.mark.parametrize("make", [pytest.param(each, marks=[pytest.mark.slow] * (each is unet_xl)) for each in MODELS])
def test_every_attention_is_served_and_equal_and_given_back(make: Any) -> None:
    model, call = make()
    model.eval()
    wanted = run(model, call)
    before = [each.processor for each in model.modules() if hasattr(each, "processor")]
    names = list(model.state_dict())
    served = lz.register_with_diffusers(model)
    assert (len(served.served), served.left) == (MODELS[make], {})
    with attentions() as calls:
        torch.testing.assert_close(run(model, call), wanted, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(run(copy.deepcopy(model), call), wanted, atol=2e-6, rtol=1e-5)
    assert len(calls) == 2 * MODELS[make]
    assert list(model.state_dict()) == names
    again = lz.register_with_diffusers(model)
    assert set(again.left.values()) == {"it is LayerZero's already"}
    served.undo()
    with attentions() as calls:
        assert torch.equal(run(model, call), wanted)
    assert not calls
    after = [each.processor for each in model.modules() if hasattr(each, "processor")]
    assert all(one is other for one, other in zip(after, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_and_dtypes_are_those_of_torch(dtype: torch.dtype) -> None:
    model, call = flux()
    model.to(dtype)
    call = {name: each.to(dtype) for name, each in call.items()}
    call["hidden_states"].requires_grad_()
    results = []
    for served in (False, True):
        if served:
            lz.register_with_diffusers(model)
        output = model(**call)[0]
        (gradient,) = torch.autograd.grad(output.float().square().mean(), call["hidden_states"])
        results.append((output.detach(), gradient))
    for got, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-2 if dtype is torch.bfloat16 else 1e-6, rtol=1e-2)


warns_in_dynamo = pytest.mark.skipif(
    diffusers.__version__.startswith("0.36."), reason="Dynamo warns of a cached function of diffusers 0.36"
)


@pytest.mark.parametrize(
    "make", [pytest.param(unet, marks=pytest.mark.slow), pytest.param(flux, marks=warns_in_dynamo)]
)
def test_compiles_without_a_graph_break(make: Any) -> None:
    model, call = make()
    model.eval()
    wanted = run(model, call)
    lz.register_with_diffusers(model)
    try:
        got = run(torch.compile(model, fullgraph=True, backend="eager"), call)
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("make", mostly([flux, sd3, wan], [flux]))
def test_what_is_exported_has_the_operators_of_stock(make: Any) -> None:
    model, call = make()
    model.eval()

    def operators() -> list[str]:
        program = torch.export.export(model, (), call)
        return [str(each.target) for each in program.graph.nodes if each.op == "call_function"]

    wanted = operators()
    report = lz.optimize(model)
    assert "attention" in {each.kind for each in report.replaced}
    assert operators() == wanted


def test_the_name_serves_the_dispatcher_by_method_and_by_context() -> None:
    assert lz.register_with_diffusers().served == {}
    model, call = flux()
    model.eval()
    wanted = run(model, call)
    with diffusers.attention_backend("layerzero"), attentions() as calls:
        torch.testing.assert_close(run(model, call), wanted)
    assert len(calls) == 3
    model.set_attention_backend("layerzero")
    with attentions() as calls:
        run(model, call)
    assert len(calls) == 3
    model.reset_attention_backend()
    with diffusers.attention_backend("native"), attentions() as calls:
        run(model, call)
    assert not calls


def test_processors_still_say_their_class_and_are_saved_as_stock() -> None:
    """diffusers asks all processors for their class before it puts others in their place."""
    model, call = unet()
    model.eval()
    wanted = run(model, call)
    lz.register_with_diffusers(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with attentions() as calls:
        assert torch.equal(run(loaded, call), wanted)
    assert not calls
    model.set_default_attn_processor()
    kinds = {type(each.processor).__name__ for each in model.modules() if hasattr(each, "processor")}
    assert kinds == {"AttnProcessor"}


@pytest.mark.slow
def test_a_backend_is_loaded_where_nobody_knows_it(tmp_path: Any) -> None:
    model, _ = flux()
    served = lz.register_with_diffusers(model)
    assert served.served
    torch.save(model, tmp_path / "model.pt")
    assert copy.deepcopy(model).transformer_blocks[0].attn.processor._attention_backend == "layerzero"
    code = (
        "import sys, torch; sys.modules['layerzero'] = None; model = torch.load(sys.argv[1], weights_only=False); "
        "assert model.transformer_blocks[0].attn.processor._attention_backend is None"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model.pt")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_model_without_values_is_left_with_a_reason() -> None:
    model, _ = flux()
    report = lz.optimize(model.eval().to("meta"))
    assert not report.replaced
    assert any("meta device" in each.why for each in report.left if each.why.startswith("attention"))


def test_a_model_in_a_dtype_that_nothing_computes_in_is_left_with_a_reason() -> None:
    """As layerwise casting keeps weights, which casts them back in hooks of its own."""
    model, call = flux()
    model.eval()
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    wanted = run(model, call)
    report = lz.optimize(model)
    assert "attention" not in {each.kind for each in report.replaced}
    assert any("could not be compared" in each.why for each in report.left)
    torch.testing.assert_close(run(model, call), wanted, rtol=1e-3, atol=1e-3)


def test_what_somebody_chose_meanwhile_is_not_taken_back() -> None:
    from diffusers.models.attention_processor import AttnProcessor

    model, _ = unet()
    served = lz.register_with_diffusers(model)
    chosen = AttnProcessor()
    model.set_attn_processor(chosen)
    served.undo()
    assert {id(each.processor) for each in model.modules() if hasattr(each, "processor")} == {id(chosen)}


@pytest.mark.parametrize("make", [unet, autoencoder, flux])
def test_processors_that_a_model_puts_back_later_are_stock_after_undo(make: Any) -> None:
    """It keeps those that it had while its projections were fused."""
    model = make()[0].eval()
    before = attentions_in(model)
    report = lz.register_with_diffusers(model)
    model.fuse_qkv_projections()
    report.undo()
    model.unfuse_qkv_projections()
    assert not any(isinstance(each, integration.Served) for each, _ in attentions_in(model))
    assert [backend for _, backend in attentions_in(model)] == [backend for _, backend in before]


def attentions_in(model: Any) -> list[Any]:
    found = [each.processor for each in model.modules() if hasattr(each, "processor")]
    return [(each, getattr(each, "_attention_backend", None)) for each in found]


def test_what_cannot_be_served_is_left_with_a_reason() -> None:
    from diffusers.models.attention_processor import AttnProcessor

    model, call = unet()
    model.set_attn_processor(AttnProcessor())
    wanted = run(model, call)
    served = lz.register_with_diffusers(model)
    assert set(served.left.values()) == {"AttnProcessor computes its scores itself"}
    assert str(served) == "left 8: AttnProcessor computes its scores itself"
    assert torch.equal(run(model, call), wanted)
    model, _ = flux()
    model.set_attention_backend("_native_math")
    assert set(lz.register_with_diffusers(model).left.values()) == {"the backend '_native_math' was chosen for it"}
    video = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False]
    )
    reasons = set(lz.register_with_diffusers(video).left.values())
    assert reasons == {"WanAttentionBlock calls torch's function itself and has no processor"}


@pytest.mark.parametrize(("name", "why"), [("native", []), ("flex", ["the backend 'flex' was chosen for it"] * 3)])
def test_a_backend_that_is_a_bare_name_is_read(name: str, why: list[str]) -> None:
    """As classes of diffusers have it (LTX-2's decoder, AnyFlow FAR: ``_attention_backend = "flex"``)."""
    model, _ = flux()
    for each in model.attn_processors.values():
        each._attention_backend = name
    served = lz.register_with_diffusers(model)
    assert list(served.left.values()) == why
    served.undo()
    assert {each._attention_backend for each in model.attn_processors.values()} == {name}


def test_one_processor_of_several_modules_is_served_and_given_back() -> None:
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    model, _ = flux()
    chosen = FluxAttnProcessor()
    model.set_attn_processor(chosen)
    served = lz.register_with_diffusers(model)
    assert (len(served.served), served.left) == (3, {})
    served.undo()
    assert chosen._attention_backend is None


def test_what_is_set_on_a_processor_of_ones_own_holds_before_and_after_undo() -> None:
    class Scaled(diffusers.models.attention_processor.AttnProcessor2_0):  # type: ignore[misc]
        scale, calls = 1.0, 0

        def __call__(self, attn: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            self.calls += 1
            rows = hidden_states[:, None]
            return F.scaled_dot_product_attention(rows, rows, rows)[:, 0] * self.scale

    model, call = unet()
    model.eval()
    chosen = Scaled()
    model.set_attn_processor(chosen)
    served = lz.register_with_diffusers(model)
    assert (len(served.served), chosen.calls) == (8, 0)
    chosen.scale = 0.5  # as a caller does that keeps it
    halved = run(model, call)
    assert chosen.calls == 8
    next(iter(model.attn_processors.values())).scale = 0.0  # as diffusers' set_ip_adapter_scale does
    off = run(model, call)
    served.undo()
    torch.testing.assert_close(run(model, call), off, atol=2e-6, rtol=1e-5)
    chosen.scale = 0.5
    torch.testing.assert_close(run(model, call), halved, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("mask", "causal"), [("none", False), ("none", True), ("keys", False), ("bool", False), ("float", False)]
)
def test_the_backend_computes_what_the_native_one_does_on_views(mask: str, causal: bool) -> None:
    """Also with other numbers of queries and keys, grouped heads, a scale and autocast."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    if mask == "keys" and diffusers.__version__.startswith("0.36."):
        pytest.skip("diffusers 0.36 gives masks of two axes to torch as they are, which raises")
    backend = integration.backend_of_diffusers()
    seen = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    given = {"none": None, "keys": seen, "bool": seen[:, None, None], "float": torch.randn(2, 4, 5, 6)}[mask]
    for heads, scale, cast in ((4, None, False), (2, 0.3, False), (4, None, True)):
        joint = torch.randn(2, 5, 3, 4, 8)[:, :, 0]  # a view of queries, keys and values in one tensor
        key, value = torch.randn(2, 6, heads, 8), torch.randn(2, 6, heads, 8)
        named = {"attn_mask": given, "is_causal": causal, "scale": scale, "enable_gqa": heads != 4}
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            wanted = dispatch_attention_fn(joint, key, value, **named)
            got = dispatch_attention_fn(joint, key, value, **named, backend=backend)
        assert got.dtype is wanted.dtype
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_mode_that_hears_torchs_functions_hears_attention(gradients: bool) -> None:
    """As diffusers skips scores for guidance by a perturbed model (``LayerSkipConfig(skip_attention_scores=True)``)."""
    from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode

    query, key, value = torch.randn(3, 1, 5, 2, 8)
    with torch.set_grad_enabled(gradients), AttentionScoreSkipFunctionMode():
        assert torch.equal(integration.attend(query, key, value), value)


def test_no_copy_is_made_of_views() -> None:
    """Shapes of Flux: queries, keys and values are BSHD, each a part of a larger tensor."""
    backend_inputs = torch.randn(1, 40, 3, 4, 16)
    query, key, value = backend_inputs.unbind(2)
    with attentions() as calls:
        output = integration.attend(query, key, value)
    assert output.shape == query.shape
    assert len(calls) == 1
    adaptations = [
        each.text for each in lz.explain("attention", query, key, value, False, layout="BSHD").chosen.adaptations
    ]
    assert all("copy" not in text and "contiguous" not in text for text in adaptations), adaptations


def test_what_the_backend_cannot_honour_is_an_error() -> None:
    query = torch.randn(1, 4, 2, 8)
    with pytest.raises(
        lz.InvalidCallError, match="return_lse: wanted no logarithms of sums, only the output; got True"
    ):
        integration.attend(query, query, query, return_lse=True)
    with pytest.raises(lz.InvalidCallError, match="_parallel_config: wanted no context parallelism"):
        integration.attend(query, query, query, _parallel_config=object())


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "version", lambda name: "0.99.0")
    with pytest.raises(ImportError, match=r"wanted diffusers .*0.36.*, got 0.99.0; pip install"):
        lz.register_with_diffusers()
    with pytest.raises(TypeError, match="wanted a model or a pipeline with models, got int"):
        integration.module_of(3)


# lz.optimize


def test_a_version_that_nobody_tried_is_left_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "version", lambda name: "0.99.0")
    model, call = flux()
    model.eval()
    wanted = run(model, call)
    report = lz.optimize(model)
    assert "attention" not in {each.kind for each in report.replaced}
    assert any("got 0.99.0" in each.why for each in report.left)
    torch.testing.assert_close(run(model, call), wanted, rtol=1e-3, atol=1e-3)


def test_what_fails_late_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from layerzero.integrations.optimize import entrance

    def fail(*_: object, **__: object) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(entrance, "time_random_rows", fail)  # everything is on by then
    model, call = flux()
    model.eval()
    wanted = run(model, call)
    with pytest.raises(RuntimeError, match="planted"):
        lz.optimize(model)
    assert not any("_layerzero" in vars(each) for each in model.modules())
    with attentions() as calls:
        assert torch.equal(run(model, call), wanted)
    assert not calls


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize("make", [sd3, *(pytest.param(each, marks=pytest.mark.slow) for each in (wan, autoencoder))])
def test_optimize_takes_attention_norms_and_products_and_tells_the_rest(make: Any) -> None:
    model, call = make()
    model.eval()
    wanted = run(model, call)
    report = lz.optimize(model)
    assert {each.kind for each in report.replaced} >= {"attention", "linear"}
    (attention,) = (each for each in report.replaced if each.kind == "attention")
    assert attention.error is not None
    assert attention.error < 1e-5
    if make is sd3:
        assert sum(each.calls == "lz.rms_norm" for each in report.replaced) >= 8
        assert any("8 layer norms without a weight" in each.why for each in report.left)
    if make is wan:
        assert [each.calls for each in report.replaced if each.kind == "rotation"] == ["lz.rope_"]
    with attentions() as calls:
        torch.testing.assert_close(run(model, call), wanted, atol=2e-5, rtol=1e-4)
    assert len(calls) == MODELS[make]
    report.undo()
    assert torch.equal(run(model, call), wanted)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.slow
def test_a_wrong_attention_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = autoencoder()
    model.eval()
    wanted = run(model, call)
    monkeypatch.setattr(
        integration.lz, "scaled_dot_product_attention", lambda query, key, value, *_, **__: value * 0 + 1
    )
    for inputs in (None, call):
        report = lz.optimize(model, inputs, rounds=1, isolate=False)
        assert all(each.kind != "attention" for each in report.replaced)
        assert any(each.why.startswith("attention: it was off by") for each in report.left)
        torch.testing.assert_close(run(model, call), wanted, atol=2e-5, rtol=1e-4)
        report.undo()


def test_a_pipeline_that_takes_no_generator_gets_none() -> None:
    """As FluxPriorReduxPipeline (0.42); one that hands on whatever it gets does get one."""

    class Plain(diffusers.DiffusionPipeline):  # type: ignore[misc]
        def __init__(self, vae: Any) -> None:
            super().__init__()
            self.register_modules(vae=vae)

        def __call__(self, image: torch.Tensor) -> Any:
            return self.vae(image)[0]

    model, call = autoencoder()
    pipe = Plain(model.eval())
    assert torch.equal(attention.whole(pipe)(call["sample"]), pipe(call["sample"]))

    class Handing(Plain):
        def __call__(self, *given: Any, **named: Any) -> Any:
            return named.get("generator")

    assert isinstance(attention.whole(Handing(model))(call["sample"]), torch.Generator)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.slow
def test_optimize_takes_the_models_of_a_pipeline() -> None:
    model, _ = flux()
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4,), norm_num_groups=1, latent_channels=1, shift_factor=0.0, use_post_quant_conv=False
    )
    parts = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.FluxPipeline(scheduler=scheduler, vae=vae.eval(), transformer=model.eval(), **parts)
    pipe.set_progress_bar_config(disable=True)
    call = {"prompt_embeds": randn(1, 5, 32), "pooled_prompt_embeds": randn(1, 32), "output_type": "pt"}
    call |= {"height": 16, "width": 16, "num_inference_steps": 2, "guidance_scale": 0.0}
    call["generator"] = torch.Generator().manual_seed(3)
    noise = call["generator"].clone_state()
    wanted = pipe(**call | {"generator": noise.clone_state()}).images
    report = lz.optimize(pipe)
    assert {each.path for each in report.replaced if each.kind == "attention"} == {"transformer", "vae"}
    report.undo()
    report = lz.optimize(pipe, call, rounds=1, isolate=False)
    assert report.error is not None
    assert report.error < 1e-4
    assert torch.equal(call["generator"].get_state(), noise.get_state())
    got = pipe(**call | {"generator": noise.clone_state()}).images
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-3)
    report.undo()
    assert torch.equal(pipe(**call | {"generator": noise.clone_state()}).images, wanted)


def test_a_call_that_was_exchanged_since_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of processors is served anew where other code gave it another call."""
    model, _ = unet()
    lz.register_with_diffusers(model).undo()
    (kind,) = {type(each.processor) for each in model.modules() if hasattr(each, "processor")}
    own: Any = kind.__call__
    code = own.__code__.replace(co_consts=(*own.__code__.co_consts, 0))
    other = types.FunctionType(code, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    monkeypatch.setattr(kind, "__call__", other)
    lz.register_with_diffusers(model)
    (served,) = {type(each.processor) for each in model.modules() if hasattr(each, "processor")}
    assert served.__call__.__code__ is code
