"""What requests bring to their logits: how often each said which token, and the places that a grammar allows.

A grammar has one bit for each place, as xgrammar and llguidance fill them.

sampling.bitmask    minus infinity where the bit of a place is 0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, out_of_range, told
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.judge import Exact
from layerzero.core.operation import Case, Random
from layerzero.ops.declaration import function, operation, tensor
from layerzero.ops.draw import Draw
from layerzero.ops.sampling.declare import AXES
from layerzero.ops.sampling.draw import logits_of
from layerzero.ops.sampling.logits import row_problems


class TokenCounts:
    """What ``lz.apply_penalties`` needs of each request, one row each; a step adds the new tokens alone.

        counts = lz.TokenCounts(vocab)
        row = counts.begin(prompt_ids)
        logits = lz.apply_penalties(logits, **counts.of(rows), repetition=1.1, frequency=frequencies)
        counts.add(rows, ids)  # what was drawn
        counts.end(row)

    A row takes 5 bytes a token of the vocabulary. There are as many rows as requests at one time; more are made when
    they are needed, twice as many each time.

    Args:
        vocab: tokens of the vocabulary.
        device: where logits lie; the CPU if None.
        rows: how many are there at first.
    Attributes:
        output_counts: (rows, vocab) int32, how often each token was said.
        prompt_mask: (rows, vocab) bool, which tokens the prompt has.
    Raises: InvalidCallError for sizes, rows and tokens that are none.
    """

    def __init__(self, vocab: int, *, device: torch.device | str | None = None, rows: int = 16) -> None:
        problems = [
            f"{name}: wanted a number of at least 1, got {told(size)}"
            for name, size in (("vocab", vocab), ("rows", rows))
            if type(size) is not int or size < 1 or out_of_range(size)
        ]
        refuse("TokenCounts", problems)
        self.vocab = vocab
        with torch.inference_mode(mode=False):
            self.output_counts = torch.zeros((rows, vocab), dtype=torch.int32, device=device)
            self.prompt_mask = torch.zeros((rows, vocab), dtype=torch.bool, device=device)
        self._free = list(range(rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.output_counts) - len(self._free)

    def begin(self, prompt: Sequence[int] | Tensor = ()) -> int:
        """Take a row for a request with this prompt; its number, the lowest that is free."""
        try:
            given = torch.as_tensor(prompt)
        except (TypeError, ValueError, RuntimeError):  # no numbers, lists of several lengths, numbers past 64 bits
            raise InvalidCallError("TokenCounts.begin", [f"prompt: wanted token ids, got {told(prompt)}"]) from None
        self._check("begin", "prompt", given, least=0)
        given = given.to(self.prompt_mask.device, torch.int64)
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.output_counts[row] = 0
        self.prompt_mask[row] = False
        self.prompt_mask[row, given] = True
        return row

    def end(self, row: int) -> None:
        """Give a row back."""
        self._rows("end", [row])
        self._free.append(row)
        self._free.sort(reverse=True)

    def add(self, rows: Sequence[int], ids: Tensor) -> None:
        """Count tokens of some rows: ids (B,), or (B, N) with -1 for none, as ``lz.verify_speculative`` gives them."""
        places = self._rows("add", rows)
        if not isinstance(ids, Tensor) or ids.ndim not in (1, 2) or len(ids) != len(places):
            got = tuple(ids.shape) if isinstance(ids, Tensor) else told(ids)
            raise InvalidCallError(
                "TokenCounts.add", [f"ids: wanted ({len(places)},) or ({len(places)}, N), got {got}"]
            )
        self._check("add", "ids", ids, least=-1)
        flat = places.view(-1, *[1] * (ids.ndim - 1)) * self.vocab + ids.clamp(min=0)
        self.output_counts.view(-1).index_add_(0, flat.flatten(), (ids >= 0).flatten().int())

    def of(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """The arguments of ``lz.apply_penalties`` for these rows; views where they follow each other, else copies.

        Views show what later steps count, too, whatever rows are made meanwhile.
        """
        places = self._rows("of", rows)
        both = {"output_counts": self.output_counts, "prompt_mask": self.prompt_mask}
        first = rows[0] if len(rows) else 0
        if list(rows) == list(range(first, first + len(rows))):
            return {name: each[first : first + len(rows)] for name, each in both.items()}
        return {name: each.index_select(0, places) for name, each in both.items()}

    def _grow(self) -> None:
        had = len(self.output_counts)
        for each in (self.output_counts, self.prompt_mask):
            each.resize_(2 * had, self.vocab)  # views share the storage, which moves; begin() clears the rows
        self._free = list(range(2 * had - 1, had - 1, -1))

    def _rows(self, method: str, rows: object) -> Tensor:
        """Rows that requests have, as a tensor where the counts lie. Raises: InvalidCallError."""
        if not isinstance(rows, Iterable):
            problem = f"rows: wanted a list of rows, got {told(rows)}; put one row into a list"
            raise InvalidCallError(f"TokenCounts.{method}", [problem])
        taken, free, given = len(self.output_counts), set(self._free), list(rows)
        wrong = [each for each in given if type(each) is not int or not 0 <= each < taken or each in free]
        if wrong or len(set(given)) != len(given):
            wanted = "rows: wanted rows that begin() gave, each once"
            raise InvalidCallError(f"TokenCounts.{method}", [f"{wanted}, got {told(wrong[0] if wrong else given)}"])
        return torch.tensor(given, dtype=torch.int64, device=self.output_counts.device)

    def _check(self, method: str, name: str, ids: Tensor, least: int) -> None:
        if ids.numel() and (ids.dtype is torch.bool or ids.is_floating_point() or ids.is_complex()):
            got = f"{dtype_name(ids.dtype)} {told(ids.flatten()[0].item())}"
            raise InvalidCallError(f"TokenCounts.{method}", [f"{name}: wanted whole numbers, got {got}"])
        if ids.is_cpu and ids.numel():
            low, high = (int(each) for each in ids.aminmax())
            if low < least or high >= self.vocab:
                wanted = f"{name}: wanted tokens from {least} to {self.vocab - 1}"
                raise InvalidCallError(f"TokenCounts.{method}", [f"{wanted}, got {low if low < least else high}"])


BITS = 32
"""Places of a word."""


def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Forbid the places whose bit is 0: their logits become minus infinity. NaN stays NaN.

    Place ``i`` is bit ``i % 32`` of the word ``i // 32``, the lowest bit first, as in xgrammar's
    ``allocate_token_bitmask`` and in llguidance. A row of -1 allows everything; bits behind the vocabulary are not
    read.

    Shapes: logits (*, V), bitmask (*, W), W at least V / 32 → (*, V)
    Dtype: logits floating, bitmask int32; returns logits.dtype.
    Raises: InvalidCallError for what does not fit.
    Source: xgrammar, arXiv:2411.15100.
    """
    # by a table of bytes, since torch fills by a mask of bool at 0.2 places a ns: 575 us for 128256 places, by this 72
    # (one thread of an AMD EPYC, torch 2.13.0, 2026-11-26)
    octets = torch.arange(256, device=logits.device).unsqueeze(-1) >> torch.arange(8, device=logits.device)
    bounds = torch.where((octets & 1).bool(), torch.inf, -torch.inf).to(logits.dtype)
    places = (
        bitmask.clone(memory_format=torch.contiguous_format).view(torch.uint8).int()
    )  # one word may have any stride
    return torch.minimum(logits, torch.nn.functional.embedding(places, bounds).flatten(-2)[..., : logits.shape[-1]])


def _examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Any]:
    """Every other place allowed, about."""
    shape = (case.sizes["rows"], case.sizes["mask_words"])
    if device.type == "meta":
        return {}
    where = device if generator is None else generator.device
    words = torch.randint(-(2**31), 2**31, shape, generator=generator, device=where)
    return {"bitmask": words.to(device, torch.int32)}


_SIZES = {"small": (33, 32), "odd": (5, 1003), "llama2_batch": (8, 32000), "llama3_decode": (1, 128256)}

BITMASK = operation(
    "sampling.bitmask",
    "Minus infinity where the bit of a place is 0",
    apply_token_bitmask,
    inputs=("logits: ... vocab", tensor("bitmask: ... mask_words", frozenset({torch.int32}), same_dtype=False)),
    outputs=("output: ... vocab",),
    axes=(*AXES, Axis("mask_words", scales=True)),
    cases=tuple(
        Case(name, {"rows": rows, "vocab": vocab, "mask_words": -(-vocab // BITS)})
        for name, (rows, vocab) in _SIZES.items()
    ),
    judge=Exact("it picks numbers and computes none"),
    examples=_examples,
)


def _problems(arguments: dict[str, Any]) -> list[str]:
    problems = row_problems(BITMASK, arguments)
    vocab, words = arguments["logits"].shape[-1], arguments["bitmask"].shape[-1]
    if words * BITS < vocab:
        problems.append(f"bitmask: wanted {-(-vocab // BITS)} words of 32 places for {vocab}, got {words}")
    return problems


def _drawn(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    logits = logits_of(draw)
    shape = (*logits.shape[:-1], -(-logits.shape[-1] // BITS) + draw.of((0, 0, 1)))
    words = draw.integers(shape, 2**32 - 1, torch.int64) - 2**31
    return {"logits": draw.laid_out(logits.to(dtype)), "bitmask": draw.laid_out(words.to(torch.int32))}


OPERATIONS = (BITMASK,)
FUNCTIONS = (function("apply_token_bitmask", BITMASK, varies=("...",), fits=_problems, draw=_drawn, weight=1),)
