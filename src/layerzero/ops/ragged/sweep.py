"""The calls over ragged sequences that are worth measuring where nobody says which; see the sweep of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from layerzero.core.operation import Case
from layerzero.ops.attention.sweep import Heads, extent_of


def ragged_case(heads: Heads, sequences: int, tokens: int, *, causal: bool) -> tuple[str, Case]:
    """An operation's name and a case of it: sequences of unlike lengths."""
    sizes = {"tokens": tokens, "kv_tokens": tokens, "starts": sequences + 1}
    sizes |= {"heads": heads.heads, "kv_heads": heads.kv_heads}
    sizes |= {"head_dim": heads.head_dim, "value_dim": heads.head_dim}
    name = f"{sequences} sequences of {tokens} tokens ({heads}) {'causal' if causal else 'full'}"
    return f"attention.{heads.kind}.prefill.ragged", Case(name, sizes, {"causal": causal})


def sweep_of(operation: str) -> Callable[[str, Mapping[str, Sequence[int]]], Iterator[Case]]:
    """The sweep of one kind of head counts: as many tokens as prefill sweeps have, in few and in many sequences."""

    def sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
        extent = extent_of(device, narrow)
        for heads in extent.heads:
            for sequences in extent.batches:
                for length in extent.lengths_of(sequences, rare=True):
                    if sequences > 1 and sequences * length <= extent.max_tokens:
                        name, case = ragged_case(heads, sequences, sequences * length, causal=heads.causal[0])
                        if name == operation:
                            yield case

    return sweep
