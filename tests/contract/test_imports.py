"""Imports point one way, and importing layerzero loads no kernel library and little else."""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

import layerzero
from layerzero.backends import builtin_kernels
from layerzero.integrations import diffusers, transformers_patches

ROOT = Path(layerzero.__file__).parent
ORDER = (
    *(
        "_native",
        "core",
        "ops",
        "backends",
        "engine",
        "inspection",
        "testing",
        "tuning",
        "serving",
        "integrations",
        "cli",
    ),
)
ROOMS = {
    "tuning": ("prediction", "storage", "verification", "measurement"),
    "integrations.optimize": ("swaps", "times", "attention", "modules", "layers", "models", "selection", "entrance"),
}
"""The same within a folder: its folders, and files to their right."""

ASSEMBLY = "layerzero._assembly"
"""The one file that the order does not bind; only the package's own ``__init__`` imports it."""

LARGEST_CIRCLE = 5
"""Files that import each other: ``core`` describes an operation in five."""

PROJECT = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())
MODULE_OF = {"PyYAML": "yaml"}
"""Packages that are imported by another name."""

DEPENDENCIES = {
    MODULE_OF.get(name, name) for name in (re.match(r"[\w-]+", each)[0] for each in PROJECT["project"]["dependencies"])
}


def modules():
    return sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT)


class Read(NamedTuple):
    """What a file imports."""

    imported: list[str]
    named: set[str]
    """The same with each name that is taken from a module, and modules that are imported by their names."""
    at_top: list[tuple[int, str]]
    """Lines and libraries of what its import imports."""


def name_of(called):
    """The last name of what is called: the text of all calls took 2 s."""
    return getattr(called, "attr", None) or getattr(called, "id", "")


@functools.cache
def read(path):
    """Each file is parsed once."""
    tree, found = ast.parse(path.read_text()), Read([], set(), [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
            found.imported.extend(modules)
            found.named.update(modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.imported.extend(names if node.module == "layerzero" else [node.module])
            found.named.update(names)
        elif isinstance(node, ast.Call) and name_of(node.func).endswith("import_module"):
            found.named.update(str(each.value) for each in node.args if isinstance(each, ast.Constant))
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        found.at_top.extend((node.lineno, name.split(".")[0]) for name in names)
    return found


def imported(path):
    return read(path).imported


@functools.cache
def libraries():
    """Libraries that may be absent: every one that some file imports, and every one that a backend is known by."""
    names = {name.split(".")[0] for path in ROOT.rglob("*.py") for name in imported(path)}
    names |= {kernel.backend.import_name.split(".")[0] for kernel in builtin_kernels()}
    return names - sys.stdlib_module_names - DEPENDENCIES - {"", "layerzero", "layerzero_engines"}  # ours


def test_the_libraries_of_backends_are_known():
    """What the next tests look for follows from the declarations."""
    assert {"onnxruntime", "flash_attn_interface", "vllm", "transformers"} <= libraries()
    assert not {"torch", "msgspec", "yaml"} & libraries()


def test_mypy_says_the_same_where_a_library_is_absent():
    (skipped,) = (each for each in PROJECT["tool"]["mypy"]["overrides"] if each.get("ignore_missing_imports"))
    used = {name for path in ROOT.rglob("*.py") for name in imported(path) if name.split(".")[0] in libraries()}
    missing = {
        f"{name.split('.')[0]}.*"
        for name in used
        if not any(fnmatch.fnmatchcase(name, each) or f"{name}.*" == each for each in skipped["module"])
    }
    assert not missing, f"pyproject.toml, [[tool.mypy.overrides]] with ignore_missing_imports: add {sorted(missing)}"


def test_ranges_of_versions_are_said_alike_where_they_are_said_twice():
    extras = PROJECT["project"]["optional-dependencies"]
    for name, known in (("transformers", transformers_patches.VERSIONS), ("diffusers", diffusers.TESTED)):
        (told,) = extras[name]
        assert Requirement(told) == Requirement(f"{name}{known}")
    once = {Requirement(each).name: each for name in extras if name != "dev" for each in extras[name]}
    again = {each: once.get(Requirement(each).name, each) for each in extras["dev"]}
    assert again == {each: each for each in again}


def layer(name):
    parts = name.split(".")
    return parts[1] if parts[0] == "layerzero" and len(parts) > 1 else None


def test_imports_point_leftwards():
    place = {name: number for number, name in enumerate(ORDER)}
    strangers = {path.relative_to(ROOT).parts[0] for path in modules()} - place.keys()
    assert not strangers, f"{strangers} are no layers; the layers are {ORDER}"
    wrong = [
        f"{path}: imports {name}, which lies to its right"
        for path in modules()
        for name in imported(path)
        if place.get(layer(name), 0) > place[path.relative_to(ROOT).parts[0]]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_operating_system_lies_below_the_vocabulary():
    """``core.system`` knows of the package what a device is, and no more."""
    for path in (ROOT / "core" / "system").glob("*.py"):
        for name in imported(path):
            known = name.startswith(("layerzero.core.system", "layerzero.core.device"))
            assert known or layer(name) is None, f"{path} imports {name}"


def test_what_lies_outside_the_layers_is_known():
    assert {path.stem for path in ROOT.glob("*.py")} == {"__init__", "__main__", "_assembly"}
    assert not [path for path in modules() if ASSEMBLY in imported(path)]


def module_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def arrows():
    """The modules that each module imports, in functions and for types alone, too.

    Nothing leads to the package's own ``__init__``: Python imports it before every module of the package.
    """
    paths = {module_of(path): path for path in ROOT.rglob("*.py")}
    found = {}
    for module, path in paths.items():
        named = read(path).named
        named = named | {name.rpartition(".")[0] for name in named - paths.keys()}  # of what a module holds
        found[module] = (named & paths.keys()) - {module, "layerzero"}
    return found


def circles(arrows):
    """Sets of modules each of which leads to all others of its set."""
    reached = {}
    for module in arrows:
        found, ahead = set(), [module]
        while ahead:
            more = arrows[ahead.pop()] - found
            found |= more
            ahead += more
        reached[module] = found
    return {frozenset(each for each in reached[module] if module in reached[each]) for module in arrows}


def test_circles_of_imports_are_small():
    """Of all imports. The ports of ``engine.services`` keep the engine from importing what imports it."""
    known = arrows()
    assert ASSEMBLY in known["layerzero"]
    large = [circle for circle in circles(known) if len(circle) > LARGEST_CIRCLE]
    lines = [f"{each} imports {', '.join(sorted(known[each] & circle))}" for circle in large for each in sorted(circle)]
    assert not large, f"{max(map(len, large))} modules import each other:\n" + "\n".join(lines)


@pytest.mark.parametrize("house", ROOMS)
def test_rooms_import_leftwards(house):
    inside, rooms = f"layerzero.{house}.", ROOMS[house]
    assert {path.parent.name for path in ROOT.glob(f"{house.replace('.', '/')}/*/__init__.py")} <= set(rooms)
    for module, names in arrows().items():
        room = module.removeprefix(inside).split(".")[0]
        if module.startswith(inside):
            assert room in rooms, f"{module}: the rooms are {rooms}"
            right = {f"{inside}{each}" for each in rooms[rooms.index(room) + 1 :]}
            assert not [name for name in names if ".".join(name.split(".")[: inside.count(".") + 1]) in right], module


OF_FRAMEWORKS = {
    "backends/triton_kernels.py": {"triton"},
    "integrations/sglang.py": {"sglang"},
    "integrations/vllm.py": {"vllm"},
    "integrations/vllm_latent.py": {"vllm"},
    "integrations/vllm_operators.py": {"vllm"},
}
"""Classes that a framework's registry imports by their names derive from its own; Triton's kernels are its functions.

What declares kernels imports none of these files at its top."""


def test_no_library_is_imported_at_the_top_of_a_module():
    wrong = [
        f"{path}:{line}: {name}"
        for path in modules()
        for line, name in read(path).at_top
        if name in libraries() and name not in OF_FRAMEWORKS.get(path.relative_to(ROOT).as_posix(), ())
    ]
    assert not wrong, "\n".join(wrong)


FIRST_CALL_NEEDS = {"layerzero", "msgspec", "packaging", "platformdirs", "torch"}
"""What the first call of a process may import beside the standard library, its kernel's library apart."""


def test_importing_loads_little_and_no_device_declarations_nothing_and_the_first_call_little():
    script = f"""
import sys, torch

def imported(since):
    return {{name.split(".")[0] for name in set(sys.modules) - since}} - sys.stdlib_module_names

known = set(sys.modules)
import layerzero as lz
assert imported(known) == {{"layerzero"}}, imported(known)
added = {{name for name in set(sys.modules) - known if name.startswith("layerzero.")}}
few = {{"core", "core.import_hook", "engine", "engine.namespace"}}
assert added == {{f"layerzero.{{name}}" for name in few}}, added
torch.ops.layerzero.rms_norm
engine = [name for name in sys.modules if name.startswith("layerzero.engine.")]
assert len(engine) < 5, engine
assert not torch.cuda.is_initialized()
lz.rms_norm
before = set(sys.modules)
lz.list_kernels()
assert imported(before) == {{"layerzero"}}, ("declarations import", imported(before))
assert "layerzero.tuning.storage.database" not in sys.modules
lz.explain("rms_norm", torch.ones(2, 8), torch.ones(8))
loaded = imported(known) & set({sorted(libraries())!r})
assert not loaded, ("declarations import libraries", loaded)
heavy = imported(known) & {{"torch", "sympy", "triton"}}
assert not heavy, ("declarations import what a call does not need", heavy)
assert not torch.cuda.is_initialized()
lz.lock("norm.rms", "torch.rms_norm")
lz.rms_norm(torch.ones(2, 8), torch.ones(8))
assert imported(known) <= {FIRST_CALL_NEEDS!r}, ("the first call imports", imported(known))
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_help_does_not_wait_for_torch():
    script = """
import sys
from layerzero.cli.app import main
for arguments in (["--help"], ["--version"], ["explain", "--help"], ["config", "--help"]):
    sys.argv = ["layerzero", *arguments]
    try:
        main(prog_name="layerzero")
    except SystemExit as ended:
        assert not ended.code
    assert "torch" not in sys.modules, arguments
"""
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert "explain" in said


def test_files_have_a_size_that_a_reader_can_take_in():
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules()}
    assert not {name: lines for name, lines in long.items() if lines > 400}


def test_names_say_what_is_inside():
    vague = {"utils", "util", "helpers", "common", "base", "misc", "manager"}
    assert not [path for path in modules() if path.stem in vague or path.parent.name in vague]


def test_everything_exported_exists():
    for name in layerzero.__all__:
        assert getattr(layerzero, name) is not None


def test_what_benchmarks_examples_and_tools_import_is_there():
    """No type checker reads them, and some run on a GPU only."""
    checkout = ROOT.parents[1]
    absent = []
    for path in (each for folder in ("benchmarks", "examples", "tools") for each in (checkout / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("layerzero"):
                continue
            try:
                module = importlib.import_module(node.module)
            except ImportError as error:
                if not (error.name or "").startswith("layerzero"):
                    continue  # a library that is not here
                absent.append(f"{path.name}:{node.lineno}: {node.module}")
                continue
            names = [each.name for each in node.names if not hasattr(module, each.name)]
            if hasattr(module, "__path__"):
                names = [each for each in names if find_spec(f"{node.module}.{each}") is None]
            absent += [f"{path.name}:{node.lineno}: {each} of {node.module}" for each in names]
    assert not absent
