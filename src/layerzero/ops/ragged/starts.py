"""Where sequences begin that lie one after the other: ``[0, 3, 3, 8]`` are three of 3, 0 and 5 tokens.

The last number is the end of the last sequence. On a CPU every call looks at the values; on a GPU debug mode does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from layerzero.core.errors import public, refuse
from layerzero.core.handle import CAPTURABLE, FOREIGN, STALE, Handle
from layerzero.core.values import Check, problems_on_host
from layerzero.ops.declaration import number_problems

_MAX_TOLD = 8


def shape_problems(name: str, starts: object, others: int | None = None, tokens: int = 0) -> list[str]:
    """What is wrong with starts as a tensor; ``others`` is how many of them belong together."""
    problems = number_problems(name, starts, 1, "(sequences + 1,)")
    if problems or not isinstance(starts, Tensor):
        return problems
    if len(starts) == 0:
        return [f"{name}: wanted a 0 and the end of each sequence, got no numbers"]
    if others is not None and len(starts) != others:
        return [f"{name}: wanted {others} numbers, the end of each of {others - 1} sequences and 0, got {len(starts)}"]
    if len(starts) == 1 and tokens:
        return [f"{name}: wanted the end of a sequence for {tokens} tokens, got none"]
    return []


def value_problems(name: str, starts: Tensor, tokens: int, longest: int | None = None) -> list[str]:
    """What is wrong with the numbers of starts on the host."""
    if _are_right(starts, len(starts), tokens) and (longest is None or longest_of(starts, tokens, None) <= longest):
        return []
    return problems_on_host(checks(name, starts, tokens, longest))


def _are_right(starts: Tensor, count: int, tokens: int) -> bool:
    """Whether nothing is wrong with them, in 2 us (9 numbers, EPYC, 2026-11-26)."""
    values = starts.tolist() if starts.ndim == 1 else []
    return len(values) == count and values[0] == 0 and values[-1] == tokens and sorted(values) == values


def checks(name: str, starts: Tensor, tokens: int, longest: int | None = None, *, of: str = "tokens") -> list[Check]:
    """The numbers begin at 0, never decrease, end with the tokens; nothing is read on the host.

    ``of`` names what they divide.
    """
    numbers, last = starts.long(), len(starts) - 1
    left, right = numbers[:-1], numbers[1:]

    def begins(_: tuple[int, ...], got: tuple[int, ...]) -> str:
        return f"{name}[0]: wanted 0, got {got[0]}"

    def falls(place: tuple[int, ...], got: tuple[int, ...]) -> str:
        return f"{name}[{place[0] + 1}]: wanted at least {got[0]}, the number before it, got {got[1]}"

    def ends(_: tuple[int, ...], got: tuple[int, ...]) -> str:
        return f"{name}[{last}]: wanted {tokens}, the number of {of}, got {got[0]}"

    def is_long(_: tuple[int, ...], got: tuple[int, ...]) -> str:
        return f"{name}: wanted sequences of at most {longest} tokens as was promised, got one of {got[0]}"

    found = [
        Check(numbers[0] != 0, numbers[:1], begins),
        Check(right < left, torch.stack((left, right), 1), falls),
        Check(numbers[last] != tokens, numbers[last:], ends),
    ]
    if longest is not None and last:
        most = (right - left).amax(0, keepdim=True)
        found.append(Check(most[0] > min(max(longest, -1), 2**63 - 1), most, is_long))  # an int64 is compared with it
    return found


def guard(*pairs: tuple[str, str], rows: str = "") -> Callable[[str, str | None], Callable[..., None]]:
    """What looks at every call: as many starts as belong together, and on a CPU their values.

    Args:
        pairs: names of the starts, each with the tensor whose tokens they divide.
        rows: a tensor with a row for each sequence; without one the starts agree with each other.
    """

    def made(function: str, _: str | None) -> Callable[..., None]:
        def look(**tensors: Tensor) -> None:
            count = len(tensors[rows]) + 1 if rows else len(tensors[pairs[0][0]])
            for name, of in pairs:
                starts = tensors[name]
                if starts.is_cpu and _are_right(starts, count, len(tensors[of])):
                    continue
                problems = shape_problems(name, starts, count, len(tensors[of]))
                if not problems and starts.is_cpu:
                    problems = value_problems(name, starts, len(tensors[of]))
                refuse(function, problems)

        return look

    return made


def spread(tokens: int, sequences: int, most: int | None = None) -> Tensor:
    """Starts of sequences that share tokens: lengths differ by a quarter around the mean, one in the middle is short.

    A CPU tensor, the same for the same numbers. Where ``most`` tokens were promised of each, none has more as long as
    all of them together have room for the tokens.
    """
    weights = [4 + place * 3 % 5 for place in range(sequences)]
    if sequences > 2:
        weights[sequences // 2] = 0
    total = max(sum(weights), 1)
    ends = [0, *(tokens * sum(weights[: place + 1]) // total for place in range(sequences))]
    lengths = [right - left for left, right in pairwise(ends)]
    if most is not None and tokens <= sequences * most:
        lengths = [min(each, most) for each in lengths]
        for place, length in enumerate(lengths):
            lengths[place] += min(most - length, tokens - sum(lengths))
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def longest_of(starts: Tensor, tokens: int, promised: int | None) -> int:
    """An upper bound of the lengths: the exact one on a CPU, the promised one, or that of a single sequence."""
    if starts.is_cpu:
        return int((starts[1:] - starts[:-1]).max()) if len(starts) > 1 else 0
    return tokens if promised is None else min(promised, tokens)


def to_the_right(tensor: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Sequences as rows of equal length, each at the right end of its row; zeros stand before it.

    Shapes: tensor (T, ...), starts (B + 1,) → (B, longest, ...). Nothing is read on the host.
    """
    rows = starts[1:].long().unsqueeze(1) + torch.arange(-longest, 0, device=starts.device)
    return _rows(tensor, rows, rows < starts[:-1].unsqueeze(1))


def to_the_left(tensor: Tensor, starts: Tensor, longest: int) -> Tensor:
    """The same, each at the left end of its row; zeros stand behind it."""
    rows = starts[:-1].long().unsqueeze(1) + torch.arange(longest, device=starts.device)
    return _rows(tensor, rows, rows >= starts[1:].unsqueeze(1))


def _rows(tensor: Tensor, rows: Tensor, outside: Tensor) -> Tensor:
    if tensor.shape[0] == 0 and rows.numel():
        return tensor.new_zeros((*rows.shape, *tensor.shape[1:]))
    padded = tensor[rows.clamp(0, max(tensor.shape[0] - 1, 0))]
    return padded.masked_fill(outside.view(*outside.shape, *(1,) * (tensor.ndim - 1)), 0)


def one_after_the_other(padded: Tensor, starts: Tensor, tokens: int) -> Tensor:
    """Rows whose sequences stand at the right end, without what stands before them.

    Shapes: padded (B, longest, ...), starts (B + 1,) → (tokens, ...)
    """
    if padded.shape[0] == 0 or padded.shape[1] == 0:
        none = padded.flatten(0, 1)[:0]  # of the input still, as gradients want it
        return none if tokens == 0 else padded.new_zeros((tokens, *padded.shape[2:]))
    places = torch.arange(tokens, device=starts.device, dtype=torch.int32)
    owner = sequences_of(starts, places)
    row = (places - starts[1:][owner] + padded.shape[1]).clamp(0, padded.shape[1] - 1).long()
    return padded[owner, row]


def sequences_of(starts: Tensor, places: Tensor) -> Tensor:
    """The sequence that each place lies in; behind the end the last: only where others begin is looked for.

    Shapes: starts (B + 1,), places (N,) of the same dtype → (N,) int64, from 0 to B - 1
    """
    return torch.searchsorted(starts[1:-1].contiguous(), places, right=True)


def lengths_of(starts: Tensor) -> Tensor:
    """Lengths of the sequences, as int32 on the same device."""
    return starts[1:] - starts[:-1]


def bounds_of(arguments: Mapping[str, Any], promised: Mapping[str, Any], **names: str) -> dict[str, int]:
    """What bounds the sequences of each of the starts: the longest, read on the host, or what was promised; at least 1.

    ``names`` are those of the starts, by the parameter that bounds them.
    """
    found = {}
    for bound, name in names.items():
        starts: Tensor = arguments[name]
        longest = int(lengths_of(starts).max()) if len(starts) > 1 else 0
        found[bound] = max(longest, promised.get(bound) or 1)
    return found


class RaggedMetadata(Handle):
    """Where the sequences of one forward pass begin, and one slot for each kernel that plans on it.

    Some kernels read the starts on the host before they launch (FlashInfer's ``plan``). With this object they do so
    once for all layers; without it, in every call.

        step = lz.RaggedMetadata(cu_seqlens, cu_seqlens)
        for layer in layers:
            hidden = lz.ragged_attention(q, k, v, cu_seqlens, cu_seqlens, step=step)

    Args:
        cu_seqlens_q: (B + 1,) int32, where each sequence's queries begin, and the end of the last.
        cu_seqlens_k: the same of its keys.
        host: the same numbers of both as CPU tensors, where the caller has them: nothing waits for the device then.
        capturable: keep every buffer where it is, so that a captured CUDA graph can be replayed after ``advance``.
    Raises: InvalidCallError for tensors that are no starts.
    """

    @public("RaggedMetadata")
    def __init__(
        self,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *,
        host: tuple[Tensor, Tensor] | None = None,
        capturable: bool = False,
    ) -> None:
        problems = shape_problems("cu_seqlens_q", cu_seqlens_q)
        others = None if problems else len(cu_seqlens_q)
        problems += shape_problems("cu_seqlens_k", cu_seqlens_k, others)
        problems += host_problems(host, (cu_seqlens_q, cu_seqlens_k)) if not problems else []
        refuse("RaggedMetadata", problems)
        super().__init__((cu_seqlens_q, cu_seqlens_k), CAPTURABLE if capturable else "eager")
        self._given = host

    def __repr__(self) -> str:
        return f"RaggedMetadata({self.kind}, {len(self._tensors[0]) - 1} sequences)"

    @property
    def cu_seqlens_q(self) -> Tensor:
        """Where queries begin; change it in place, then advance."""
        return self._tensors[0]

    @property
    def cu_seqlens_k(self) -> Tensor:
        """Where keys begin; change it in place, then advance."""
        return self._tensors[1]

    @cached_property
    def host(self) -> tuple[Tensor, Tensor]:
        """Both on the CPU: what was given, or one copy a step, which waits for the device."""
        return self._given or (self.cu_seqlens_q.cpu(), self.cu_seqlens_k.cpu())

    def longest(self) -> tuple[int, int]:
        """The longest sequence of queries, and of keys, at least 1."""
        most = [max((right - left for left, right in pairwise(each.tolist())), default=0) for each in self.host]
        return max(most[0], 1), max(most[1], 1)

    def belongs(self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> bool:
        """Whether it was made of these tensors."""
        return self.kind_for(cu_seqlens_q, cu_seqlens_k) not in (FOREIGN, STALE)

    def advance(self, host: tuple[Tensor, Tensor] | None = None) -> None:
        """Tell that the numbers changed; every slot reads them again, outside of any capture."""
        refuse("RaggedMetadata.advance", host_problems(host, self._tensors))
        self._given = host
        self.refresh()


def host_problems(host: object, of: tuple[Tensor, ...]) -> list[str]:
    """What is wrong with a caller's numbers on the host, compared with those on the device."""
    if host is None:
        return []
    if isinstance(host, tuple) and len(host) == len(of):
        for each, like in zip(host, of, strict=True):  # plain lines: this runs at every step
            if not isinstance(each, Tensor) or not each.is_cpu:
                break
            if each.dtype is not torch.int32 or each.shape != like.shape:
                break
        else:
            return _other_numbers(host, of)
    wanted = ", ".join(str(tuple(each.shape)) for each in of)
    return [f"host: wanted int32 tensors on the CPU of shapes {wanted}, got {host!r}"]


def _other_numbers(host: tuple[Tensor, ...], of: tuple[Tensor, ...]) -> list[str]:
    """Where numbers on the host differ from their counterparts; what lies on a device is not read."""
    return [
        f"host[{place}]: wanted the numbers that it stands for, {_few(like)}, got {_few(each)}"
        for place, (each, like) in enumerate(zip(host, of, strict=True))
        if is_readable(like) and each.tolist() != like.tolist()
    ]


def is_readable(numbers: Tensor) -> bool:
    """Whether numbers can be looked at here without a wait: they lie on the CPU, and the call is not traced."""
    return numbers.is_cpu and type(numbers) is Tensor and not torch.compiler.is_compiling()


def _few(numbers: Tensor) -> str:
    text = ", ".join(map(str, numbers[:_MAX_TOLD].tolist()))
    return f"[{text}{', ...' if len(numbers) > _MAX_TOLD else ''}]"
