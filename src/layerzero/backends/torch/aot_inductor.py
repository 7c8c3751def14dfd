"""Programs compiled ahead of time by torch's AOTInductor, kept in Inductor's cache: compiled, noted, found, loaded.

A program is exported with its sizes as ranges, those of a class of calls; nothing is guarded, and nothing compiles
again. A build takes 6 to 30 s of a C++ compiler, and serves the next process, too.
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
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from layerzero.core.facts import Facts
from layerzero.core.recipe import KeptFiles
from layerzero.core.system import disk, forking

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # it imports sympy: half a second of a first call

Runner = Callable[[list[Tensor]], list[Tensor]]
_Made = TypeVar("_Made")

VERSIONS: dict[str, Any] = {"versions": ">=2.13,<2.16", "tested": ("2.13.0", "2.14.0", "2.15.0")}
"""Of torch: those whose artefacts were compared with float64."""

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


def kept_files(name: Callable[[Facts], str]) -> KeptFiles:
    """The files of the build that a call needs, by its name."""
    return KeptFiles(cache_folder, lambda facts: files(name(facts)))


def sizes_between(name: str, least: int, most: int) -> Any:
    """A range of sizes as an axis of an exported program; a single one is no range."""
    return torch.export.Dim(name, min=least, max=most) if least < most else torch.export.Dim.STATIC


class Loaded(Generic[_Made]):
    """What is loaded in this process by its key, made one after the other."""

    def __init__(self) -> None:
        self.made: dict[Hashable, _Made] = {}
        self._making = forking.lock()

    def get(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """What a key stands for; warmup is the only caller for which it is made."""
        with self._making:
            if key not in self.made:
                self.made[key] = make()
            return self.made[key]


def compiled(
    module: torch.nn.Module,
    arguments: tuple[Tensor, ...],
    dynamic: dict[str, Any],
    facts: Facts,
    options: dict[str, Any],
    bound: Callable[[torch.export.ExportedProgram, Sequence[Any], ShapeEnv], int] | None = None,
) -> tuple[int, Path]:
    """Export a module with sizes as ranges and compile it, or find what was compiled before; up to where it is right.

    ``bound`` says that from what the compiler relied on and nothing would ask at run time; kept with the artefact.
    Without it the compiler may rely on nothing more, and 0 is returned.
    Raises: RuntimeError where the artefact would not serve its class; whatever the compiler raises.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch 2.13 warns of its own deprecated calls
        program = torch.export.export(module, arguments, dynamic_shapes=dynamic)
        made_of = (str(program), repr(options), torch.__version__, str(torch.version.git_version), facts.device.name)
        folder, name = cache_folder(), hashlib.sha256("\0".join(made_of).encode()).hexdigest()
        for kept in folder.glob(f"{name}.*.pt2"):
            return int(kept.suffixes[0][1:]), kept
        folder.mkdir(parents=True, exist_ok=True)
        inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
        known = next(each.fake_mode.shape_env for each in inputs if isinstance(each, FakeTensor))
        assert known is not None, "a program without sizes"
        before = len(known.guards)
        part = folder / f"part.{os.getpid()}.{name}.pt2"
        configs = dict(options)  # it adds to them
        torch._inductor.aoti_compile_and_package(program, package_path=str(part), inductor_configs=configs)
        guards = known.guards[before:]
        if guards and bound is None:
            raise RuntimeError(f"Inductor tied the kernel to {', '.join(str(guard.expr) for guard in guards)}")
        top = 0 if bound is None else bound(program, guards, known)
        return top, part.replace(folder / f"{name}.{top}.pt2")


def loaded(path: Path) -> Runner:
    """Load an artefact, without the handling of nested arguments around it, which takes 10 us.

    It is the one of ``torch._inductor.aoti_load_package``, whose import takes a second.
    """
    return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1).run
