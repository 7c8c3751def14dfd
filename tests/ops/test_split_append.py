"""lz.split_qkv_norm_rope_append_: what it computes and writes, what it refuses before it writes, gradients, hits."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from drawing import at_once, examples
from layerzero.ops import FUNCTIONS
from layerzero.ops.rope.declare import cos_sin
from layerzero.testing import fuzz

CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH = 4, 2, 64


def made(kind, *, layout="NHD", normed=True, dtype=torch.float32, seq=3, **more):
    torch.manual_seed(seq)
    features = (HEADS + 2 * KV_HEADS) * WIDTH
    lead = (2, seq) if kind == "contiguous" else (seq,)
    caches = [torch.randn(2, 16, KV_HEADS, WIDTH, dtype=dtype) for _ in range(2)]
    caches = caches if layout == "NHD" else [each.transpose(1, 2).contiguous() for each in caches]
    cos, sin = cos_sin(40, WIDTH // 2, CPU)
    arguments = {"qkv": torch.randn(*lead, features, dtype=dtype), "cos": cos, "sin": sin}
    arguments |= {"key_cache": caches[0], "value_cache": caches[1], "layout": layout}
    if kind == "contiguous":
        arguments["positions"] = torch.stack([torch.randperm(16)[:seq] for _ in range(2)])
    else:
        arguments |= {"positions": torch.randint(0, 40, (seq,)), "slot_mapping": torch.randperm(32)[:seq]}
    if normed:
        arguments |= {name: torch.randn(WIDTH, dtype=dtype) for name in ("q_weight", "k_weight")}
    return arguments | more


def apart(arguments):
    """The same by two functions, on copies of the caches: queries, keys, values."""
    arguments = {
        name: each.clone() if name.endswith("cache") else each for name, each in arguments.items() if each is not None
    }
    caches = {name: arguments.pop(name) for name in ("key_cache", "value_cache")}
    layout, slots = arguments.pop("layout"), arguments.pop("slot_mapping", None)
    query, key, value = lz.split_qkv_norm_rope(arguments.pop("qkv"), HEADS, KV_HEADS, **arguments)
    if slots is None:
        lz.append_kv_(key, value, **caches, positions=arguments["positions"], layout=layout)
    else:
        lz.append_paged_kv_(key, value, **caches, slot_mapping=slots, layout=layout)
    return query, *caches.values()


@at_once("kernel", ["torch", "vllm", "reference"])
@at_once("layout", ["NHD", "HND"])
@at_once("kind", ["contiguous", "paged"])
@at_once("given", [{}, {"normed": False}, {"interleaved": True}, {"plus_one": True}])
def test_it_is_a_split_and_an_append(kind, layout, given, kernel):
    arguments = made(kind, layout=layout, **given)
    query, keys, values = apart(arguments)
    with lz.prefer(kernel):
        got = lz.split_qkv_norm_rope_append_(**arguments)
    for one, other in ((got, query), (arguments["key_cache"], keys)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert torch.equal(arguments["value_cache"], values)


def test_a_slot_of_none_is_written_nowhere(path):
    arguments = made("paged")
    arguments["slot_mapping"][:] = -1
    before = arguments["key_cache"].clone()
    assert lz.split_qkv_norm_rope_append_(**arguments).shape == (3, HEADS, WIDTH)
    assert torch.equal(arguments["key_cache"], before)


WRONG = {
    "qkv: wanted a multiple of the cache's head_dim 64, of more than 2 * 2 heads in the last axis, got 511": (
        lambda given: given | {"qkv": given["qkv"][..., :511]}
    ),
    "of more than 2 * 2 heads in the last axis, got 256": lambda given: given | {"qkv": given["qkv"][..., :256]},
    "wanted both q_weight and k_weight or none of them, got q_weight alone": lambda given: given | {"k_weight": None},
    "eps: wanted a finite number of at least 0, got -1": lambda given: given | {"eps": -1.0},
    "layout: wanted NHD or HND, got 'BSHD'": lambda given: given | {"layout": "BSHD"},
    "cos: wanted a width of half of 2 to 64": lambda given: given | dict.fromkeys(("cos", "sin"), torch.zeros(40, 33)),
    "value_cache: wanted elements of its own": lambda given: given | {"value_cache": given["key_cache"]},
    "slot_mapping[1]: wanted -1 to 31, got 32": lambda given: given | {"slot_mapping": torch.tensor([0, 32, 1])},
    "slot_mapping: wanted each place once, got 7 at 0 and 2": (
        lambda given: given | {"slot_mapping": torch.tensor([7, 1, 7])}
    ),
    "positions: wanted each place once, got 5 at 0 and 2": (
        lambda _: made("contiguous", positions=torch.tensor([5, 0, 5]))
    ),
    "positions[0]: wanted 0 to 39, got 40": lambda given: given | {"positions": torch.tensor([40, 0, 0])},
    "qkv: wanted (tokens, features), got 3D": lambda given: given | {"qkv": given["qkv"].unsqueeze(0)},
    "q_weight: wanted": lambda given: given | {"q_weight": torch.ones(32)},
}


@at_once("problem", WRONG)
def test_what_means_nothing_is_refused_before_anything_is_written(problem):
    arguments = WRONG[problem](made("paged"))
    before = arguments["key_cache"].clone()
    with pytest.raises(lz.InvalidCallError) as raised:
        lz.split_qkv_norm_rope_append_(**arguments)
    assert problem in str(raised.value)
    assert torch.equal(arguments["key_cache"], before)


def test_a_cache_that_holds_the_product_is_refused():
    memory = torch.randn(2 * 16 * KV_HEADS * WIDTH)
    arguments = made("paged", key_cache=memory.view(2, 16, KV_HEADS, WIDTH))
    arguments["qkv"] = memory[: 3 * 8 * WIDTH].view(3, 8 * WIDTH)
    with pytest.raises(
        lz.InvalidCallError, match="key_cache: wanted memory of its own, got memory that it shares with"
    ):
        lz.split_qkv_norm_rope_append_(**arguments)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_gradients_go_through_the_cache_too(kind):
    arguments = made(kind, dtype=torch.float64)
    weights = [arguments["q_weight"], arguments["k_weight"]]
    leaves = [each.requires_grad_() for each in (arguments["qkv"], *weights)]
    caches = [arguments[name].clone() for name in ("key_cache", "value_cache")]
    given = arguments | {"key_cache": caches[0], "value_cache": caches[1]}
    query = lz.split_qkv_norm_rope_append_(**given)
    ours = torch.autograd.grad(query.sum() + caches[0].square().sum() + caches[1].square().sum(), leaves)
    table = [arguments[name] for name in ("cos", "sin", "positions")]
    norms = {"q_weight": weights[0], "k_weight": weights[1]}
    query, key, value = lz.split_qkv_norm_rope(arguments["qkv"], HEADS, KV_HEADS, *table, **norms)
    theirs = torch.autograd.grad(query.sum() + key.square().sum() + value.square().sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_random_calls(monkeypatch):
    names = {"split_qkv_norm_rope_append_": FUNCTIONS["split_qkv_norm_rope_append_"]}
    monkeypatch.setattr("layerzero.testing.generate.FUNCTIONS_BY_NAME", names)
    report = fuzz.run(examples(40), 9)
    assert report.ok, str(report)
