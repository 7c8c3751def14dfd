"""Triton's interpreter, which runs Triton's kernels on a CPU, and kernels as if their libraries served CPUs."""

from __future__ import annotations

import contextlib
import dataclasses
import os

import pytest
import torch

from layerzero.core.limits import Arch

CALLS, DRAWS = 12, 400
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
LIBRARIES = frozenset({"liger", "layerzero_triton"})
"""Those whose kernels are Triton's."""


@contextlib.contextmanager
def interpreting():
    """What Triton 3.9's interpreter lacks: floats given, bfloat16's arithmetic and rounding. Skips without it.

    On a GPU nothing is interpreted, and None is given.
    """
    if not INTERPRETED:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device, and TRITON_INTERPRET=1 is not set")
        yield None
        return
    runtime = pytest.importorskip("triton.runtime.interpreter")
    np, tl, builder, handle = runtime.np, runtime.tl, runtime.InterpreterBuilder, runtime.TensorHandle
    argument, cast, dot = runtime._implicit_cvt, builder.cast_impl, builder.create_dot

    def widened(each):
        return handle((each.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(each):
        bits = torch.from_numpy(np.ascontiguousarray(each.data)).bfloat16().view(torch.int16)
        return handle(bits.numpy().view(np.uint16), tl.bfloat16)

    def converted(self, source, kind):
        pair = source.dtype.scalar, kind.scalar
        ways = {(tl.bfloat16, tl.float32): widened, (tl.float32, tl.bfloat16): rounded}
        return ways[pair](source) if pair in ways else cast(self, source, kind)

    def computed(own):
        def run(self, *operands):
            *given, operator = operands
            if given[0].dtype.scalar != tl.bfloat16:
                return own(self, *operands)
            return rounded(own(self, *map(widened, given), operator))

        return run

    def multiplied(self, left, right, *others):
        pair = [widened(each) if each.dtype.scalar == tl.bfloat16 else each for each in (left, right)]
        return dot(self, *pair, *others)

    def given(value):
        whole = isinstance(value, float)
        return tl.tensor(handle(np.array([value], np.float32), tl.float32), tl.float32) if whole else argument(value)

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(runtime, "_implicit_cvt", given)
        patch.setattr(builder, "cast_impl", converted)
        patch.setattr(builder, "create_dot", multiplied)
        patch.setattr(builder, "create_fp_to_fp", lambda self, source, kind, _: converted(self, source, kind))
        for name in ("unary_op", "binary_op"):
            patch.setattr(builder, name, computed(getattr(builder, name)))
        yield patch, tl


def here(kernel):
    """The kernel as it is; interpreted, as if its library served CPUs."""
    return on_cpu(kernel) if INTERPRETED and kernel.backend.name in LIBRARIES else kernel


def on_cpu(kernel):
    """The kernel as if its library served CPUs."""
    limits = tuple(each for each in kernel.limits if not isinstance(each, Arch))
    return dataclasses.replace(kernel, backend=dataclasses.replace(kernel.backend, platforms=("cpu",)), limits=limits)
