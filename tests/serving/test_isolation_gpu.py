"""Tensors of a GPU for a process of their own, with memory of the CPU in place of a GPU's and one process for both.

What CUDA itself does, ``tests/gpu/test_cuda_isolation.py`` asks on a GPU.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero.core.errors import IsolatedKernelError
from layerzero.engine import isolation
from layerzero.engine.config import current_policy
from layerzero.engine.registry import REGISTRY
from layerzero.serving.isolation import arena as arenas
from layerzero.serving.isolation import child, kernels, messages
from layerzero.serving.isolation.arena import GIVEN, RESULTS, Buffer, Gpu, Mapping
from layerzero.serving.isolation.messages import Open, Run
from layerzero.serving.isolation.worker import Worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes of their own need Linux")

DEVICE = torch.device("cpu")  # stands for a GPU
RELEASED = (b"counter", 3)


class Cuda:
    """The calls of CUDA that are made, in order, and the storages that handles open."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.storages: list[torch.UntypedStorage] = []
        self.forbidden = ""

    def note(self, text):
        return lambda *_: self.calls.append(text)

    def share(self, storage):
        if self.forbidden:
            raise RuntimeError(f"{self.forbidden}\nat a line of C++")
        self.storages.append(storage)
        return 0, str(len(self.storages) - 1).encode(), storage.nbytes(), 0, *RELEASED, b"event", False

    def open(self, device, handle, *_):
        self.calls.append("open")
        return self.storages[int(handle)]

    def stream(self, device):
        return types.SimpleNamespace(wait_event=self.note("wait"), synchronize=self.note("synchronize"))


@pytest.fixture(name="cuda")
def _cuda(monkeypatch):
    cuda = Cuda()
    fakes = {
        "MemPool": object,
        "device": lambda _: contextlib.nullcontext(),
        "use_mem_pool": lambda *_: contextlib.nullcontext(),
        "get_allocator_backend": lambda: "native",
        "Event": lambda: types.SimpleNamespace(record=cuda.note("record")),
        "current_stream": cuda.stream,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "init": cuda.note("init"),
        "set_device": cuda.note("set device"),
        "synchronize": cuda.note("synchronize there"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    storage = {
        "_share_cuda_": lambda storage: cuda.share(storage),
        "_new_shared_cuda": classmethod(lambda _, *given: cuda.open(*given)),
        "_release_ipc_counter_cuda": staticmethod(lambda *given: cuda.calls.append(f"release {given == RELEASED}")),
    }
    for name, fake in storage.items():
        monkeypatch.setattr(torch.UntypedStorage, name, fake, raising=False)
    return cuda


class Here(Worker):
    """A process that is none: its server answers at once."""

    def __init__(self, file: int) -> None:
        super().__init__("here")
        self.file, self.asked, self.alive, self.starts = file, [], False, 0
        self.kernels = {}

    @property
    def pid(self):
        return 4711 if self.alive else None

    def start(self, memory, modules):
        self.alive, self.starts, self.server = True, self.starts + 1, child.Server(Mapping(memory))
        self.server._kernels |= self.kernels

    def ask(self, request, timeout_s, what, meanwhile=None):
        self.asked.append(request)
        if meanwhile is not None:
            meanwhile()
        return self._decoded(self._encoder.encode(self.server.answer(self._encoder.encode(request))))

    def end(self):
        self.alive = False


@pytest.fixture(name="library")
def _library(cuda):
    made = kernels.Library("here", 1 << 24, ())
    made.worker = Here(made.arena.file)
    made.worker.start(made.arena.file, [])
    yield made
    isolation.COSTS.clear()


@pytest.fixture(name="way", params=["by CUDA IPC", "through the host"])
def _way(request, cuda):
    cuda.forbidden = "" if request.param == "by CUDA IPC" else "no handles here"
    return request.param


def call(library, kernel, *given, mutated=(), **named):
    """What a kernel gives there."""
    numbers = library.worker.kernels
    number = next((number for number, each in numbers.items() if each is kernel), len(numbers) + 1)
    numbers[number] = library.worker.server._kernels[number] = kernel
    return library._call(number, "here.kernel", given, named, frozenset(mutated), 1.0, DEVICE)


class Seen:
    """A kernel that notes its tensors, gives one back, none, and a copy."""

    def __call__(self, x, y):
        self.x = x
        return y, None, x.clone()


class Adds:
    """A kernel that writes into its first tensor, and may raise behind that."""

    raises = False

    def __call__(self, into, x):
        into += x
        if self.raises:
            raise ValueError("a number that this library does not like")
        return into * 2


def pieces(dtype):
    whole = (torch.arange(4 * 6 * 10).view(4, 6, 10) % 2).to(dtype)
    turned = whole[:, 1:5, 3], whole.mT, whole[:, :, ::3], whole[1:3].transpose(0, 2)
    return whole, whole[2:2], whole[1, 2, 3], whole[:1].expand(9, 6, 10), *turned


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_metadata_and_values_arrive_both_ways(library, way, dtype):
    kernel = Seen()
    for given in pieces(dtype):
        for _ in range(3):  # the first of a form, the first with a known size of results, one that is known whole
            same, none, result = call(library, kernel, given, given)
            assert same is given or not given.numel()
            assert none is None
            assert kernel.x.data_ptr() != given.data_ptr() or not given.numel()
            assert kernel.x.data_ptr() % 64 == given.data_ptr() % 64 or not given.numel()
            assert kernel.x.stride() == given.stride()
            assert (result.dtype, result.shape, result.stride()) == (dtype, given.shape, given.clone().stride())
            assert torch.equal(result.to(torch.float64), given.to(torch.float64))
    assert bool(library._gpu(DEVICE).reason) is (way != "by CUDA IPC")


def test_tensors_that_share_memory_do_so_there_and_cross_once(library, way):
    packed, same = torch.arange(240.0).view(4, 3, 20), []

    def kernel(q, k):
        same.append(
            q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() and q.data_ptr() + 80 == k.data_ptr()
        )
        return q + k

    assert torch.equal(call(library, kernel, packed[:, 0], packed[:, 1]), packed[:, 0] + packed[:, 1])
    assert same == [True]


def test_what_is_written_comes_back_and_an_error_leaves_it_unharmed(library, way):
    kernel, into, x = Adds(), torch.ones(6, 5).mT, torch.full((5, 6), 2.0)
    version = into._version
    assert torch.equal(call(library, kernel, into, x, mutated=[0]), torch.full((5, 6), 6.0))
    assert torch.equal(into, torch.full((5, 6), 3.0))
    assert into._version > version
    kernel.raises = True
    with pytest.raises(IsolatedKernelError, match="ValueError: a number that this library does not like") as caught:
        call(library, kernel, into, x, mutated=[0])
    assert "in __call__" in caught.value.__notes__[0]
    assert torch.equal(into, torch.full((5, 6), 3.0))
    assert library.worker.alive


def test_copies_wait_for_those_of_the_call_before_and_the_process_for_them(library, cuda):
    call(library, torch.neg, torch.ones(8))
    cuda.calls.clear()
    call(library, torch.neg, torch.ones(8))
    assert cuda.calls == ["wait", "synchronize", "synchronize there", "record"]


def test_results_outlive_calls_larger_ones_and_the_process(library, way):
    results = [call(library, torch.neg, torch.full((size,), float(size))) for size in (8, 9, 1 << 20, 8)]
    library.worker.end()
    library._forget()
    library.worker.start(library.arena.file, [])
    for size, result in zip((8, 9, 1 << 20, 8), results, strict=True):
        assert torch.equal(result, torch.full((size,), -float(size)))


def opens(library):
    return [each for each in library.worker.asked if isinstance(each, Open)]


def test_a_buffer_grows_by_a_new_handle_and_is_kept_otherwise(library, cuda):
    for size in (8, 1 << 18, 1 << 20, 1 << 20, 8):
        call(library, torch.neg, torch.ones(size))
    assert [each.use for each in opens(library)] == [GIVEN, RESULTS, GIVEN, RESULTS]
    assert [each.handle[2] for each in opens(library)] == [arenas.LEAST_BYTES] * 2 + [1 << 22] * 2
    assert cuda.calls.count("release True") == 4, "torch keeps no memory for a process that ended"
    assert all(each.handle[4:6] != RELEASED for each in opens(library)), "nothing counts below 0 either"
    assert len({each.mark for each in opens(library)}) == 4


def test_no_pool_of_memory_ends_and_the_next_buffer_of_its_size_takes_it(library, monkeypatch):
    made = []

    class Pool:
        def __init__(self):
            made.append(weakref.ref(self))

    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(arenas, "_SPARE", {})
    for size in (8, 1 << 20, 8):
        call(library, torch.neg, torch.ones(size))
    assert len(made) == 4
    assert all(each() for each in made), "torch ends the process where one ends while a graph is captured"
    assert {size: len(pools) for (_, size), pools in arenas._SPARE.items()} == {arenas.LEAST_BYTES: 2, 1 << 22: 0}
    for _ in range(2):
        arenas.Buffer(arenas.LEAST_BYTES, DEVICE)
    assert len(made) == 4
    assert len(arenas._SPARE[DEVICE, arenas.LEAST_BYTES]) == 2


def test_a_new_process_opens_the_same_memory(library, cuda, monkeypatch):
    call(library, torch.neg, torch.ones(1 << 20))
    first = [each.handle for each in opens(library)][2:]
    library.worker.end()
    library.worker.asked.clear()
    monkeypatch.setattr(kernels, "SAMPLES", 1)
    monkeypatch.setattr(child.Server, "_load", lambda *_: messages.Done((), several=False))
    library.load(messages.Load(0, [], "", "", None, {}, {}, "cpu"), b"key")
    assert [each.handle for each in opens(library)] == first
    assert "on cpu by CUDA IPC" in isolation.COSTS["here", "cpu"].way
    assert len(cuda.storages) == 4
    assert torch.equal(call(library, torch.neg, torch.ones(8)), -torch.ones(8))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("allocator", "the allocator cudaMallocAsync of torch gives no handles"),
        ("here", "CUDA error: operation not supported"),
        ("there", "RuntimeError: CUDA error: invalid device context (in process 4711, which runs here)"),
        ("mark", "RuntimeError: the handle opened other memory than was shared (in process 4711, which runs here)"),
    ],
)
def test_where_ipc_does_not_serve_is_found_by_trying_and_told_once(library, cuda, monkeypatch, caplog, what, words):
    if what == "allocator":
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    if what == "here":
        cuda.forbidden = words
    if what == "there":

        def fails(*_):
            raise RuntimeError("CUDA error: invalid device context")

        monkeypatch.setattr(cuda, "open", fails)
    if what == "mark":
        monkeypatch.setattr(Buffer, "marked", lambda self: bytes(15) + b"1")
    for _ in range(3):
        assert torch.equal(call(library, torch.neg, torch.ones(8)), -torch.ones(8))
    assert [each.message for each in caplog.records] == [
        f"here: calls of its process take longer, for tensors on cpu by copies through the host: {words}"
    ]
    assert sum(isinstance(each, Run) and each.host is not None for each in library.worker.asked) == 3
    assert len(opens(library)) == (what in ("there", "mark"))


def test_a_process_that_ends_as_it_opens_memory_costs_one_call(library, monkeypatch):
    def ends(self, request):
        self.alive = False
        raise IsolatedKernelError("process 4711 of here ended with SIGSEGV, in opening memory of cpu")

    with monkeypatch.context() as patch:
        patch.setattr(library, "_open", types.MethodType(ends, library.worker))
        with pytest.raises(IsolatedKernelError, match="SIGSEGV, in opening"):
            call(library, torch.neg, torch.ones(8))
    library.worker.start(library.arena.file, [])
    assert torch.equal(call(library, torch.neg, torch.ones(8)), -torch.ones(8))
    assert "through the host: process 4711 of here ended" in library._gpu(DEVICE).way


def test_memory_that_runs_out_is_no_limit_of_ipc(library, monkeypatch):
    def runs_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(arenas, "Buffer", runs_out)
        with pytest.raises(torch.OutOfMemoryError):
            call(library, torch.neg, torch.ones(8))
    call(library, torch.neg, torch.ones(8))
    assert not library._gpu(DEVICE).reason


def test_a_capture_and_tensors_of_another_device_are_refused(library, cuda, monkeypatch):
    with pytest.raises(IsolatedKernelError, match="wanted all tensors on cpu, got one on meta"):
        call(library, torch.add, torch.ones(8), torch.ones(8, device="meta"))
    assert not any(isinstance(each, Run) for each in library.worker.asked)
    library.worker.end()
    library.worker.asked.clear()
    cuda.calls.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    load = messages.Load(0, [], "", "", None, {}, {}, "cpu")
    with pytest.raises(IsolatedKernelError, match="wanted no capture of a CUDA graph"):
        library.call(load, b"key", (torch.ones(8),), {}, frozenset(), 1.0, DEVICE, builds=False)
    assert (library.worker.starts, library.worker.asked, cuda.calls) == (1, [], []), "nothing that a capture forbids"


def test_a_result_elsewhere_is_an_error(library):
    with pytest.raises(IsolatedKernelError, match="TypeError: wanted results on cpu, got one on meta"):
        call(library, lambda x: x.to("meta"), torch.ones(8))


def test_a_process_whose_context_is_lost_is_ended_by_its_error(library, cuda, monkeypatch):
    def lost(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    call(library, torch.neg, torch.ones(8))
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(IsolatedKernelError, match="RuntimeError: CUDA error: an illegal memory access") as caught:
        call(library, torch.neg, torch.ones(8))
    assert "in _put" in caught.value.__notes__[0]
    assert not library.worker.alive
    assert library.worker.ends == 1


def test_calls_in_inference_mode_and_behind_it(library, way):
    for mode in (True, False, True, False):
        with torch.inference_mode(mode):
            x = torch.ones(8)
            assert torch.equal(call(library, Adds(), x, x.clone(), mutated=[0]), torch.full((8,), 4.0))
            assert torch.equal(x, torch.full((8,), 2.0))


def test_bytes_of_several_storages_over_one_memory_do_not_cross(library):
    raw = bytearray(1024)
    one, other = (torch.frombuffer(raw, dtype=torch.uint8, offset=at, count=512) for at in (0, 256))
    with pytest.raises(IsolatedKernelError, match="overlap to share one storage"):
        call(library, torch.add, one, other)


def test_a_gpu_has_a_cost_of_its_own_and_the_way_is_told(monkeypatch):
    kernel, policy, gpu = REGISTRY.kernel("torch.rms_norm"), current_policy(), lz.Device.named("H100")
    assert isolation.cost(kernel, policy, gpu) == isolation.ON_A_GPU
    known = isolation.CallCost(90.0, 1.0, 4711, Gpu.way.fget(types.SimpleNamespace(device="cuda:0", reason="")))
    monkeypatch.setitem(isolation.COSTS, ("torch", "cuda:0"), known)
    assert isolation.cost(kernel, policy, gpu) == known
    assert isolation.cost(kernel, policy, lz.Device.detect("cpu")) == isolation.BEFORE_MEASURED
    assert isolation.processes() == [
        "torch: process 4711 of its own, + 90 us a call and 1 us a MiB, for tensors on cuda:0 by CUDA IPC"
    ]


def test_another_gpu_under_the_same_name_is_refused():
    facts = lz.explain("rms_norm", torch.ones(4, 64), torch.ones(64)).facts
    load = messages.load_of("torch.rms_norm", facts, [])
    assert (load.device, load.uuid) == ("", "")
    operation = REGISTRY.operation(load.operation)
    assert messages.facts_of(load, operation).device == facts.device
    with pytest.raises(RuntimeError, match="to be GPU GPU-1, got ; set CUDA_VISIBLE_DEVICES outside"):
        messages.facts_of(msgspec.structs.replace(load, uuid="GPU-1"), operation)


def test_a_container_gets_no_gpu():
    meta = torch.empty(4, 64, device="meta"), torch.empty(64, device="meta")
    with lz.scope(backend_isolation="container", backend_containers={"torch": {"image": "a:1"}}, isolate=["torch"]):
        reasons = lz.explain("rms_norm", *meta, device="h100").reasons("torch.rms_norm")
    assert "must be cpu, since a container gets no GPU, is cuda" in str([each.message for each in reasons])


def test_a_forked_child_frees_no_memory_of_the_gpu(library, monkeypatch):
    call(library, torch.neg, torch.ones(8))
    monkeypatch.setattr(kernels, "LIBRARIES", {("here",): library})
    monkeypatch.setattr(kernels, "_KEPT", kept := [])
    monkeypatch.setattr(kernels, "COSTS", {})
    kernels._forget()
    assert kept == [library._gpus]
    assert len(library._gpu(DEVICE).opened) == 2
