"""Each test starts with a process that was just born: no settings, scopes, failures, extra kernels or told warnings."""

from __future__ import annotations

import functools
import gc
import importlib.util
import logging
import math
import os
import random
import signal
import sys
import uuid

import pytest
import torch
import typer.testing
from hypothesis import register_random, settings

import layerzero as lz
from layerzero.backends.torch import aot_inductor
from layerzero.core import cpu_features, emulation
from layerzero.core.ledger import Ledger
from layerzero.engine import accelerator, config, headroom, logging_once, probe
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.events import EVENTS
from layerzero.engine.jit import BUILT
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.descriptors import DESCRIPTORS
from layerzero.integrations.optimize import selection
from layerzero.integrations.optimize.models import compiled_calls
from layerzero.integrations.optimize.times import timing, workload
from layerzero.serving.background_builds import BUILDS
from layerzero.tuning.measurement import admission

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if WORKER:
    os.environ.pop("COLUMNS", None)  # set for workers; commands and their tests take a pipe for what it is
    os.environ["OMP_NUM_THREADS"] = "1"  # of children: times that processes share count for one number of threads
    torch.set_num_threads(1)  # two workers on two cores: with two threads each, kernels took 2 to 30 times as long
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if (
        signal.getsignal(number) is signal.SIG_IGN
    ):  # as in the background of a shell; what tests start would be deaf to it
        signal.signal(number, handler)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a child compiles this package anew otherwise: 0.5 s of its 3
os.environ["LAYERZERO_CACHE_DIR"] = ""  # neither tests nor their children touch the user's files
os.environ["LAYERZERO_JIT"] = "never"  # nothing compiles behind a test that does not ask for it
# what this machine can do at best is told beside times, and no test asks how much: 8 s in each worker otherwise
admission._COPY_BYTES["cpu"], admission._MATRIX["cpu"] = 2**20, 64
config.CONFIGURATION.reset()


class Numbers:
    """Torch's random numbers as hypothesis wants them: an example draws the same ones each time that it runs.

    It is torch's default generator that is set: ``torch.manual_seed`` asks each device, too, and formats a stack.
    """

    seed = staticmethod(torch.default_generator.manual_seed)
    getstate = staticmethod(torch.default_generator.get_state)
    setstate = staticmethod(torch.default_generator.set_state)


NUMBERS = Numbers()  # hypothesis keeps no reference of its own
register_random(NUMBERS)
if not torch.cuda.is_available():
    torch.manual_seed = Numbers.seed  # 0.5 ms less, of which tests of operations take 3

VERSION = probe.installed_version


@functools.cache
def looked_up(name, path):
    """A version that was found, or None: each test asks anew for some twenty libraries, 1 ms each."""
    assert path == tuple(sys.path)
    return VERSION(name)


probe.installed_version = lambda name: looked_up(name, tuple(sys.path))
IMPORTABLE = probe.importable


@functools.cache
def looked_for(name, path, find_spec):
    """Whether a library that was never imported lies somewhere: each test asks anew, 2 ms for each that is absent."""
    return IMPORTABLE(name)


def importable(name):
    """As the probe's, which does not remember."""
    imported = name.partition(".")[0] in sys.modules
    return IMPORTABLE(name) if imported else looked_for(name, tuple(sys.path), importlib.util.find_spec)


probe.importable = importable
typer.testing._get_command = functools.cache(typer.testing._get_command)  # 30 ms for each command line otherwise


def pytest_configure(config):
    """Laws are drawn less often where slow tests are left out; see ``drawing.examples``."""
    settings.register_profile("whole", parent=settings(), deadline=None)  # others may use the cores, too
    settings.register_profile("quick", parent=settings.get_profile("whole"), max_examples=10)
    settings.load_profile("quick" if "not slow" in config.getoption("markexpr") else "whole")


def pytest_collection():
    """Look for no garbage among what is compiled and imported: a third of the time from a fresh clone."""
    gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Let the second worker read files from the last to the first: each finds half of them compiled by the other."""
    report = yield
    if WORKER.endswith(("1", "3", "5", "7", "9")) and isinstance(collector, pytest.Directory) and report.passed:
        report.result.reverse()
    return report


def pytest_collection_modifyitems(items):
    """Give each worker the same order, whichever it read them in."""
    if WORKER:
        items.sort(key=lambda item: item.path.parts)


def pytest_collection_finish():
    """Forget what test modules chose while they were read, as one that quantizes: the first test began with it."""
    for logger in logging.root.manager.loggerDict.values():  # pytest gives those of torch handlers, six times a test
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    ENGINE.bump()
    ENGINE.history.forget()
    gc.enable()
    freeze(len(sys.modules) // 64)


@functools.cache
def freeze(modules):
    """What modules made stays, also those that a test needs: one that collects looked through all of it, for 0.4 s."""
    gc.collect()
    gc.freeze()


def standing_still():
    """A clock that says nothing: what is put into a model does not hang on a machine's load."""
    return 0.0


DECIDED = selection.decided


def decided(about, module, paths, measure, passed, **told):
    """Run nothing for a clock that stands still, of which no time can come: a third of ``lz.optimize``."""
    quick = settings().max_examples < settings.get_profile("whole").max_examples
    if quick and timing.CLOCK is standing_still:
        measure = type(None)
    return DECIDED(about, module, paths, measure, passed, **told)


selection.decided = decided


def without_settings(monkeypatch):
    """No variable of this library is set, but the one that says which CPU this is: its children count on the same."""
    for variable in [name for name in config.os.environ if name.startswith("LAYERZERO_")]:
        if variable != cpu_features.VARIABLE:
            monkeypatch.delenv(variable)


def forget_settings():
    """Settings are those of a process that was born; most tests left them, and to read all anew takes 0.5 ms."""
    known = config.CONFIGURATION
    if (known._file, known._configured, known.forced, known._environment_values) == BORN:
        ENGINE.bump()
    else:
        known.reset()


BORN = ("file", {}), {}, {}, {"jit": "never"}


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    NUMBERS.seed(0)  # which test ran before in this worker decides nothing
    random.seed(0)
    without_settings(monkeypatch)
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", "")
    monkeypatch.setenv("LAYERZERO_JIT", "never")
    monkeypatch.setattr(aot_inductor, "NOTES", f"test-{uuid.uuid4().hex}")  # what earlier tests built is not there
    monkeypatch.setattr(timing, "CLOCK", standing_still)
    monkeypatch.setattr(emulation, "RATIO", lambda _: math.inf)  # what a CPU emulates is told by its features
    monkeypatch.setattr(workload, "CLOCK", standing_still)  # nor does what there is time for
    monkeypatch.setattr(workload, "SHORTEST_S", 0.0)  # one run a sample, not as many as fill 50 ms
    monkeypatch.setattr(compiled_calls, "COMPILERS", ())  # a test that compiles a model, for seconds, asks for it
    ENGINE.ledger = Ledger()
    freeze(len(sys.modules) // 64)
    REGISTRY.ready()
    before = set(REGISTRY.read_declarations())
    yield
    without_settings(monkeypatch)
    monkeypatch.setenv("LAYERZERO_JIT", "never")
    forget_settings()
    if DESCRIPTORS.in_force():
        DESCRIPTORS.clear()
    if ENGINE.frozen is not None:
        ENGINE.frozen = None
        ENGINE.bump()
    REGISTRY.ready()
    for kernel_id in [each for each in REGISTRY.read_declarations() if each not in before]:
        REGISTRY.unregister_kernel(kernel_id)
    ENGINE.ledger = Ledger()
    ENGINE.recent.clear()
    ENGINE.history.forget()
    ENGINE.health.reset()
    BUILT.clear()
    headroom.forget()
    BUILDS.end()
    BUILDS.begin()
    probe.reset_broken()
    logging_once.forget_told()
    EVENTS.reset()


@pytest.fixture(params=["native", "python"])
def path(request, monkeypatch):
    """The test runs twice: once with the hit path in C, once with the one in Python."""
    from layerzero.engine.functions import CALLS
    from layerzero.ops import FUNCTIONS

    if request.param == "native" and accelerator.HOT is None:
        pytest.skip(accelerator.ABSENT)
    if request.param == "python":
        monkeypatch.setenv("LAYERZERO_NATIVE", "0")  # for processes that the test starts
    for name in FUNCTIONS:
        call = CALLS[name]
        chosen = call.python if request.param == "python" else call.fast
        monkeypatch.setattr(lz, name, chosen)  # before `fast` changes, which this reads
        monkeypatch.setattr(call, "fast", chosen)
    return request.param
