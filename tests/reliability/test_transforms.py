"""Transforms and modes: first use inside them works, and what the operator said holds there."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import layerzero as lz
from drawing import at_once
from layerzero.ops import FUNCTIONS
from layerzero.testing import random_call

X, W = torch.randn(8, 64), torch.randn(64)
WIDE = torch.randn(96, 64)

FIRST_USE = """
import sys, torch, warnings
import layerzero as lz

warnings.simplefilter("ignore", DeprecationWarning)  # torch's own jvp
x, w, q = torch.randn(8, 64), torch.randn(64), torch.randn(2, 8, 4, 16)
tables, lens, slots = torch.arange(2).int().view(2, 1), torch.tensor([5, 16]).int(), torch.arange(8)
caches = torch.randn(2, 16, 4, 16), torch.randn(2, 16, 4, 16)

def append(t):
    cache = t.new_zeros(2, 16, 4, 16)
    keys = t.view(8, 4, 16)
    lz.append_paged_kv_(keys, keys, cache, cache * 1, slots)
    return cache

functions = {
    "rms_norm": (lambda t: lz.rms_norm(t, w), x),
    "layer_norm": (lambda t: lz.layer_norm(t, (64,), w), x),
    "add_residual_rms_norm_": (lambda t: lz.add_residual_rms_norm_(t, t * 2, w), x),
    "attention": (lambda t: lz.attention(t, q, q, layout="BSHD"), q),
    "paged_attention": (lambda t: lz.paged_attention(t[:, :1], *caches, tables, lens), q),
    "append_paged_kv_": (append, x),
}
transforms = {
    "vmap": lambda f, t: torch.func.vmap(f)(torch.stack([t, t]))[0],
    "grad": lambda f, t: torch.func.grad(lambda each: f(each).sum())(t),
    "jvp": lambda f, t: torch.func.jvp(f, (t,), (t,))[0],
    "functionalize": lambda f, t: torch.func.functionalize(f)(t),
}
transform = transforms[sys.argv[1]]
for name, (function, tensor) in functions.items():
    result = transform(function, tensor)
    wanted = torch.func.grad(lambda t: function(t).sum())(tensor) if sys.argv[1] == "grad" else function(tensor)
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "functionalize"])
def test_first_use_inside_a_transform_works(transform):
    run = subprocess.run([sys.executable, "-c", FIRST_USE, transform], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.slow
def test_first_use_inside_a_mode_leaves_the_fast_path_to_others():
    script = """
import torch, layerzero as lz
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode(), torch.device("meta"), torch.inference_mode():
    lz.rms_norm(torch.empty(4, 8), torch.empty(8))
from layerzero.engine import accelerator
print(accelerator.ABSENT)
"""
    plain = "from layerzero.engine import accelerator; print(accelerator.ABSENT)"
    runs = [subprocess.run([sys.executable, "-c", each], capture_output=True, check=True) for each in (script, plain)]
    assert runs[0].stdout == runs[1].stdout


INSIDE = {
    "vmap": lambda f: torch.func.vmap(f)(X.expand(2, 8, 64)),
    "grad": lambda f: torch.func.grad(lambda t: f(t).sum())(X),
    "jvp": lambda f: torch.func.jvp(f, (X,), (X,)),
    "functionalize": lambda f: torch.func.functionalize(f)(X),
    "trace": lambda f: torch.jit.trace(f, (X,)),
}
WORDS = {
    "lock": {"locks": {"norm.rms": "torch.rms_norm"}},
    "deny": {"deny": ["reference"]},
    "rule": {"rules": [{"match": {"rows": ">4"}, "deny": "reference.*"}]},
    "no fallback": {"fallback_enabled": False},
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # from torch's own jvp
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
@pytest.mark.parametrize("word", WORDS.values(), ids=WORDS)
def test_the_operators_word_holds_inside(inside, word):
    with lz.scope(**word), pytest.raises(lz.NoKernelFoundError, match="inside a transform"):
        inside(lambda t: lz.rms_norm(t, W))
    with lz.scope(locks={"norm.rms": "reference"}), lz.scope(deny=["torch"]):
        inside(lambda t: lz.rms_norm(t, W))
    with lz.scope(locks={"norm.rms": {"kernel": "torch.rms_norm", "otherwise": "select"}}):
        inside(lambda t: lz.rms_norm(t, W))


def test_the_operators_word_holds_where_an_operator_cannot_have_a_gradient():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    call = X.clone().requires_grad_(), X.clone(), W
    with Mode():
        lz.add_residual_rms_norm_(*call)
        with lz.scope(locks={"norm.add_rms": "torch.add_rms_norm"}), pytest.raises(lz.NoKernelFoundError):
            lz.add_residual_rms_norm_(*call)


def test_what_torch_cannot_write_inside_a_transform_is_said():
    residual = X.clone()
    with pytest.raises(lz.InvalidCallError, match="residual: wanted tensors that torch can write into"):
        torch.func.vmap(lambda t: lz.add_residual_rms_norm_(t, residual, W))(torch.stack([X, X]))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    "function",
    [
        lambda t: lz.rms_norm(t, W),
        lambda t: lz.linear(t, WIDE),
        lambda t: lz.attention(t[None, None], t[None, None], t[None, None], layout="BHSD"),
        lambda t: lz.scaled_dot_product_attention(t[None, None], t[None, None], t[None, None], is_causal=True),
    ],
    ids=["rms_norm", "linear", "attention", "scaled_dot_product_attention"],
)
def test_a_trace_holds_for_other_sizes_and_leaves_nothing_behind(function):
    """There sizes are tensors, of which no key, no fact and no note of a failure may be made."""
    traced, other = torch.jit.trace(function, (X,)), torch.randn(5, 64)
    torch.testing.assert_close(traced(other), function(other))
    assert "failed" not in str(lz.explain(lz.rms_norm, X, W))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_how_far_tables_are_read_follows_lengths_that_nobody_may_read():
    """On a CPU columns beyond the longest sequence are left out: a trace would leave them out of longer ones, too."""
    (keys, values), query = torch.randn(2, 8, 4, 2, 16), torch.randn(2, 1, 2, 16)
    table, lens = (torch.tensor(each, dtype=torch.int32) for each in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[2, 3], [13, 15]]))

    def attention(lens):
        return lz.paged_attention(query, keys, values, table, lens)

    expected = torch.stack([attention(each) for each in lens])
    torch.testing.assert_close(torch.func.vmap(attention)(lens), expected)
    torch.testing.assert_close(torch.jit.trace(attention, (lens[0],))(lens[1]), expected[1])


def test_numbers_that_vmap_hides_from_a_check_are_named():
    tokens, starts = torch.randn(2, 8, 4, 16), torch.tensor([0, 3, 8]).int()
    attention = torch.func.vmap(lambda t, cu: lz.ragged_attention(t, t, t, cu, cu), in_dims=(0, None))
    assert attention(tokens, starts).shape == tokens.shape
    with pytest.raises(
        lz.InvalidCallError, match=r"cu_seqlens_q or cu_seqlens_k: wanted .* \(in_dims=None for these\)"
    ):
        torch.func.vmap(lz.ragged_attention)(tokens, tokens, tokens, *2 * [starts.expand(2, 3)])
    none = tokens[:0]
    with pytest.raises(lz.InvalidCallError, match="cu_seqlens_q or cu_seqlens_k: wanted"):
        torch.func.vmap(lz.ragged_attention)(none, none, none, *2 * [starts.expand(0, 3)])


def test_only_numbers_that_a_check_reads_are_named_among_those_that_vmap_hides():
    """Tables and lengths may differ from call to call, which a call of sequences of one length shows."""
    (keys, values), query = torch.randn(2, 8, 4, 2, 16), torch.randn(2, 5, 2, 16)
    numbers = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]).int(), torch.tensor([9, 13]).int(), torch.tensor([0, 2, 5])
    batched = [torch.stack([each, each]) for each in numbers]

    def attention(query, table, lens, starts):
        return lz.paged_attention(query, keys, values, table, lens, cu_seqlens_q=starts.int(), layout="NHD")

    shared = torch.func.vmap(attention, (0, 0, 0, None))
    assert shared(query, *batched[:2], numbers[2]).shape == query.shape
    with pytest.raises(lz.InvalidCallError, match="paged_attention: cu_seqlens_q: wanted numbers that every call"):
        torch.func.vmap(attention)(query, *batched)


@at_once("name", sorted(name for name, function in FUNCTIONS.items() if function.mutates))
def test_what_was_made_in_inference_mode_is_not_written_into_outside_of_it(name):
    """The caller's mistake, told before a kernel fails at it: a failure would let that kernel rest for all calls."""
    calls = (random_call(5, number, function=name) for number in range(20))
    call = next(each for each in calls if all(each.arguments[one].numel() for one in FUNCTIONS[name].mutates))
    with torch.inference_mode():
        made = {each: call.arguments[each].clone() for each in FUNCTIONS[name].mutates}
    with pytest.raises(lz.InvalidCallError, match="got one made in inference mode"):
        getattr(lz, name)(**call.arguments | made)


@at_once("name", sorted(name for name, each in FUNCTIONS.items() if each.mutates and "quantized" not in name))
def test_negated_views_are_written_in_modes_as_everywhere(name):
    """Of several of them torch's own fallback makes errors, and of one that nothing is returned for."""
    arguments = random_call(5, 1, function=name, dtype=torch.float32).arguments
    found = []
    for view, mode in ((lambda x: x, contextlib.nullcontext()), (torch._neg_view, FlopCounterMode(display=False))):
        call = {key: each.clone() if isinstance(each, torch.Tensor) else each for key, each in arguments.items()}
        call |= {key: view(view(call[key]).clone()) for key in FUNCTIONS[name].mutates}
        with mode:
            getattr(lz, name)(**call)
        found.append([call[key].resolve_neg() for key in FUNCTIONS[name].mutates])
    torch.testing.assert_close(*found)
    with FakeTensorMode() as mode:
        getattr(lz, name)(**pytree.tree_map_only(torch.Tensor, mode.from_tensor, call))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own jvp
def test_the_tangent_of_a_cast_has_the_new_dtype():
    _, tangent = torch.func.jvp(lambda x: lz.cast(x, torch.float64), (X,), (torch.ones_like(X),))
    assert tangent.dtype is torch.float64
