"""The functions that draw from logits and from probabilities: their signatures, and what users read of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Signature = TypeVar("Signature", bound=Callable[..., Tensor])

_OF_PROBABILITIES = {
    "logits (*, V)": "probs (*, V)",
    "computes in float32 or wider": "each row adds up to 1 but for rounding",
    "+inf, -inf everywhere": "infinity, a number below 0, 0 everywhere",
}
_TEMPERATURE = re.compile(r" +temperature: .*?(?= +seed: )", re.DOTALL)


def _from_probabilities(of: Callable[..., Tensor]) -> Callable[[Signature], Signature]:
    """Give a function what users read of the one that draws from logits, where it draws from probabilities."""
    said = _TEMPERATURE.sub("", inspect.cleandoc(of.__doc__ or "")).replace(".\n", ", from probabilities.\n", 1)
    for of_logits, of_probabilities in _OF_PROBABILITIES.items():
        assert of_logits in said or not said, (
            f"{of.__name__}: wanted {of_logits!r} in its docstring, to say it otherwise"
        )
        said = said.replace(of_logits, of_probabilities)

    def written(function: Signature) -> Signature:
        function.__doc__ = said
        return function

    return written


def sample(
    logits: Tensor,
    *,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    temperature: float | Tensor | None = None,
    seed: int | Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row by its probability, among those that top_k, top_p and min_p keep.

    What is None keeps all. Top-k comes first, then top-p of what the top_k likeliest have, then min-p. A batch
    of requests is one call: each argument may be a tensor with a number for each row. With a seed for each
    row a draw depends on its own row alone, wherever that is in whatever batch.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; computes in float32 or wider; returns int64.
    Args:
        top_k: how many places, from 1; more than there are keep all. In an int32 or int64 tensor 0 and less is 1.
        top_p: the share that the likeliest have together, above 0 and up to 1. In a float32 tensor 0 and less keeps the
            likeliest.
        min_p: the share of the likeliest place's probability, above 0 and up to 1. Of a float32 tensor 0 keeps all.
        temperature: what logits are divided by, from 1e-6; 1 if None. Or a float32 tensor (*) with one for each row,
            where 0 and less is 1e-6, so that the likeliest place comes.
        seed: gives the same ids wherever the same kernel runs the same call; from 0. Or an int64 tensor (*) with one
            for each row: each draw of a request wants another, such as ``request_seed * 2**32 + position``.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        +inf, -inf everywhere. On a GPU, where looking means waiting, such a row gives some place.
    """
    raise AssertionError("the signature only; the engine makes the callable")


@_from_probabilities(sample)
def sample_probs(
    probs: Tensor,
    *,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw as :func:`sample` does, from probabilities."""
    raise AssertionError("the signature only; the engine makes the callable")


def sample_topk(
    logits: Tensor,
    top_k: int | Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row among the top_k likeliest.

    A place is kept if fewer than top_k are likelier: places that tie with the last of them are kept, too.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; computes in float32 or wider; returns int64.
    Args:
        top_k: how many places, from 1; more than there are keep all. Or an int32 or int64 tensor (*) with a number for
            each row, where 0 and less is 1.
        temperature: what logits are divided by, from 1e-6; 1 if None. Or a float32 tensor (*) with one for each row,
            where 0 and less is 1e-6, so that the likeliest place comes.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        +inf, -inf everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:1805.04833.
    """
    raise AssertionError("the signature only; the engine makes the callable")


@_from_probabilities(sample_topk)
def sample_topk_probs(
    probs: Tensor,
    top_k: int | Tensor | None = None,
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw as :func:`sample_topk` does, from probabilities."""
    raise AssertionError("the signature only; the engine makes the callable")


def sample_topp(
    logits: Tensor,
    top_p: float | Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row among the likeliest that have the share top_p together.

    A place is kept if those that are likelier have less than top_p together: at least one, and all equals of the last.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; computes in float32 or wider; returns int64.
    Args:
        top_p: the share, above 0 and up to 1. Or a float32 tensor (*) with a share
            for each row, where 0 and less keeps the likeliest place, 1 and more all.
        temperature: what logits are divided by, from 1e-6; 1 if None. Or a float32 tensor (*) with one for each row,
            where 0 and less is 1e-6, so that the likeliest place comes.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        +inf, -inf everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:1904.09751.
    """
    raise AssertionError("the signature only; the engine makes the callable")


@_from_probabilities(sample_topp)
def sample_topp_probs(
    probs: Tensor,
    top_p: float | Tensor | None = None,
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw as :func:`sample_topp` does, from probabilities."""
    raise AssertionError("the signature only; the engine makes the callable")


def sample_minp(
    logits: Tensor,
    min_p: float | Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row among those at least min_p times as likely as the likeliest.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; computes in float32 or wider; returns int64.
    Args:
        min_p: the share of the likeliest place's probability, above 0 and up to 1. Or a float32 tensor (*) with a share
            for each row, where 0 and less keeps all, 1 and more the likeliest place.
        temperature: what logits are divided by, from 1e-6; 1 if None. Or a float32 tensor (*) with one for each row,
            where 0 and less is 1e-6, so that the likeliest place comes.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        +inf, -inf everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:2407.01082.
    """
    raise AssertionError("the signature only; the engine makes the callable")


@_from_probabilities(sample_minp)
def sample_minp_probs(
    probs: Tensor,
    min_p: float | Tensor | None = None,
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw as :func:`sample_minp` does, from probabilities."""
    raise AssertionError("the signature only; the engine makes the callable")


def sample_topk_topp(
    logits: Tensor,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place among the top_k likeliest, and of these among those that have the share top_p.

    Top-k comes first, then top-p of the rest, as in engines. A place is kept if fewer than top_k are likelier. Those
    that are likelier must also have less than the share top_p of what such places have together.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; computes in float32 or wider; returns int64.
    Args:
        top_k: how many places, from 1; more than there are keep all. Or an int32 or int64 tensor (*) with a number for
            each row, where 0 and less is 1.
        top_p: the share of what the top_k likeliest have, above 0 and up to 1. Or a float32 tensor (*) with a share
            for each row, where 0 and less keeps the likeliest place, 1 and more all.
        temperature: what logits are divided by, from 1e-6; 1 if None. Or a float32 tensor (*) with one for each row,
            where 0 and less is 1e-6, so that the likeliest place comes.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        +inf, -inf everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:1805.04833, arXiv:1904.09751.
    """
    raise AssertionError("the signature only; the engine makes the callable")


@_from_probabilities(sample_topk_topp)
def sample_topk_topp_probs(
    probs: Tensor,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw as :func:`sample_topk_topp` does, from probabilities."""
    raise AssertionError("the signature only; the engine makes the callable")
