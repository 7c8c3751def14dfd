"""A hub kernel is imported in a child first: what it changes there keeps it out of this process."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

import layerzero as lz
from hub_builds import OWNER, RMSNORM, ROTARY, module_of, plant, settings
from layerzero.backends.hub import build, checks
from layerzero.backends.hub.adapters import ADAPTERS
from layerzero.core.ledger import Verdict
from layerzero.engine.registry import REGISTRY
from layerzero.testing import hub_trial

pytest.importorskip("kernels.variants", reason="the package that reads hub kernels is not installed")
pytest.importorskip("kernel_abi_check", reason="the package that checks shared libraries is not installed")


@pytest.fixture(autouse=True)
def _unplanted():
    """Forget what a test before imported under the same name: a package is refused whose name is taken."""
    for name in [each for each in sys.modules if each.startswith("_planted_")]:
        del sys.modules[name]


CHANGES = {
    "import torch; torch.nn.functional.silu = lambda x: x": "torch.nn.functional.silu was replaced",
    "import torch; torch.Tensor.add_ = lambda self, other: self": "torch.Tensor.add_ was added",
    "import torch; torch.planted = lambda: None": "torch.planted was added",
    "import torch; torch.set_default_dtype(torch.float64)": "default dtype: torch.float32 became torch.float64",
    "import torch; torch.set_num_threads(torch.get_num_threads() + 1)": "torch's threads: ",
    "import torch; torch.use_deterministic_algorithms(True)": "deterministic algorithms: False became True",
    "import torch; torch.manual_seed(torch.initial_seed() + 1)": "random numbers: ",
    "import os; os.environ['PLANTED'] = '1'": "os.environ: ",
    "import sys; sys.path.insert(0, '/planted')": "sys.path: ",
    "import sys, types; sys.modules['planted_elsewhere'] = types.ModuleType('x')": "planted_elsewhere was taken",
    "import sys; sys.modules['json'] = sys.modules[__name__]": "the module json was replaced",
    "import torch; torch.library.define('planted_other::op', '(Tensor x) -> Tensor')": "planted_other.op was defined",
    "import torch\nlibrary = torch.library.Library('aten', 'IMPL')\nlibrary.impl('erfinv', lambda x: x, 'CPU')": (
        "torch.ops.aten.erfinv was changed"
    ),
    "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()": "threads: ",
    "import subprocess; held = subprocess.Popen(['sleep', '60'])": "child processes: ",
    "import socket; held = socket.socket()": "sockets: ",
    "import atexit; atexit.register(print)": "functions at exit: ",
    "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)": "signal handlers: ",
    "import warnings; warnings.simplefilter('error')": "filters of warnings: ",
    "import logging; logging.basicConfig(level=10)": "handlers of the root logger: ",
    "import layerzero as lz; lz.configure(deny=['torch.silu'])": "LayerZero's settings: ",
}

ENDS = {
    "import os; os.environ['PLANTED'] = '1'": "os.environ: ",
    "raise RuntimeError('planted')": "raised RuntimeError: planted",
    "import planted_that_is_missing": "raised ModuleNotFoundError",
    "raise SystemExit(3)": "raised SystemExit: 3",
    "import os; os._exit(5)": "it ended the process with exit code 5",
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": "it ended the process with SIGSEGV",
}

COMPARE = """
import json, sys
from pathlib import Path
import layerzero as lz
import kernels.resolver, kernels.validate
from layerzero.backends.hub import checks, effects
from layerzero.engine.registry import REGISTRY
REGISTRY.ready()
found, before = {}, None
for each in checks.repositories(Path(sys.argv[1])):
    build = checks.checked(each, ["*"], None)
    effects.import_libraries_of(Path(build.path))
    before = effects.taken()
    build.module()
    found[each.repo] = effects.changes(before, effects.taken(), build.id, Path(build.path))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_each_change_of_the_process_is_seen(tmp_path):
    """One process imports all of them: what each changes is told from what those before it changed."""
    for number, text in enumerate(["", *CHANGES]):
        plant(tmp_path, text=text, owner=f"owner{number:02}", id=f"_planted_change_{number:02}")
    command = [sys.executable, "-c", COMPARE, str(tmp_path)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("{")))
    assert found.pop("owner00/activation") == []
    missed = {
        text: lines
        for (text, want), lines in zip(CHANGES.items(), found.values(), strict=True)
        if not any(want in line for line in lines)
    }
    assert missed == {}


@pytest.mark.slow
def test_what_ends_or_changes_a_child_is_not_imported_here(tmp_path):
    for name, text in zip(ADAPTERS, ENDS, strict=False):
        plant(tmp_path, name, text)
    lz.configure(**settings(tmp_path))
    REGISTRY.ready()
    assert REGISTRY.hub.admitted() == []
    told = REGISTRY.hub.told()
    for name, text in zip(ADAPTERS, ENDS, strict=False):
        assert ENDS[text] in told[f"{OWNER}/{name}"], (text, told[f"{OWNER}/{name}"])
        assert module_of(name) not in sys.modules


@pytest.mark.slow
def test_a_child_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_trial, "TIMEOUT_S", 10.0)
    plant(tmp_path, text="import time\nwhile True: time.sleep(60)")
    lz.configure(**settings(tmp_path))
    REGISTRY.ready()
    assert REGISTRY.hub.admitted() == []
    assert "no sign of life for 10 s" in REGISTRY.hub.told()[f"{OWNER}/activation"]


@pytest.mark.slow
def test_a_kernel_that_changes_nothing_runs_after_a_child_imported_it(tmp_path, caplog):
    plant(tmp_path)
    plant(tmp_path, "rmsnorm", RMSNORM)
    plant(tmp_path, "rotary", ROTARY)
    plant(tmp_path, "layer-norm", "import os; os.environ['PLANTED'] = '1'")
    lz.configure(require_vetting=False, **settings(tmp_path))
    REGISTRY.ready()
    assert module_of("activation") not in sys.modules
    assert {each.name for each in REGISTRY.hub.admitted()} == {"activation", "rmsnorm", "rotary"}
    assert module_of("activation") not in sys.modules, "the child alone has imported it"
    x, weight = torch.randn(4, 64), torch.randn(64)
    query, key = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
    cos, sin = lz.rope_table(8, 16)
    expected = lz.silu_mul(x), lz.gelu_mul(x), lz.rms_norm(x, weight), *lz.rope(query, key, cos, sin)
    names = {"silu_mul": "activation.silu_mul", "gelu_mul": "activation.gelu_mul"}
    names |= {"norm.rms": "rmsnorm.rms_norm", "posenc.rope": "rotary.rope"}
    with lz.scope(locks={operation: f"hub.{name}" for operation, name in names.items()}):
        assert lz.which("silu_mul", x)["kernel_id"] == "hub.activation.silu_mul"
        assert "hub.rotary.rope" in str(lz.explain("rope", query, key, cos, sin))
        got = lz.silu_mul(x), lz.gelu_mul(x), lz.rms_norm(x, weight), *lz.rope(query, key, cos, sin)
    torch.testing.assert_close(got, expected)
    assert module_of("activation") in sys.modules
    with lz.scope(locks={"norm.rms": "hub.layer-norm.rms_norm"}), pytest.raises(lz.NoKernelFoundError) as caught:
        lz.rms_norm(x, weight)
    assert "its import changed the process: os.environ" in str(caught.value)
    assert len([each for each in caplog.messages if "layer-norm of the hub is not used" in each]) == 1


def test_bytecode_that_lies_beside_a_kernel_is_not_run(tmp_path):
    text = f"from . import part\n{ROTARY}"
    place = plant(tmp_path, "rotary", text, files={"part.py": b""}, id="_planted_beside_bytecode")
    planted_code = compile("raise SystemExit('planted')", "x", "exec")
    data = importlib._bootstrap_external._code_to_hash_pyc(planted_code, bytes(8), checked=False)
    for source in ("__init__.py", "part.py"):
        cached = Path(importlib.util.cache_from_source(str(place / source)))
        cached.parent.mkdir(exist_ok=True)
        cached.write_bytes(data)
    (place / "more.pyc").write_bytes(data)
    build = checks.checked(next(iter(checks.repositories(tmp_path))), [f"{OWNER}/*"], None)
    assert build.module().apply_rotary is not None
    with pytest.raises(ImportError):
        importlib.import_module("_planted_beside_bytecode.more")


class Lock:
    """The lock of imports, which lets the first import go on once a second thread asks for it."""

    def __init__(self, real, gate):
        self.real, self.gate = real, gate

    def __enter__(self):
        if self.gate.inside.is_set():
            self.gate.go.set()
        self.real.acquire()

    def __exit__(self, *_):
        self.real.release()


def test_a_second_thread_waits_for_the_whole_module(tmp_path, monkeypatch):
    gate = types.ModuleType("planted_gate")
    gate.inside, gate.go = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "planted_gate", gate)
    text = f"import planted_gate\nplanted_gate.inside.set()\nplanted_gate.go.wait()\n{ROTARY}"
    plant(tmp_path, "rotary", text, id="_planted_behind_a_gate")
    made = checks.checked(next(iter(checks.repositories(tmp_path))), [f"{OWNER}/*"], None)
    monkeypatch.setattr(build, "_importing", Lock(build._importing, gate))
    first = threading.Thread(target=made.module)
    first.start()
    gate.inside.wait()
    try:
        assert made.module().apply_rotary is not None
    finally:
        gate.go.set()
        first.join()


def test_a_module_that_took_the_name_since_the_check_is_refused(tmp_path, monkeypatch):
    plant(tmp_path, "rotary", ROTARY, id="_planted_and_taken")
    made = checks.checked(next(iter(checks.repositories(tmp_path))), [f"{OWNER}/*"], None)
    monkeypatch.setitem(sys.modules, "_planted_and_taken", types.ModuleType("_planted_and_taken"))
    with pytest.raises(build.RefusedBuildError, match="rotary namespace: wanted _planted_and_taken of "):
        made.module()


def test_children_get_what_was_tried_and_nothing_else(tmp_path):
    plant(tmp_path, id="_planted_for_children")
    plant(tmp_path, "rmsnorm", "raise RuntimeError", id="_planted_that_raises")
    lz.configure(**settings(tmp_path))
    kernel = "hub.activation.silu_mul"
    (vetted,) = lz.vet("silu_mul", kernels=[kernel], shapes=[(4, 64)], dtype=torch.float32, device="cpu")
    assert vetted.verdict is Verdict.PASSED, str(vetted)
    assert REGISTRY.hub.for_children()["LAYERZERO_HUB_ALLOW"] == f"{OWNER}/activation"
    lz.configure(**{"hub.enabled": False})
    REGISTRY.ready()
    assert REGISTRY.hub.for_children() == {}
