"""The group of a collective where calls are compiled, pass through modes, or are made again from a recipe."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import layerzero as lz
from layerzero.core.recipe import CallRecipe
from layerzero.engine.registry import REGISTRY
from layerzero.ops.recipes import arguments_of_recipe

ALONE = lz.Ranks.alone()


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_group_decides_in_compiled_code_and_in_modes_as_well(name):
    """Operators of tensors have no word for a group: without one the default group would be asked."""
    x, function = torch.arange(4.0), getattr(lz, name)
    with FlopCounterMode(display=False):
        assert torch.equal(function(x, group=ALONE), x)
    compiled = torch.compile(lambda x: function(x, group=ALONE) + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x + 1)


def test_a_written_call_of_the_default_group_is_made_again_where_there_is_none():
    """``layerzero doctor``, ``ready`` and ``tune`` ended in its refusal on a machine where ranks had called one."""
    recipe = CallRecipe.of(lz.facts("all_reduce", torch.ones(3), group=ALONE))
    recipe = msgspec.structs.replace(recipe, params=recipe.params | {"group": "none"})
    function, arguments = arguments_of_recipe(recipe, REGISTRY.operation("comm.all_reduce"))
    assert lz.facts(function.name, **arguments)["rank_count"] == 1
