"""The norms' own references, compiled ahead of time by torch's Inductor: one build for all calls of a class.

``torch.compile`` guards what it made: 20 us a call, and seconds of compiling inside one once a Parameter comes in place
of a tensor, two sizes stop being equal, or the thread count, grad mode or default dtype changes. Here the reference is
exported with its sizes as ranges, those of the class; nothing is guarded, nothing compiles again, and a call costs 3 us
(1 x 4096 float32 on a Xeon, torch 2.13.0, 2026-11-21; torch's own rms_norm 10 us). A build takes 6 to 20 s of a C++
compiler and is kept in Inductor's cache for the next process. Not on GPUs, nor with other versions of torch: with torch
2.11.0 on an H200 host (2026-11-21) artefacts were seen to kill the process that loaded them.
Library: torch 2.13, BSD-3-Clause.
"""

from __future__ import annotations

import functools
import getpass
import hashlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from layerzero.backends.torch.attention import FLOATS
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend
from layerzero.core.operation import Operation
from layerzero.core.recipe import KeptFiles
from layerzero.core.system import disk, forking
from layerzero.ops.norm import declare as norm

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # it imports sympy: half a second of a first call

INDUCTOR = Backend(
    name="inductor",
    summary="Norms and GELU by tanh, compiled by torch's Inductor",
    distribution="torch",
    versions=">=2.13,<2.16",  # the versions whose artefacts were compared with float64
    tested=("2.13.0", "2.14.0", "2.15.0"),
    platforms=("cpu",),
    homepage="https://pytorch.org",
    flags=("deterministic", "jit"),
)

Runner = Callable[[list[Tensor]], list[Tensor]]
_Made = TypeVar("_Made")

_BUILT: dict[tuple[object, ...], list[tuple[int, Runner]]] = {}
"""Of each class, the largest row length that an artefact serves, and the artefact, in rising order."""

_BUILDING = forking.lock()

_OPTIONS = {
    "cpp.dynamic_threads": True,  # otherwise the thread count at the time of compiling is compiled in
    "emulate_precision_casts": True,  # otherwise add_rms_norm normalises the sum as it was before rounding
}


class _Formula(torch.nn.Module):
    """A reference on flat tensors; eps is a tensor too, so that one build serves any."""

    def __init__(self, operation: Operation, extra: dict[str, object]) -> None:
        super().__init__()
        self.reference, self.extra = operation.reference, extra
        self.names = [each.name for each in operation.schema.inputs]

    def forward(self, eps: Tensor, *tensors: Tensor) -> Any:
        return self.reference(**dict(zip(self.names, tensors, strict=True)), eps=eps, **self.extra)


def _bound(facts: Facts, operation: Operation, axes: tuple[int, ...], **extra: object) -> tuple[Runner, Tensor, int]:
    """The artefact for a call, eps as its first argument (a plan has but one), and the length of a row.

    ``axes`` has 2 for each tensor of rows and 1 for each vector.
    """
    rows, low = (1 << (facts.size_bits(name) - 1) for name in ("rows", "hidden"))
    hidden, device = facts.size("hidden"), torch.device(facts.device.torch_type, facts.device.index)
    key = (operation.name, facts["dtype"], facts.device, rows, low)
    with _BUILDING:
        if key not in _BUILT:
            formula = _Formula(operation, extra)
            build = functools.partial(_build, formula, facts, device, axes, rows, low)
            _BUILT[key] = [(top, _loaded(path, device)) for top, path in parts_of(_name(operation, facts), build)]
        run = next(each for top, each in _BUILT[key] if hidden <= top)
    return run, torch.tensor(facts["eps"], dtype=torch.float64, device=device), hidden


def _build(
    formula: _Formula, facts: Facts, device: torch.device, axes: tuple[int, ...], rows: int, low: int
) -> list[tuple[int, Path]]:
    """Compile for rows and row lengths from the given ones up to their doubles, in as many artefacts as that takes."""
    parts: list[tuple[int, Path]] = []
    high = 2 * low - 1
    while not parts or parts[-1][0] < high:
        start = parts[-1][0] + 1 if parts else low
        bounds = (("rows", rows, 2 * rows - 1), ("hidden", start, high))
        dims = [
            torch.export.Dim(name, min=least, max=most) if least < most else torch.export.Dim.STATIC
            for name, least, most in bounds
        ]
        example = (rows * 3 // 2, start)  # sizes that differ: equal ones would be taken for one
        dtype = facts.tensors["input"].dtype
        tensors = [torch.ones(example[2 - count :], dtype=dtype, device=device) for count in axes]
        dynamic = {"eps": None, "tensors": tuple(dict(enumerate(dims[2 - count :])) for count in axes)}
        arguments = (torch.zeros((), dtype=torch.float64, device=device), *tensors)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch 2.13 warns of its own deprecated calls
            program = torch.export.export(formula, arguments, dynamic_shapes=dynamic)
            given = next(node.meta["val"] for node in program.graph.nodes if node.name == "tensors_0")
            bound = functools.partial(_longest_row, str(given.shape[1]), high)
            path, top = compiled(program, facts, _OPTIONS, bound)
        parts.append((top, path))
    return parts


def _loaded(path: Path, device: torch.device) -> Runner:
    return loaded(path, -1 if device.type == "cpu" else device.index).run  # type: ignore[no-any-return]


def loaded(path: Path, index: int = -1) -> Any:
    """The loader of an artefact, without the handling of nested arguments around it, which takes 10 us.

    It is the one of ``torch._inductor.aoti_load_package``, whose import takes a second.
    """
    return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, index)


NOTES = "built"
"""The folder of the notes, next to the artefacts: what was built for which class, by a name that needs no compiler.

A note lists the artefacts of a class, each with the largest row length that it serves. It counts as long as all exist.
"""


def cache_folder() -> Path:
    """Where the artefacts lie, in Inductor's cache, as torch 2.13 names it; found without importing Inductor."""
    return _folder_in(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))


@functools.cache  # called at each miss; torch, too, keeps the folder that it names by the user
def _folder_in(named: str | None) -> Path:
    if named is None:
        try:
            user = getpass.getuser()
        except (KeyError, ModuleNotFoundError, OSError):
            user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "uid"
        user = re.sub(r'[\\/:*?"<>|]', "_", user)
        named = str(Path(tempfile.gettempdir()) / f"torchinductor_{user}")
    return Path(named).absolute() / "layerzero"


@functools.lru_cache(4096)  # called at each miss
def name_of(made_of: tuple[object, ...], *sources: str) -> str:
    """The name of a build: another one for other versions of torch, another processor, or other code in these files."""
    here = torch.__version__, torch.version.git_version, torch.backends.cpu.get_cpu_capability()
    digest = hashlib.sha256("\0".join(map(repr, (*here, *made_of))).encode())
    for source in (__file__, *sources):
        digest.update(_content(source))
    return digest.hexdigest()[:40]


@functools.cache
def _content(source: str) -> bytes:
    return Path(source).read_bytes()


@functools.lru_cache(4096)
def _place(folder: Path, notes: str, name: str) -> str:
    return os.fspath(folder / notes / f"{name}.json")


def found(name: str) -> list[tuple[int, Path]]:
    """The artefacts of a build, if all of them exist; else none."""
    folder = cache_folder()
    try:
        with open(_place(folder, NOTES, name), encoding="utf-8") as file:  # noqa: PTH123  # called at each miss
            noted: list[tuple[int, str]] = json.load(file)
        parts = [(int(top), folder / Path(file).name) for top, file in noted]
    except (OSError, ValueError, TypeError):  # none, or a damaged one: it is built anew
        return []
    return parts if all(path.is_file() for _, path in parts) else []


def apart(build: Callable[[], _Made]) -> _Made:
    """Build in a thread of its own: autocast, inference mode and other state belong to the caller's."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(build).result()


def parts_of(name: str, build: Callable[[], Sequence[tuple[int, Path]]]) -> Sequence[tuple[int, Path]]:
    """The artefacts of a build, which is made and noted if there is none."""
    parts: Sequence[tuple[int, Path]] = found(name)
    if not parts:
        parts = apart(build)
        note(name, parts)
    return parts


def files(name: str) -> list[str]:
    """The files of a build in the folder, its note last; empty where one is missing."""
    parts = found(name)
    return [*(path.name for _, path in parts), f"{NOTES}/{name}.json"] if parts else []


def note(name: str, parts: Sequence[tuple[int, Path]]) -> None:
    """Write down that a build exists. Raises: OSError."""
    place = cache_folder() / NOTES
    place.mkdir(parents=True, exist_ok=True)
    text = json.dumps([(top, path.name) for top, path in parts])
    disk.write_whole(place / f"{name}.json", text.encode(), private=True)


def _name(operation: Operation, facts: Facts) -> str:
    rows, low = (1 << (facts.size_bits(name) - 1) for name in ("rows", "hidden"))
    made_of = operation.name, facts["dtype"], facts.device.name, rows, low, tuple(sorted(_OPTIONS.items()))
    return name_of(made_of, str(norm.__file__))


def compiled(
    program: torch.export.ExportedProgram,
    facts: Facts,
    options: dict[str, Any],
    bound: Callable[[Sequence[Any], ShapeEnv], int],
) -> tuple[Path, int]:
    """Compile a program, or find what was compiled before; tell up to where it is right.

    ``bound`` says that from what the compiler relied on and nothing would ask at run time; kept with the artefact.
    Raises: RuntimeError where the artefact would not serve its class; whatever the compiler raises.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    made_of = (str(program), repr(options), torch.__version__, str(torch.version.git_version), facts.device.name)
    folder, name = cache_folder(), hashlib.sha256("\0".join(made_of).encode()).hexdigest()
    for kept in folder.glob(f"{name}.*.pt2"):
        return kept, int(kept.suffixes[0][1:])
    folder.mkdir(parents=True, exist_ok=True)
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    known = next(each.fake_mode.shape_env for each in inputs if isinstance(each, FakeTensor))
    assert known is not None, "a program without sizes"
    before = len(known.guards)
    part = folder / f"part.{os.getpid()}.{name}.pt2"
    configs = dict(options)  # it adds to them
    torch._inductor.aoti_compile_and_package(program, package_path=str(part), inductor_configs=configs)
    top = bound(known.guards[before:], known)
    return part.replace(folder / f"{name}.{top}.pt2"), top


def _longest_row(row_length: str, high: int, guards: Sequence[Any], known: ShapeEnv) -> int:
    """The longest row that the guards allow: 4096 is such a bound."""
    for guard in guards:
        if {str(symbol) for symbol in guard.expr.free_symbols} != {row_length} or guard.expr.rel_op not in ("<", "<="):
            raise RuntimeError(f"Inductor tied the kernel to {guard.expr}")
        (symbol,) = guard.expr.free_symbols
        high = min(high, int(known.var_to_range[symbol].upper))
    return high


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    run, epsilon, hidden = _bound(facts, norm.RMS, (2, 1))

    def rms_norm(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return run([epsilon, input.view(-1, hidden), weight])[0].view(input.shape)

    return rms_norm


def _load_layer_norm(facts: Facts) -> Callable[..., Any]:
    run, epsilon, hidden = _bound(
        facts, norm.LAYER, (2, 1, 1), normalized_shape=(1,)
    )  # the shape's length alone counts
    # a class does not tell whether there are weight and bias, so its one build always has them
    dtype = facts.tensors["input"].dtype
    ones, zeros = (fill(hidden, dtype=dtype, device=epsilon.device) for fill in (torch.ones, torch.zeros))

    def layer_norm(
        input: Tensor, *, weight: Tensor = ones, bias: Tensor = zeros, normalized_shape: tuple[int, ...], eps: float
    ) -> Tensor:
        return run([epsilon, input.view(-1, hidden), weight.view(hidden), bias.view(hidden)])[0].view(input.shape)

    return layer_norm


def _load_add_rms_norm(facts: Facts) -> Callable[..., Any]:
    run, epsilon, hidden = _bound(facts, norm.ADD_RMS, (2, 2, 1))

    def add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        output = run([epsilon, input.view(-1, hidden), residual.view(-1, hidden), weight])[0]
        increment_version(residual)  # a backward pass that saved it must know
        return output.view(input.shape)

    return add_rms_norm


_LIMITS = (FLOATS, limit.contiguous("input", "residual", "weight", "bias"))

KERNELS = tuple(
    INDUCTOR.kernel(
        f"inductor.{name}",
        operation.name,
        load,
        accepts=accepts,
        limits=_LIMITS,
        prebuilt=KeptFiles(
            cache_folder, functools.partial(lambda operation, facts: files(_name(operation, facts)), operation)
        ),
        priority=30,
    )
    for name, operation, load, accepts in (
        ("rms_norm", norm.RMS, _load_rms_norm, ("eps",)),
        ("layer_norm", norm.LAYER, _load_layer_norm, ("normalized_shape", "weight", "bias", "eps")),
        ("add_rms_norm", norm.ADD_RMS, _load_add_rms_norm, ("eps",)),
    )
)
