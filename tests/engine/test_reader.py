"""How C reads tensors: two readers that agree, and what neither may take for plain memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.engine import accelerator
from layerzero.engine.functions import CALLS

pytestmark = pytest.mark.skipif(accelerator.HOT is None, reason=accelerator.ABSENT or "built")

KEYS = """
import torch, layerzero as lz
from layerzero.engine import accelerator
from layerzero.engine.functions import CALLS
native, w = CALLS["rms_norm"].native, torch.ones(8)
torch.manual_seed(0)
base = torch.randn(4, 6, 8)
tensors = [base, base[1:], base[:, ::2], base.transpose(0, 1), base[..., :0], base.double(), base.bfloat16(),
           base.half(), base.long(), base.int(), base.to(torch.uint8), base.bool(), base.to(torch.complex64),
           base.requires_grad_(),
           torch.nn.Parameter(base.detach()), torch._lazy_clone(base.detach()), base.to_sparse(), base.to("meta"),
           torch._efficientzerotensor((4, 8)), torch.randn(()), base.expand(3, 4, 6, 8), base[None, None, None, None]]
for grad in (True, False):
    with torch.set_grad_enabled(grad):
        for tensor in tensors * 2:
            key = native.key((tensor, w, 1e-6))
            print(tuple(tensor.shape), tensor.dtype, key and key[0].hex()[:200], key and key[1].hex())
print(accelerator.HOT.reader())
"""


def keys(**environment):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KEYS],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "LAYERZERO_CACHE_DIR": "", **environment},
    ).stdout.splitlines()


@pytest.mark.slow
def test_both_readers_make_the_same_keys():
    fast, plain = keys(), keys(LAYERZERO_NATIVE="dlpack")
    assert plain[-1] == "dlpack"
    assert len(fast) > 60
    assert fast[:-1] == plain[:-1]


def test_a_lazy_clone_stays_lazy_where_handles_serve():
    if accelerator.HOT.reader() != "handles":
        pytest.skip("DLPack materialises lazy clones")
    lazy = torch._lazy_clone(torch.randn(4, 8))
    assert CALLS["rms_norm"].native.key((lazy, torch.ones(8), 1e-6)) is not None
    assert torch._C._is_cow_tensor(lazy)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_wrappers_that_escape_a_transform_make_no_key():
    escaped = []
    w = torch.ones(8)

    def keep(x):
        escaped.append(x)
        return x.sum()

    torch.func.vmap(keep)(torch.randn(3, 4, 8))
    torch.func.grad(keep)(torch.randn(4, 8))
    for wrapper in escaped:
        assert CALLS["rms_norm"].native.key((wrapper, w, 1e-6)) is None


def test_an_extension_of_other_sources_is_left_out(monkeypatch):
    class Older:
        INTERFACE = 1

    monkeypatch.setattr(accelerator.importlib, "import_module", lambda name: Older)
    with pytest.raises(accelerator._Absent, match="other sources; build it again"):
        accelerator._load()


def test_the_number_is_that_of_the_header():
    header = Path(accelerator.__file__).parents[1] / "_native" / "hot.h"
    assert f"#define INTERFACE {accelerator.INTERFACE} " in header.read_text()


def test_doctor_names_the_reader():
    words = {"handles": "torch's own C functions", "dlpack": "DLPack"}
    assert f"reads tensors by {words[accelerator.HOT.reader()]}" in str(lz.doctor())
