"""Conformance finds planted kernels that draw wrongly, ignore an argument, or compute in dtypes that no list names."""

from __future__ import annotations

import invented
import pytest
import torch
from invented import invented_operations  # noqa: F401  # a fixture

import layerzero as lz
from layerzero.core.judge import reproducible
from layerzero.core.kernel import Backend, Kernel
from layerzero.engine.registry import REGISTRY
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.norm.declare import layer_norm
from layerzero.ops.paged.declare import paged_attention_reference
from layerzero.testing import compare, conformance, fuzz, randomness
from layerzero.testing.battery import Battery
from layerzero.testing.report import KernelReport, Result
from layerzero.testing.sizes import cuts, fits

pytestmark = pytest.mark.usefixtures("invented_operations")


def checked(kernel_id, operation, names=("",), calls=10):
    """What the checks whose names begin like this found, by name."""
    kernel = next(each for each in lz.list_kernels(operation) if each.id == kernel_id)
    battery = Battery(kernel, next(each for each in lz.list_operations() if each.name == operation), "cpu", 0, calls)
    found = {}
    for check in battery.checks():
        if check.name.startswith(names):
            outcome = check.play(lambda _: None)
            if outcome is not None:
                found[check.name] = outcome
    return found


def planted(operation, **declared):
    return lz.register_kernel(operation, "planted.it", supported_dtypes=["float32"], **declared)


# draws


def drawing(change):
    """A kernel that draws with these weights."""

    def kernel(weights, *, sharpness=None, seed=None):
        return change(weights, sharpness, seed)

    return kernel


def reference(weights, sharpness, seed):
    return invented.draw_reference(weights, sharpness=sharpness, seed=seed)


def astray(weights, sharpness, seed):
    place = reference(weights, sharpness, seed)
    generator = None if seed is None else torch.Generator().manual_seed(seed + 1)
    return place.masked_fill(torch.rand(place.shape, generator=generator) < 0.02, 0)


def one_draw_for_all(weights, sharpness, seed):
    at = reference(weights[:1], sharpness, seed)
    return at.expand(len(weights)).contiguous() if len(at) else reference(weights, sharpness, seed)


SEED = "property seed decides what is random, float32"
SAMPLERS = [
    ("astray", astray, "distribution, float32", "drawn with other probabilities: chi-square"),
    ("one draw for all rows", one_draw_for_all, "distribution, float32", "drawn with other probabilities"),
    ("no sharpness", lambda w, _, seed: reference(w, None, seed), "argument sharpness, float32", "other probabilities"),
    ("no seed", lambda w, s, _: reference(w, s, None), SEED, "two runs with the same seed"),
    ("one seed", lambda w, s, _: reference(w, s, 7), SEED, "it is ignored"),
    ("outside", lambda w, s, seed: reference(w, s, seed) + 16, "case small, float32", "from 0 to 15, got "),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "check", "text"), [each[1:] for each in SAMPLERS], ids=[each[0] for each in SAMPLERS]
)
def test_each_mistake_of_a_sampler_is_found(change, check, text):
    planted("invented.draw")(drawing(change))
    found = checked("planted.it", "invented.draw", (check,))
    assert found[check].status == "wrong"
    assert text in found[check].message


def test_a_right_sampler_passes_everything_and_leaves_the_callers_random_state():
    planted("invented.draw", deterministic=True)(drawing(reference))
    before = torch.get_rng_state()
    kept = checked("planted.it", "invented.draw", ("distribution", "property"))
    assert torch.equal(torch.get_rng_state(), before)
    found = kept | checked("planted.it", "invented.draw")
    names = {name for name in found if name.endswith(", float32")}
    assert {"distribution, float32", "argument seed, float32", "same bits, float32"} <= names
    assert not {"NaN, float32", "infinity, float32"} & names, "no reference says what comes of them"
    untried = {"rows = 0, float32", "a class of sizes, float32"}
    assert {name for name in names if found[name].status != "passed"} == untried


def test_a_sampler_that_takes_few_rows_at_once_is_asked_more_often():
    planted("invented.draw", limits=[lz.limits.dim("rows", max=512)])(drawing(reference))
    found = checked("planted.it", "invented.draw", ("distribution",))
    assert found["distribution, float32"].status == "passed"
    planted_few = lz.register_kernel("invented.draw", "planted.few", limits=[lz.limits.dim("rows", max=8)])
    planted_few(drawing(reference))
    found = checked("planted.few", "invented.draw", ("distribution, float32",))
    assert found["distribution, float32"].status == "not tried"
    assert "100000 draws would take" in found["distribution, float32"].message


def test_a_drawn_result_is_fuzzed_by_what_may_come(monkeypatch):
    monkeypatch.setattr("layerzero.testing.fuzz.random_call", drawn_call)
    planted("invented.draw")(drawing(reference))
    assert fuzz.run(5, seed=0, kernels=["planted.it"]).ok
    lz.unregister_kernel("planted.it")
    planted("invented.draw")(drawing(lambda weights, sharpness, seed: torch.zeros(len(weights), dtype=torch.int64)))
    assert fuzz.run(5, seed=0, kernels=["planted.it"]).ok, "place 0 may come: only many draws show that it always does"
    lz.unregister_kernel("planted.it")
    planted("invented.draw")(drawing(lambda weights, sharpness, seed: torch.full((len(weights),), 99)))
    assert not fuzz.run(5, seed=0, kernels=["planted.it"]).ok


def drawn_call(seed, number, *, function=None, data=0, device="cpu"):
    from layerzero.testing.generate import case_call

    return case_call(invented.DRAW, invented.CASES[number % 2], torch.float32, device=device)


# other dtypes


def test_an_int8_kernel_that_returns_zeros_is_wrong():
    @lz.register_kernel("invented.product", "planted.it")
    def zeros(left, right):
        return torch.zeros(len(left), len(right))

    found = checked("planted.it", "invented.product")
    assert found["case small, int8"].status == "wrong"
    assert found["random calls, int8"].status == "wrong"
    assert not [name for name in found if "float" in name]
    right = checked("reference.invented.product", "invented.product")
    assert right.pop("a class of sizes, int8").status == "not tried", "a plan of a reference serves its very call"
    assert {each.status for each in right.values()} == {"passed"}


@pytest.mark.slow
def test_an_operation_that_no_check_can_be_made_of_is_told_and_is_not_clean():
    @lz.register_kernel("invented.unsaid", "planted.it")
    def it(x):
        return x.clone()

    report = conformance.run(["planted.it"], device="cpu")
    assert not report.ok
    assert not report.kernel("planted.it").ok
    told = "not tried: invented.unsaid, every check: invented.unsaid names no dtype that a call may have"
    assert told in str(report)
    assert str(report.kernel("planted.it")).count("names no dtype") == 1  # the last lines name every problem again


def test_places_that_were_refused_here_are_clean():
    refused = Result("some.kernel", "norm.rms", "cases, float16", "refused", "because")
    assert KernelReport("some.kernel", "some", ("norm.rms",), results=[refused]).ok


# ignored arguments

ARGUMENTS = ["causal", "scale", "attn_mask", "window", "softcap", "sinks", "alibi_slopes", "kv_lens", "return_lse"]


@pytest.mark.parametrize("ignored", ARGUMENTS)
def test_an_attention_that_ignores_an_argument_is_wrong(ignored):
    neutral = {"causal": False, "return_lse": False}

    def kernel(query, key, value, **arguments):
        arguments[ignored] = neutral.get(ignored)
        return attention_reference(query, key, value, **arguments)

    accepting(kernel, "attention.standard.prefill", [*ARGUMENTS, "dropout_p"])
    name = f"argument {ignored}, float32"
    assert checked("planted.it", "attention.standard.prefill", (name,))[name].status == "wrong"


def test_an_attention_that_ignores_nothing_is_right():
    accepting(attention_reference, "attention.standard.prefill", [*ARGUMENTS, "dropout_p"])
    found = checked("planted.it", "attention.standard.prefill", ("argument ",))
    assert {name.split(", ")[0]: outcome.status for name, outcome in found.items()} == {
        f"argument {name}": "passed" for name in [*ARGUMENTS, "dropout_p"]
    }
    assert found["argument dropout_p, float32"].message == "see property dropout keeps the mean"


def accepting(kernel, operation, names, **declared):
    """Register a kernel that takes these arguments in whatever way, with no signature to read them from."""
    layouts = next(each for each in lz.list_operations() if each.name == operation).layouts
    made = Kernel(
        id="planted.it",
        operations=(operation,),
        backend=Backend("planted", "for the test", origin="decorator"),
        load=lambda facts: kernel,
        accepts=tuple(names),
        limits=(lz.limits.dtype("float32"),),
        layout=layouts[0] if layouts else None,
        **declared,
    )
    REGISTRY.register_kernels([made])


@pytest.mark.slow
def test_a_kernel_that_ignores_dropout_fails_conformance():
    @lz.register_kernel("attention.standard.prefill", "planted.it", layout="BSHD", supported_dtypes=["float32"])
    def no_dropout(query, key, value, *, causal=False, scale=None, dropout_p=0.0):
        return attention_reference(query, key, value, causal=causal, scale=scale)

    report = conformance.run(["planted.it"], device="cpu", calls=4)
    assert not report.ok
    (problem,) = report.problems
    assert problem.check == "property dropout keeps the mean, float32"
    assert "with dropout_p=0.5 the results are those without it: it is ignored" in problem.message


def one_mask(arguments):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return attention_reference(**arguments)


DROPOUTS = [
    ("right", attention_reference, {}, ""),
    ("not scaled", attention_reference, {"factor": 0.5}, "is not the result without it: on the whole it is 0.5"),
    ("5 % too large", attention_reference, {"factor": 1.05}, "on the whole it is 1.05 times that"),
    ("a quarter", attention_reference, {"rate": 0.25}, "results spread 0.33"),
    ("the same in each run", lambda **arguments: one_mask(arguments), {}, "runs 1 and 2 dropped the same weights"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("compute", "change", "text"), [each[1:] for each in DROPOUTS], ids=[each[0] for each in DROPOUTS]
)
def test_dropout_has_a_mean_a_spread_and_other_weights_in_each_run(compute, change, text):
    outcome = dropout_of("attention.standard.prefill", compute, change)
    assert outcome.status == ("wrong" if text else "passed")
    assert text in outcome.message


def dropout_of(operation, compute, change):
    """What the property of dropout says of a kernel that computes with another rate, or times a factor."""

    def kernel(query, key, value, *, dropout_p=0.0, **arguments):
        rate = min(change.get("rate", 1.0), dropout_p)
        output = compute(query=query, key=key, value=value, dropout_p=rate, **arguments)
        return output * (change.get("factor", 1.0) if dropout_p else 1.0)

    names = ("scale", "dropout_p") if operation.endswith("decode") else ("causal", "scale", "dropout_p")
    accepting(kernel, operation, names)
    return checked("planted.it", operation, ("property ",))["property dropout keeps the mean, float32"]


@pytest.mark.parametrize(("change", "status"), [({}, "passed"), ({"factor": 0.5}, "wrong")])
def test_dropout_of_a_single_query_has_them_as_well(change, status):
    assert dropout_of("attention.gqa.decode", attention_reference, change).status == status


NORMS = [("eps", "argument eps, float32"), ("weight", "argument weight, float32"), ("bias", "argument bias, float32")]


@pytest.mark.parametrize(("ignored", "check"), NORMS)
def test_a_norm_that_ignores_an_argument_is_wrong(ignored, check):
    def kernel(input, weight=None, bias=None, *, normalized_shape, eps):
        given = {"weight": weight, "bias": bias, "eps": eps, ignored: 1e-5 if ignored == "eps" else None}
        return layer_norm(input, normalized_shape=normalized_shape, **given)

    accepting(kernel, "norm.layer", ("weight", "bias", "normalized_shape", "eps"))
    found = checked("planted.it", "norm.layer", ("argument ",))
    assert found[check].status == "wrong"
    assert "argument normalized_shape, float32" not in found, "every call brings it"


def test_promises_are_kept_by_running_with_them():
    def kernel(query, key_cache, value_cache, block_tables, context_lens, *, step=None, max_context_len=None):
        assert step is None or step.max_context_len is None or max_context_len is None or step.max_context_len <= 2**20
        return paged_attention_reference(query, key_cache, value_cache, block_tables, context_lens)

    accepting(kernel, "attention.gqa.decode.paged", ("step", "max_context_len"))
    found = checked("planted.it", "attention.gqa.decode.paged", ("argument ",))
    assert {name: each.status for name, each in found.items()} == {
        "argument step, float32": "passed",
        "argument max_context_len, float32": "passed",
    }


def test_an_argument_that_no_call_gives_is_told():
    found = checked("reference.invented.choose", "invented.choose", ("argument ",))
    assert found["argument count, float32"].status == "passed"
    outcome = found["argument skip, float32"]
    told = "skip: no call gives it a value of its own: it has no example, and no random call has it"
    assert (outcome.status, outcome.message) == ("not tried", told)
    result = Result("reference.invented.choose", "invented.choose", "argument skip, float32", "not tried", told)
    report = KernelReport("reference.invented.choose", "reference", ("invented.choose",), results=[result])
    assert f"not tried: {told} (1 checks)" in str(report)
    assert report.ok


# gradients and sizes


def test_fuzz_asks_for_gradients_of_every_floating_tensor():
    names = set()
    for number in range(600):  # each function has its turn among many, and attention brings a mask now and then
        run = fuzz._Run(fuzz.FuzzReport(0), None, "cpu", compare.expected, fuzz._Source(()), number=number, grad=True)
        call = run._call(0)
        given = {name: each for name, each in call.arguments.items() if isinstance(each, torch.Tensor)}
        asked = {name for name, each in given.items() if each.requires_grad}
        if asked:
            assert asked == {name for name, each in given.items() if each.is_floating_point() and not each.is_neg()}
        names |= asked
    assert {"query", "input", "weight", "bias", "attn_mask"} <= names


def test_gradients_are_asked_beside_every_parameter_but_no_optional_tensor(monkeypatch):
    drawn = []

    def gradients_of(kernel, operation, calls, most):
        drawn.extend(calls)

    monkeypatch.setattr("layerzero.testing.quick_checks.gradients_of", gradients_of)
    accepting(attention_reference, "attention.standard.prefill", ("causal", "scale", "softcap"), grad=True)
    checked("planted.it", "attention.standard.prefill", ("gradients of random calls",))
    names = {name for call in drawn for name in call.arguments}
    assert {"causal", "scale", "window", "softcap", "return_lse", "layout"} <= names
    assert not {"attn_mask", "sinks", "alibi_slopes", "kv_lens", "dropout_p"} & names


def test_gradients_are_asked_where_an_argument_names_a_dtype():
    found = checked("torch.linear_then", "mlp.linear", ("gradients of random calls, bfloat16",))
    assert found["gradients of random calls, bfloat16"].status == "passed"


def test_gradients_of_numbers_that_are_only_moved_are_compared():
    def moves(input):
        output = input.transpose(1, 2).contiguous()
        return output + (output - output.detach()) / 2

    planted("tensor.transpose_head_token", grad=True)(moves)
    found = checked("planted.it", "tensor.transpose_head_token", ("gradients, float32", "small, float32"))
    assert found.pop("gradients, float32").status == "wrong"
    assert {each.status for each in found.values()} <= {"passed"}


@pytest.mark.parametrize(
    "name", ["attention.gqa.decode.paged", "attention.standard.prefill", "norm.rms", "kv.append.paged"]
)
def test_what_is_too_large_is_cut_by_what_its_axes_mean(name):
    operation = next(each for each in lz.list_operations() if each.name == name)
    largest = max(operation.cases, key=lambda case: sum(case.sizes.values()))
    scaling = {each.name for each in operation.schema.axes if each.scales}
    sizes = {axis: size * 64 if axis in scaling and size > 1 else size for axis, size in largest.sizes.items()}
    if "pages" in sizes and "batch" in sizes:
        sizes["pages"] = sizes["batch"] * sizes["max_blocks"]
    case = lz.Case("large", sizes, largest.params)
    assert not fits(operation, case, "cpu")
    found = list(cuts(operation, case, "cpu"))
    assert found
    for text, smaller in found:
        assert fits(operation, smaller, "cpu")
        assert text.startswith(", cut to ")
        if "kv_heads" in sizes and "heads" in sizes:
            assert smaller.sizes["heads"] * sizes["kv_heads"] == smaller.sizes["kv_heads"] * sizes["heads"]


def test_a_property_speaks_of_a_class_if_it_chooses_nothing():
    attention = next(each for each in lz.list_operations() if each.name == "attention.standard.prefill")
    (dropout,) = attention.properties
    assert not randomness.of_a_class(dropout, attention, {"dropout_p": 0.0})
    assert randomness.of_a_class(dropout, attention, {"dropout_p": 0.5})
    assert randomness.of_a_class(reproducible("seed", 1, 2), invented.DRAW, {})
