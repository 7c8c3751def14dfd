"""Times of a machine with a roofline."""

from __future__ import annotations

import math
import random

from hypothesis import strategies as st

from layerzero.core.evidence import Measurement
from layerzero.ops.attention import declare as attention
from layerzero.tuning.prediction.predict import Point, meaning_of

TIME = Measurement(10.0, 12.0, 0.01, 20, noise=0.02)
PREFILL = meaning_of(attention.STANDARD_PREFILL.schema.axes)
POWERS = st.integers(0, 12).map(lambda exponent: 2**exponent)
WITHIN = st.integers(0, 10).map(lambda exponent: 2**exponent)


def roofline(batch, seq, noise=None):
    """A made-up device: 6 us a launch, 3 TB/s, 500 TFLOP/s; attention of 32 heads of 128, causal, bf16.

    The three hide behind each other, as on no real device: at the bends, a sum of parts is twice too much.
    """
    work, traffic = 2 * batch * 32 * seq * seq * 128, 8 * batch * seq * 32 * 128
    time_us = max(6.0, traffic / 3e6, work / 5e8)
    return time_us * math.exp(noise.gauss(0, 0.02)) if noise else time_us


def sizes(batch, seq):
    return {"batch": batch, "seq_q": seq, "seq_k": seq, "heads": 32, "kv_heads": 32}


def measured(batches=(1, 2, 4, 8, 16), sequences=(128, 256, 512, 1024, 2048, 4096, 8192), seed=0):
    noise = random.Random(seed)
    points = [Point(sizes(b, s), roofline(b, s, noise), meaning=PREFILL) for b in batches for s in sequences]
    noise.shuffle(points)
    return points
