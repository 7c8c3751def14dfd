"""The signatures of sampling's functions, with what users read of them; the engine makes the callables."""

from __future__ import annotations

import torch
from torch import Tensor


def sample(
    logits: Tensor,
    *,
    temperature: float | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row by its probability.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; computes in float32 or wider; returns int64.
    Args:
        temperature: what logits are divided by, from 1e-6; 1 if None.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        +inf, -inf everywhere. On a GPU, where looking means waiting, such a row gives some place.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def sample_probs(
    probs: Tensor,
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row by its probability, from probabilities.

    Shapes: probs (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; each row adds up to 1 but for rounding; returns int64.
    Args:
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        infinity, a number below 0, 0 everywhere. On a GPU, where looking means waiting, such a row gives some place.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def sample_topk(
    logits: Tensor,
    k: int | None = None,
    *,
    row_k: Tensor | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row among the k likeliest.

    A place is kept if fewer than k are likelier: places that tie with the last of the k are kept, too.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; computes in float32 or wider; returns int64.
    Args:
        k: how many places, from 1; more than there are keep all. In place of it, row_k: for each row, (*) int32
            or int64, where 0 and less is 1.
        temperature: what logits are divided by, from 1e-6; 1 if None.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        +inf, -inf everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:1805.04833.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def sample_topk_probs(
    probs: Tensor,
    k: int | None = None,
    *,
    row_k: Tensor | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row among the k likeliest, from probabilities.

    A place is kept if fewer than k are likelier: places that tie with the last of the k are kept, too.

    Shapes: probs (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; each row adds up to 1 but for rounding; returns int64.
    Args:
        k: how many places, from 1; more than there are keep all. In place of it, row_k: for each row, (*) int32
            or int64, where 0 and less is 1.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        infinity, a number below 0, 0 everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:1805.04833.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def sample_topp(
    logits: Tensor,
    p: float | None = None,
    *,
    row_p: Tensor | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row among the likeliest that have the share p together.

    A place is kept if those that are likelier have less than p together: at least one, and all equals of the last.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; computes in float32 or wider; returns int64.
    Args:
        p: the share, above 0 and up to 1. In place of it, row_p: for each row,
            (*) float32, where 0 and less keeps the likeliest place, 1 and more all.
        temperature: what logits are divided by, from 1e-6; 1 if None.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        +inf, -inf everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:1904.09751.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def sample_topp_probs(
    probs: Tensor,
    p: float | None = None,
    *,
    row_p: Tensor | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row among the likeliest that have the share p together, from probabilities.

    A place is kept if those that are likelier have less than p together: at least one, and all equals of the last.

    Shapes: probs (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; each row adds up to 1 but for rounding; returns int64.
    Args:
        p: the share, above 0 and up to 1. In place of it, row_p: for each row,
            (*) float32, where 0 and less keeps the likeliest place, 1 and more all.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        infinity, a number below 0, 0 everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:1904.09751.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def sample_minp(
    logits: Tensor,
    p: float | None = None,
    *,
    row_p: Tensor | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row among those at least p times as likely as the likeliest.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; computes in float32 or wider; returns int64.
    Args:
        p: the share of the likeliest place's probability, above 0 and up to 1. In place of it, row_p: for each row,
            (*) float32, where 0 and less keeps all, 1 and more the likeliest place.
        temperature: what logits are divided by, from 1e-6; 1 if None.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        +inf, -inf everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:2407.01082.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def sample_minp_probs(
    probs: Tensor,
    p: float | None = None,
    *,
    row_p: Tensor | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row among those at least p times as likely as the likeliest, from probabilities.

    Shapes: probs (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; each row adds up to 1 but for rounding; returns int64.
    Args:
        p: the share of the likeliest place's probability, above 0 and up to 1. In place of it, row_p: for each row,
            (*) float32, where 0 and less keeps all, 1 and more the likeliest place.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        infinity, a number below 0, 0 everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:2407.01082.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def sample_topk_topp(
    logits: Tensor,
    k: int | None = None,
    p: float | None = None,
    *,
    row_k: Tensor | None = None,
    row_p: Tensor | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place among the k likeliest, and of these among those that have the share p.

    A place is kept if fewer than k are likelier, and if those that are likelier have less than the share p of what
    such places have together: top-k first, then top-p of the rest, as engines do.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; computes in float32 or wider; returns int64.
    Args:
        k: how many places, from 1; more than there are keep all. In place of it, row_k: for each row, (*) int32
            or int64, where 0 and less is 1.
        p: the share of what the k likeliest have, above 0 and up to 1. In place of it, row_p: for each row,
            (*) float32, where 0 and less keeps the likeliest place, 1 and more all.
        temperature: what logits are divided by, from 1e-6; 1 if None.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        +inf, -inf everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:1805.04833, arXiv:1904.09751.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def sample_topk_topp_probs(
    probs: Tensor,
    k: int | None = None,
    p: float | None = None,
    *,
    row_k: Tensor | None = None,
    row_p: Tensor | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place among the k likeliest, and of these among those that have the share p, from probabilities.

    A place is kept if fewer than k are likelier, and if those that are likelier have less than the share p of what
    such places have together: top-k first, then top-p of the rest, as engines do.

    Shapes: probs (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; each row adds up to 1 but for rounding; returns int64.
    Args:
        k: how many places, from 1; more than there are keep all. In place of it, row_k: for each row, (*) int32
            or int64, where 0 and less is 1.
        p: the share of what the k likeliest have, above 0 and up to 1. In place of it, row_p: for each row,
            (*) float32, where 0 and less keeps the likeliest place, 1 and more all.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        infinity, a number below 0, 0 everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:1805.04833, arXiv:1904.09751.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def greedy(logits: Tensor) -> Tensor:
    """Pick the place of the largest logit of each row, the first of equals; that of the first NaN where there is one.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; returns int64.
    Raises: InvalidCallError for other dtypes, and where there is no place.
    """
    raise AssertionError("the signature only; the engine makes the callable")
