"""lz.cross_entropy and lz.linear_cross_entropy: torch's results, gradients, memory, and what is refused."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero as lz
from drawing import at_once
from layerzero.backends import gradients
from layerzero.backends.torch import loss as kernels

CHUNKED = "torch.linear_cross_entropy_chunked"
WAYS = (
    CHUNKED,
    pytest.param(
        "torch.linear_cross_entropy",
        marks=pytest.mark.skipif(
            not hasattr(functional, "linear_cross_entropy"), reason="torch before 2.13 has no linear cross-entropy"
        ),
    ),
)


def made(rows=(7,), vocab=50, features=16, dtype=torch.float32):
    torch.manual_seed(vocab)
    hidden = torch.randn(*rows, features, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocab, features) / features**0.5).to(dtype).requires_grad_()
    target = torch.randint(0, vocab, rows)
    target.view(-1)[0] = -100
    return hidden, weight, target


def locked(kernel):
    ending = "" if kernel == "reference" else "_rows"
    names = {"loss.linear_cross_entropy": kernel, "loss.linear_cross_entropy.rows": f"{kernel}{ending}"}
    return lz.scope(locks=names)


@at_once("reduction", ["mean", "sum", "none"])
@at_once("smoothing", [0.0, 0.2])
@at_once("weighed", [False, True])
def test_logits_give_what_torch_gives(reduction, smoothing, weighed):
    logits, target = torch.randn(6, 9), torch.tensor([1, 8, -100, 0, 3, 3])
    more = {"weight": torch.rand(9) if weighed else None, "label_smoothing": smoothing, "reduction": reduction}
    got, wanted = lz.cross_entropy(logits, target, **more), functional.cross_entropy(logits, target, **more)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("rows", "classes", "smoothing"), [(20000, 100, 0.0), (4, 20000, 0.1), (17, 1000, 1.0)])
def test_sums_beyond_float16_are_summed_in_float32(rows, classes, smoothing):
    """Over rows on a CPU, over classes anywhere: torch gives inf."""
    torch.manual_seed(0)
    logits, target = torch.randn(rows, classes).mul(3).half(), torch.randint(0, classes, (rows,))
    with lz.scope(locks={"loss.cross_entropy": "torch.cross_entropy"}):
        got = lz.cross_entropy(logits, target, label_smoothing=smoothing)
    torch.testing.assert_close(got, functional.cross_entropy(logits.float(), target, label_smoothing=smoothing).half())


@pytest.mark.parametrize("ignored", [-1, 9])
def test_an_ignored_class_may_be_one_that_no_logit_has(ignored):
    logits, target = torch.randn(6, 9), torch.tensor([1, 8, ignored, 0, 3, ignored])
    wanted = functional.cross_entropy(logits, target, ignore_index=ignored, reduction="none")
    candidates = lz.explain("cross_entropy", logits, target, ignore_index=ignored, reduction="none").candidates
    for kernel in [each.kernel.id for each in candidates if each.legal]:
        with lz.scope(locks={"loss.cross_entropy.rows": kernel}):
            got = lz.cross_entropy(logits, target, ignore_index=ignored, reduction="none")
        torch.testing.assert_close(got, wanted)


def test_the_mean_of_one_ignored_row_is_of_no_row():
    """CUDA gives 0 for logits of one axis, and NaN for those of two (torch 2.11)."""
    with lz.scope(locks={"loss.cross_entropy": "torch.cross_entropy"}):
        assert lz.cross_entropy(torch.randn(9), torch.tensor(-100)).isnan()
        assert lz.cross_entropy(torch.randn(9), torch.tensor(-100), reduction="sum") == 0.0


@pytest.fixture
def few_rows(monkeypatch):
    """Chunks of three rows."""
    monkeypatch.setattr(gradients, "_LOGITS", 150)
    monkeypatch.setattr(gradients, "_ROWS", 1)


@pytest.mark.parametrize("kernel", WAYS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunks_give_the_loss_and_the_gradients_of_all_logits(few_rows, kernel, reduction):
    hidden, weight, target = made(rows=(2, 5))
    bias, classes, behind = torch.randn(50, requires_grad=True), torch.rand(50), torch.rand(2, 5)
    logits = functional.linear(hidden, weight, bias)
    wanted = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), classes, reduction=reduction)
    with locked(kernel):
        got = lz.linear_cross_entropy(hidden, weight, target, bias=bias, class_weight=classes, reduction=reduction)
    assert got.shape == ((2, 5) if reduction == "none" else ())
    torch.testing.assert_close(got.flatten(), wanted.flatten())
    results = [
        torch.autograd.grad((each.view(behind.shape) * behind if reduction == "none" else each * 3.0).sum(), inputs)
        for each in (got, wanted)
        for inputs in ((hidden, weight, bias),)
    ]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("block", [3, 6, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_several_chunks_are_multiplied_together(monkeypatch, block, dtype):
    """As on a GPU: a block of one chunk, of two with a rest, and of all rows."""
    monkeypatch.setattr(kernels, "sizes", lambda rows, weight: gradients.Sizes(3, block))
    hidden, weight, target = made(rows=(10,), dtype=dtype)
    bias = torch.randn(50, dtype=dtype, requires_grad=True)
    run = kernels._load_chunked(lz.facts("linear_cross_entropy", hidden, weight, target))
    got = run(hidden, weight, target, bias=bias, ignore_index=-100, label_smoothing=0.0, z_loss=0.0)
    inputs = hidden, weight, bias
    wide = [each.detach().double().requires_grad_() for each in inputs]
    wanted = functional.cross_entropy(functional.linear(*wide), target)
    pairs = zip((got, *torch.autograd.grad(got, inputs)), (wanted, *torch.autograd.grad(wanted, wide)), strict=True)
    for one, other in pairs:
        assert (one.double() - other).norm() <= {torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype] * other.norm()


def test_rows_of_a_gpu_take_what_the_weights_gradient_takes():
    """A meta tensor is no CPU's; 512 rows of logits and softmax in float32 are 501 MiB, as the weight's gradient is."""
    weight = torch.empty(128256, 2048, dtype=torch.bfloat16, device="meta")
    assert [gradients.sizes(rows, weight) for rows in (100, 4096, 4097)] == [(512, 1024), (512, 4096), (256, 1024)]
    assert gradients.sizes(4096, weight.float()) == (512, 512)
    assert gradients.sizes(4096, torch.empty(128256, 2048)) == (128, 128)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_argument_has_its_part_in_the_gradients(few_rows, reduction):
    hidden, weight, target = made(dtype=torch.float64)
    more = {"label_smoothing": 0.1, "softcap": 2.0, "z_loss": 0.1, "class_weight": torch.rand(50).double()}
    found = []
    for kernel in (CHUNKED, "reference"):
        with locked(kernel):
            loss = lz.linear_cross_entropy(hidden, weight, target, reduction=reduction, **more)
        found.append((loss, *torch.autograd.grad(loss.square().sum(), (hidden, weight))))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kernel", WAYS)
def test_the_mean_of_no_row_is_nan_and_leaves_weights_alone(kernel):
    hidden, weight, target = made()
    with locked(kernel):
        loss = lz.linear_cross_entropy(hidden, weight, target.fill_(-100))
    assert loss.isnan()
    for each in torch.autograd.grad(loss, (hidden, weight)):
        assert not each.any()


@pytest.mark.parametrize("kernel", WAYS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_row_that_counts_nowhere_may_be_nan(kernel, reduction):
    """torch.nn.functional.linear_cross_entropy weighs it by 0 (torch 2.13): the loss of all rows was NaN."""
    hidden, weight, target = made()
    target[2] = -100
    with locked(kernel), torch.no_grad():
        wanted = lz.linear_cross_entropy(hidden, weight, target, reduction=reduction)
        hidden[2] = torch.nan
        torch.testing.assert_close(lz.linear_cross_entropy(hidden, weight, target, reduction=reduction), wanted)
    assert not wanted.isnan().any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_second_backward_pass_gives_the_same_again(few_rows, reduction):
    """As losses that are weighed by the gradients of each alone ask for; it raised."""
    hidden, weight, target = made()
    bias = torch.randn(50, requires_grad=True)
    with locked(CHUNKED):
        loss = lz.linear_cross_entropy(hidden, weight, target, bias=bias, reduction=reduction)
    first = torch.autograd.grad(loss, (hidden, weight, bias), retain_graph=True)
    wanted = [2.0 * each for each in first]
    again = torch.autograd.grad(2.0 * loss, (hidden, weight, bias), retain_graph=True)
    torch.testing.assert_close(list(again), wanted)
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    fresh = lz.linear_cross_entropy(hidden, weight, target)
    fresh.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        fresh.backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_loss_that_is_kept_holds_no_weight_after_its_backward_pass(few_rows, reduction):
    hidden, weight, target = made()
    weight = weight.detach().clone()
    with locked(CHUNKED):
        loss = lz.linear_cross_entropy(hidden, weight, target, reduction=reduction)
    loss.sum().backward()
    place = weight.data_ptr()
    del weight
    assert not [each for each in gc.get_objects() if type(each) is torch.Tensor and each.data_ptr() == place]


def test_a_class_weight_that_is_written_into_between_two_backward_passes_raises(few_rows):
    hidden, weight, target = made()
    of_classes = torch.rand(50)
    with locked(CHUNKED):
        loss = lz.linear_cross_entropy(hidden, weight, target, class_weight=of_classes)
    loss.backward(retain_graph=True)
    of_classes.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_of_gradients_of_a_loss_alone_raise():
    """Nothing behind the loss needs gradients, which torch's own guard takes for a promise."""
    hidden, weight, target = made()
    for reduction in ("mean", "none"):
        with locked(CHUNKED):
            loss = lz.linear_cross_entropy(hidden, weight, target, reduction=reduction).sum()
        with pytest.raises(RuntimeError, match="wanted a backward pass without create_graph"):
            torch.autograd.grad(loss, hidden, create_graph=True)


class Largest(TorchDispatchMode):
    """The most numbers that any result has."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for each in torch.utils._pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.numel())
        return result


@pytest.mark.parametrize("kernel", ["reference", CHUNKED])
def test_no_tensor_holds_all_logits(few_rows, kernel):
    """Twenty rows of 50 classes and 8 features: the weight is the largest, and the reference has all logits."""
    hidden, weight, target = made(rows=(20,), features=8)
    run = kernels._load_chunked(lz.facts("linear_cross_entropy", hidden, weight, target))
    with Largest() as seen:
        if kernel == "reference":
            functional.cross_entropy(functional.linear(hidden, weight), target).backward()
        else:
            run(hidden, weight, target, ignore_index=-100, label_smoothing=0.0, z_loss=0.0).backward()
    assert seen.numbers == (20 * 50 if kernel == "reference" else 8 * 50)


def test_without_gradients_no_gradient_is_computed(few_rows):
    hidden, weight, target = made(rows=(20,))
    with torch.no_grad(), locked(CHUNKED):
        lz.linear_cross_entropy(hidden, weight, target)  # chosen
    run = kernels._load_chunked(lz.facts("linear_cross_entropy", hidden.detach(), weight.detach(), target))
    with Largest() as seen, torch.no_grad():
        loss = run(hidden, weight, target, ignore_index=-100, label_smoothing=0.0, z_loss=0.0)
    assert not loss.requires_grad
    assert seen.numbers <= 3 * 50 + weight.numel()
    assert seen.numbers == weight.numel()  # a view of it


def test_half_precision_gives_a_loss_in_float32_where_asked():
    hidden, weight, target = made(dtype=torch.bfloat16)
    assert lz.linear_cross_entropy(hidden, weight, target).dtype is torch.bfloat16
    loss = lz.linear_cross_entropy(hidden, weight, target, out_dtype=torch.float32)
    wanted = functional.cross_entropy(functional.linear(hidden, weight).float(), target)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, wanted)


REFUSED = [
    ({"target": torch.rand(3, 5)}, "target: wanted classes .int32 or int64., got probabilities; torch.nn.functional"),
    ({"target": torch.tensor([1, 2])}, r"target: wanted shape \(3,\), a class a row, got \(2,\)"),
    ({"reduction": "average"}, "reduction: wanted mean, sum, none, got 'average'"),
    ({"logits": torch.randn(2, 3, 5)}, r"logits: wanted \(rows, classes\): logits.flatten\(0, -2\)"),
    ({"logits": torch.randn(3, 0)}, "logits: wanted a class at least"),
    ({"softcap": 0.0}, "softcap: wanted a finite number above 0 or None, got 0.0"),
    ({"target": torch.tensor([1, 5, -100])}, "target: wanted 0 to 4, or -100 for a row that is ignored, got 5"),
    ({"label_smoothing": 1.5}, "label_smoothing: wanted 0 to 1, got 1.5"),
]


@pytest.mark.parametrize(("changed", "words"), REFUSED)
def test_what_does_not_fit_is_refused(changed, words):
    call = {"logits": torch.randn(3, 5), "target": torch.tensor([1, 2, 0]), **changed}
    with pytest.raises(lz.InvalidCallError, match=words):
        lz.cross_entropy(**call)


def test_compiled_code_has_the_same_loss_and_gradients():
    hidden, weight, target = made()
    compiled = torch.compile(lz.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    pairs = [
        torch.autograd.grad(call(hidden, weight, target), (hidden, weight))
        for call in (compiled, lz.linear_cross_entropy)
    ]
    torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_float16_is_rounded_behind_the_factor_of_a_scaler(reduction):
    """Much of a mean's gradient is below float16's smallest number; a scaler multiplies the loss by 2^16 for that."""
    hidden, weight, target = made(rows=(1024,), vocab=4000, dtype=torch.float16)
    factor = 2.0**16 if reduction == "mean" else 2.0**6
    found = []
    for kernel in (CHUNKED, "reference"):
        with locked(kernel):
            loss = lz.linear_cross_entropy(hidden, weight, target, reduction=reduction, out_dtype=torch.float32)
        found.append(torch.autograd.grad(loss * factor, (hidden, weight)))
    for got, wanted in zip(*found, strict=True):
        assert (got.float() - wanted.float()).norm() <= 1e-3 * wanted.float().norm()


def test_float16_has_a_mean_of_no_row_too():
    hidden, weight, target = made(dtype=torch.float16)
    with locked(CHUNKED):
        loss = lz.linear_cross_entropy(hidden, weight, target.fill_(-100))
    assert loss.isnan()
    for each in torch.autograd.grad(loss, (hidden, weight)):
        assert not each.any()
