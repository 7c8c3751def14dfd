"""What all layers of one forward pass over ragged sequences share: where they begin, and what kernels made of it."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from layerzero.core.argument_errors import public
from layerzero.core.errors import refuse
from layerzero.core.handle import CAPTURABLE, FOREIGN, STALE, Handle
from layerzero.ops.ragged.starts import shape_problems


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


_MAX_TOLD = 8
