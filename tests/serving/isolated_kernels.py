"""Kernels for a process of their own: the first number of a call says what they do there."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import torch

import layerzero as lz

CRASHES, RAISES, HANGS, LEAVES, WRITES_AND_CRASHES, TURNS, STOPS = 101.0, 102.0, 103.0, 104.0, 105.0, 106.0, 107.0
LOSES, NO_UNICODE, WARNS = 108.0, 109.0, 110.0  # the context of a GPU; an error's text; of nondeterministic code


def act(number: float) -> None:
    if number in (CRASHES, WRITES_AND_CRASHES):
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == RAISES:
        raise ValueError("a number that this library does not like")
    if number == NO_UNICODE:
        raise ValueError("a file named \udcff.so")
    if number == WARNS and torch.get_deterministic_debug_mode() != 1:
        raise ValueError("a mode that the caller has not")
    if number == HANGS:
        time.sleep(3600)
    if number == STOPS:
        os.kill(os.getpid(), signal.SIGSTOP)
    if number == LEAVES:
        os.write(2, b"a library that gave up\n")
        os._exit(7)


def load(facts):
    def rms_norm(input, weight, *, eps):
        number = input.flatten()[0].item() if input.numel() else 0.0
        act(number)
        if number == LOSES:
            input.view(-1)[torch.full((1,), 10**9, device=input.device)]
        result = torch.nn.functional.rms_norm(input, weight.shape, weight, eps)
        return result.mT.contiguous().mT if number == TURNS else result

    return rms_norm


def load_adding(facts):
    def add_rms_norm(input, residual, weight, *, eps):
        residual += input
        act(input.flatten()[0].item())
        return torch.nn.functional.rms_norm(residual, weight.shape, weight, eps)

    return add_rms_norm


def load_attention(facts):
    def attention(query, key, value, *, causal):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

    return attention


APART = lz.Backend("apart", "kernels for a process of their own", origin="code", platforms=("cpu", "cuda"))
FOREIGN = dataclasses.replace(
    APART, name="foreign", platforms=("cpu",), distribution="a-foreign-library", versions=">=2,<3"
)
COMMON = {"backend": APART, "priority": 99, "deterministic": True}
ATTENTION = {"operations": ("attention.standard.prefill",), "layout": "BHSD", "accepts": ("causal",)}
KERNELS = [
    lz.Kernel(id="apart.rms", operations=("norm.rms",), load=load, accepts=("eps",), **COMMON),
    lz.Kernel(id="apart.add_rms", operations=("norm.add_rms",), load=load_adding, accepts=("eps",), **COMMON),
    lz.Kernel(id="apart.attention", load=load_attention, **ATTENTION, **COMMON),
    lz.Kernel(id="foreign.rms", operations=("norm.rms",), load=load, accepts=("eps",), backend=FOREIGN),
]

lz.register_backend(KERNELS)
