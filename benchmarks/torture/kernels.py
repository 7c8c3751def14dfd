"""Bad kernels: what shows is replaced, what vetting can find is found, and what kills a process does it once."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
from _norm import right
from keeping import Found, cache, tries

import layerzero as lz
from layerzero import _assembly
from layerzero.core.ledger import Verdict
from layerzero.engine.dispatch import ENGINE

VETTED_S = 20.0
STUCK_S = 240

CALL = """
import _bad, torch, warnings
from _norm import right
import layerzero as lz
warnings.simplefilter("ignore")
data, weight = torch.randn({rows}, 64), torch.randn(64)
with lz.scope(prefer=["bad.{kind}"], deny=_bad.but("{kind}")):
    found = lz.rms_norm(data, weight)
print("right" if torch.allclose(found, right(data, weight), atol=1e-4) else "wrong")
"""


def replaced(draw: random.Random, until: float, times: int | None) -> Found:
    """A preferred kernel whose result is of the wrong kind, or that raises: another one answers the call."""
    import _bad

    logging.disable()  # of what fails, which is all of it
    zero = Counter({"wrong results": 0, "calls raised": 0})
    other: Counter[str] = Counter()
    with cache(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in tries(until, times, zero):
            ENGINE.health.reset()
            kind = draw.choice(_bad.SEEN)
            shape = draw.choice(((8, 64), (1, 64), (2, 3, 8), (draw.randrange(2, 3000), draw.choice((8, 64, 100)))))
            data, weight = torch.randn(*shape), torch.randn(shape[-1])
            try:
                with lz.scope(prefer=[f"bad.{kind}"], deny=_bad.but(kind)):
                    found = [lz.rms_norm(data, weight) for _ in range(3)]
            except Exception as error:  # noqa: BLE001  # this is what is counted
                zero["calls raised"] += 1
                print(f"{kind} {shape}: {type(error).__name__}: {error}")
                continue
            zero["wrong results"] += not all(torch.equal(each, found[0]) for each in found)
            zero["wrong results"] += not torch.allclose(found[0], right(data, weight), atol=1e-4)
    other.update({f"{kind} ran": count for kind, count in _bad.RAN.items()})
    return zero, other


def vetted(draw: random.Random, until: float, times: int | None) -> Found:
    """Vetting in children: nothing bad passes, and what did not pass is not chosen."""
    import _bad

    bad = [*_bad.SEEN, *_bad.WRONG, *_bad.DEADLY, *_bad.HANGS]
    zero = Counter({"bad kernels that passed": 0, "wrong results": 0})
    other: Counter[str] = Counter({"vetted": 0})
    with cache(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ENGINE.ledger = _assembly.ledger()
        for _ in tries(until, times, zero):
            kinds = draw.sample(bad, 5)
            names = [f"bad.{kind}" for kind in kinds]
            rows = 1 << draw.randrange(8)
            found = lz.vet(
                "norm.rms", kernels=[*names, "bad.right"], shapes=[(rows, 64)], dtype="float32", modules=["_bad"],
                again=True, timeout_s=VETTED_S,
            )  # fmt: skip
            for each in found:
                other["vetted"] += 1
                if each.kernel_id == "bad.right":
                    other["right ones refused"] += each.verdict is not Verdict.PASSED
                elif each.verdict in (Verdict.PASSED, None):
                    zero["bad kernels that passed"] += 1
                    print(each)
            data, weight = torch.randn(rows, 64), torch.randn(64)
            with lz.scope(deny=_bad.but(*kinds, "right")):
                answer = lz.rms_norm(data, weight)
            zero["wrong results"] += not torch.allclose(answer, right(data, weight), atol=1e-4)
    return zero, other


def deadly(draw: random.Random, until: float, times: int | None) -> Found:
    """A kernel that ends its process: the next process goes round it, and every one after that."""
    import _bad

    zero = Counter({"ended twice": 0, "wrong results": 0, "stuck processes": 0})
    other: Counter[str] = Counter()
    with cache():
        for number in tries(until, times, zero):
            kind = draw.choice(_bad.DEADLY)
            script = CALL.format(rows=1 << (number % 12), kind=kind)
            ends = [run(script, zero) for _ in range(2)]
            other[f"ended by {kind}"] += ends[0] != "right"
            zero["ended twice"] += ends[1] not in ("right", "wrong")
            zero["wrong results"] += "wrong" in ends
    return zero, other


def run(script: str, zero: Counter[str]) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    try:
        ran = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=STUCK_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        zero["stuck processes"] += 1
        return "stuck"
    return ran.stdout.strip() if ran.returncode == 0 else f"ended with {ran.returncode}"


PARTS = (replaced, vetted, deadly)
