"""What the public functions promise by their names: what writes ends in ``_``, and former names say today's."""

from __future__ import annotations

import pytest

import layerzero as lz
from layerzero.ops import FORMER_NAMES, FUNCTIONS


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_function_ends_in_an_underscore_if_it_writes_into_an_argument(name):
    writes = FUNCTIONS[name].mutates
    assert name.endswith("_") == bool(writes), f"{name} writes into {writes or 'nothing'}"


@pytest.mark.parametrize("old", sorted(FORMER_NAMES))
def test_a_former_name_is_the_function_of_today_with_a_warning(old):
    assert old not in lz.__all__
    for _ in range(2):  # the name is not kept: it warns each time
        with pytest.warns(DeprecationWarning, match=f"lz.{old} is now lz.{FORMER_NAMES[old]}; version 0.2 removes"):
            assert getattr(lz, old) is getattr(lz, FORMER_NAMES[old])


def test_questions_and_locks_know_former_names():
    with pytest.warns(DeprecationWarning, match=r"lz.append_kv is now lz.append_kv_"):
        assert lz.list_kernels("append_kv") == lz.list_kernels("append_kv_")
    with (
        pytest.raises(lz.PolicyError, match=r"'append_kv'; it is 'append_kv_' now"),
        lz.scope(locks={"append_kv": "torch.kv_append"}),
    ):
        pass
