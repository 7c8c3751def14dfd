"""What decides how a padded batch is computed: groups of rows, their costs, and what a stack takes."""

from __future__ import annotations

import pytest
import torch
from padded_models import PADDED, batch, counted, made, state_of

import layerzero as lz

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")

from layerzero.integrations.optimize.models.padding import Costs, cheapest  # noqa: E402
from layerzero.integrations.optimize.times import timing  # noqa: E402

pytestmark = pytest.mark.usefixtures("whatever_it_takes")


def test_groups_take_the_least() -> None:
    groups, seconds = cheapest([3, 17, 1, 9, 9], call_s=4.0, token_s=1.0)
    assert sorted(row for group in groups for row in group) == [0, 1, 2, 3, 4]
    assert sorted(map(sorted, groups)) == [[0, 2], [1], [3, 4]]
    assert seconds == 4 * 3 + 17 + 18 + 6
    many = torch.randint(1, 200, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    groups, seconds = cheapest(many, call_s=50.0, token_s=1.0)
    assert sorted(row for group in groups for row in group) == list(range(300))
    assert seconds == sum(50.0 + len(group) * max(many[row] for row in group) for group in groups)
    assert seconds < 50.0 + 300 * max(many)


@pytest.mark.parametrize(
    ("costs", "times"), [((1.0, 0.0, 1.0), 0), ((1.0, 1.0, 100.0), 0), ((1000.0, 1.0, 0.0), 0), ((0.0, 1.0, 1.0), 1)]
)
def test_the_costs_decide(costs: tuple[float, float, float], times: int) -> None:
    """Tokens that take no time, sequences that take more than their padding, a call beside which padding is little."""
    model = made("bert")
    lz.optimize(model)
    call_s, token_s, sequence_s = costs
    state_of(model).costs = Costs(call_s, token_s, sequence_s, 0.0, torch.get_num_threads())
    with counted(times):
        model(**PADDED)
    with counted(0):
        model(**batch(17, 17, 17, 16))


def test_a_packed_row_is_attended_by_sequences() -> None:
    """Transformers' own names tell sequences apart, as its flash attention reads them."""
    from layerzero.integrations.transformers import attention_forward

    class Module(torch.nn.Module):
        is_causal = False

    query, key, value = torch.randn(3, 1, 4, 11, 8)
    starts = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
    told = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 6, "max_length_k": 6}
    for is_causal in (False, True):
        got, _ = attention_forward(Module(), query, key, value, None, is_causal=is_causal, **told)
        for first, last in ((0, 4), (4, 5), (5, 11)):
            rows = (each[:, :, first:last] for each in (query, key, value))
            wanted = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=is_causal)
            torch.testing.assert_close(got[:, first:last], wanted.transpose(1, 2))
    for refused in ({"dropout": 0.1}, {"deterministic": True}):
        with pytest.raises(lz.InvalidCallError, match="position_ids"):
            attention_forward(Module(), query, key, value, None, **told, **refused)


def test_what_a_stack_takes_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    timing.forget()
    model = made("bert")
    lz.optimize(model)
    costs = state_of(model).costs
    assert costs.threads == torch.get_num_threads()
    assert min(costs.call_s, costs.token_s, costs.sequence_s, costs.check_s) >= 0
    other = made("bert")
    lz.optimize(other)
    assert state_of(other).costs is costs
