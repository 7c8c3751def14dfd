"""How often requests said each token, kept between steps while requests come and go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from layerzero.core.arguments import out_of_range, told
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError, refuse


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

    def _rows(self, method: str, rows: Iterable[int]) -> Tensor:
        """Rows that requests have, as a tensor where the counts lie. Raises: InvalidCallError."""
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
