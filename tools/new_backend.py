"""``python -m tools new-backend``: the files of a backend, in a checkout of LayerZero or as a package of its own."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from layerzero.core.operation import Operation
from layerzero.core.system.disk import write_whole
from layerzero.engine.registry import REGISTRY
from layerzero.ops import function_of
from tools import backend_template as template
from tools.backend_template import Subject

TABLE = "src/layerzero/backends/__init__.py"
PROJECT = "pyproject.toml"


def answer(name: str, operation: str, checkout: Path, package: Path | None) -> list[str]:
    """Write the files, of a package where a folder for one is given. Returns: what to say.

    Raises: ValueError for a name that is taken or no module's; UnknownOperationError.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ValueError(f"NAME: wanted the library's module, in small letters like my_library, got {name!r}")
    subject = Subject(name, *_asked(operation))
    texts = _as_package(subject, package / name) if package else _in_checkout(subject, checkout)
    taken = [path for path in texts if path.exists() and path not in (checkout / TABLE, checkout / PROJECT)]
    if taken:
        raise ValueError(f"{name}: wanted files that do not exist yet, got {', '.join(map(str, taken))}")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    steps = [f"  {number}. {step}" for number, step in enumerate(_steps(subject, package), 1)]
    return [*(f"wrote {path}" for path in texts), "next steps:", *steps]


def _asked(operation: str) -> tuple[tuple[Operation, ...], str]:
    """The operations that a function, an operation or an alias names, and what to call their kernel."""
    known = REGISTRY.operations()
    names = [operation] if operation in known else REGISTRY.operations_named(operation)  # not its prefix's as well
    found = tuple(REGISTRY.operation(name) for name in names)
    tensors = {(bool(each.layouts), *(tensor.name for tensor in each.schema.required)) for each in found}
    if len(tensors) > 1:
        wanted = "operations of the same tensors, all or none in a layout"
        raise ValueError(f"--operation {operation}: wanted {wanted}, got {', '.join(names)}; name one")
    function = function_of(names[0])
    whole = function is not None and {each.name for each in function.operations} == set(names)
    return found, function.name if function is not None and whole else names[0]


def _in_checkout(subject: Subject, root: Path) -> dict[Path, str]:
    name = subject.name
    if not (root / TABLE).is_file():
        raise ValueError(f"{root}: wanted a source checkout of layerzero, got none; --package writes a package")
    folder = root / "src/layerzero/backends" / name
    if folder.exists():
        raise ValueError(f"{name}: wanted a name without a folder in src/layerzero/backends, got {folder}")
    return {
        root / f"src/layerzero/backends/{name}.py": template.declaration(subject),
        root / f"tests/kernels/test_{name}.py": template.test_file(subject, f"layerzero.backends.{name}"),
        root / TABLE: _with_entry(root / TABLE, r"(BUILTIN\b[^(]*\(\n)(.*?)(^\))", name, "    {}\n"),
        root / PROJECT: _with_entry(
            root / PROJECT, r"(\[\[tool\.mypy\.overrides\]\]\nmodule = \[)([^\]]*)(\])", f"{name}.*", "{}"
        ),
    }


def _with_entry(path: Path, pattern: str, entry: str, line: str) -> str:
    """A file with one more quoted name in a sorted list. Raises: ValueError if the list is not found."""
    text = path.read_text(encoding="utf-8")
    found = re.search(pattern, text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"{path}: wanted a list that {entry!r} belongs to, got none; has its form changed?")
    names = sorted({*re.findall(r'"([^"]+)"', found[2]), entry})
    quoted = [line.format(f'"{name}"') for name in names]
    block = "".join(each.replace("\n", ",\n") for each in quoted) if line.endswith("\n") else ", ".join(quoted)
    return f"{text[: found.start(2)]}{block}{text[found.end(2) :]}"


def _as_package(subject: Subject, folder: Path) -> dict[Path, str]:
    if folder.exists():
        raise ValueError(f"{folder}: wanted a folder that does not exist yet, got one")
    module = f"layerzero_{subject.name}"
    return {
        folder / PROJECT: template.package(subject, module),
        folder / f"src/{module}/__init__.py": template.declaration(subject),
        folder / f"tests/test_{subject.name}.py": template.test_file(subject, module),
    }


def _steps(subject: Subject, package: Path | None) -> list[str]:
    name, kernel = subject.name, f"{subject.name}.{subject.kernel}"
    steps = ["fill in _library(), the call in run(), and the limits"]
    steps += [f"pip install -e {package / name}"] if package else []
    steps.append(f"layerzero conformance --kernel {kernel}, until nothing is wrong")
    if package:
        return [*steps, f"layerzero vet --kernel {kernel}: a plugin runs where it proved itself"]
    tested = f"name versions= and tested= of the backend: calls wait for `layerzero vet --kernel {kernel}` without them"
    return [*steps, tested, "python -m tools docs, and a line in CHANGELOG.md", "make check"]
