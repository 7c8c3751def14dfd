"""The names that other libraries have for arguments lead to ours of the same meaning, and never to another one."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.core.errors import ELSEWHERE, NEEDLESS
from layerzero.ops import FUNCTIONS

X = torch.randn(2, 8)
QUERY = torch.randn(1, 4, 2, 8)


@pytest.mark.parametrize(("call", "passed", "hint"), [
    (lambda **more: lz.attention(QUERY, QUERY, QUERY, **more), {"softmax_scale": 0.1}, "did you mean 'scale'?"),
    (lambda **more: lz.attention(QUERY, QUERY, QUERY, **more), {"scaling": 0.1}, "did you mean 'scale'?"),
    (lambda **more: lz.attention(QUERY, QUERY, QUERY, **more), {"is_causal": True}, "did you mean 'causal'?"),
    (lambda **more: lz.attention(QUERY, QUERY, QUERY, **more), {"window_size": (1, 0)}, "did you mean 'window'?"),
    (lambda **more: lz.attention(QUERY, QUERY, QUERY, **more), {"attn_bias": None}, "did you mean 'attn_mask'?"),
    (lambda **more: lz.attention(QUERY, QUERY, QUERY, **more), {"enable_gqa": True}, "; leave it out: key and value"),
    (lambda **more: lz.attention(QUERY, QUERY, QUERY, **more), {"softmax": 1}, "; it has query, key, value"),
    (lambda **more: lz.rms_norm(X, torch.ones(8), **more), {"variance_epsilon": 1e-6}, "did you mean 'eps'?"),
    (lambda **more: lz.rms_norm(X, torch.ones(8), **more), {"weigth": 1e-6}, "did you mean 'weight'?"),
    (lambda **more: lz.gelu(X, **more), {"enable_gqa": True}, "; it has input, approximate"),
])  # fmt: skip
def test_a_foreign_name_is_answered_by_ours_and_a_near_one_of_another_meaning_by_none(call, passed, hint):
    with pytest.raises(TypeError) as refused:
        call(**passed)
    assert hint in str(refused.value)


def test_what_is_answered_is_an_argument_and_what_is_asked_is_none_beside_it():
    parameters = [{each.name for each in function.parameters} for function in FUNCTIONS.values()]
    for foreign, ours in ELSEWHERE.items():
        for name in ours:
            having = [names for names in parameters if name in names]
            assert having, f"{foreign}: no function has {name}"
            assert not any(foreign in names and name in names for names in parameters), foreign
    assert {beside for beside, _ in NEEDLESS.values()} <= set().union(*parameters)
