"""Time and memory of a loss and its backward pass: all logits of a linear layer, and LayerZero's chunks of them.

``PYTHONPATH=src python benchmarks/linear_cross_entropy.py [tokens ...]``: ratios of the fastest of interleaved runs,
and the resident memory that each adds at most, in a process of its own. float32, gradients of hidden and weight.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from torch.nn import functional

import layerzero as lz

SHAPES = ((32000, 512), (32000, 2048), (128256, 512), (128256, 2048))
ROUNDS = 3
PAGE = 4096
WAYS = ("stock", "torch.linear_cross_entropy", "torch.linear_cross_entropy_chunked")


def call(way, hidden, weight, target):
    if way == "stock":
        return functional.cross_entropy(functional.linear(hidden, weight), target)
    with lz.scope(locks={"loss.linear_cross_entropy": way}):
        return lz.linear_cross_entropy(hidden, weight, target)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def step(way, hidden, weight, target):
    """Seconds, and the bytes that it added at most."""
    hidden.grad = weight.grad = None
    before, most, done = resident(), 0, threading.Event()

    def watch():
        nonlocal most
        while not done.wait(0.001):
            most = max(most, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    call(way, hidden, weight, target).backward()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    return seconds, most - before


def measured(tokens, vocab, features, ways, rounds):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, features, requires_grad=True)
    weight = (torch.randn(vocab, features) / features**0.5).requires_grad_()
    target = torch.randint(0, vocab, (tokens,))
    found = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            found[way].append(step(way, hidden, weight, target))
    return {way: [min(each[0] for each in runs), max(each[1] for each in runs)] for way, runs in found.items()}


def apart(*arguments):
    """The same in a process of its own: memory that another way left counts for nothing."""
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    if sys.argv[1:2] == ["--child"]:
        sys.stdout.write(json.dumps(measured(*json.loads(sys.argv[2]))))
        return
    for tokens in [int(each) for each in sys.argv[1:]] or [512]:
        for vocab, features in SHAPES:
            times = apart(tokens, vocab, features, WAYS, ROUNDS)
            memory = {way: apart(tokens, vocab, features, [way], 1)[way][1] for way in WAYS}
            for way in WAYS:
                ratio, share = times[way][0] / times["stock"][0], memory[way] / memory["stock"]
                print(
                    f"{tokens} x {features} of {vocab}: {way}: time {ratio:.2f}, {memory[way] >> 20} MiB ({share:.2f})"
                )


if __name__ == "__main__":
    main()
