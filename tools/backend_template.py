"""The files that ``python -m tools new-backend`` writes: a declaration, its test, and a package around them."""

from __future__ import annotations

import builtins
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import Parameter

from layerzero.core.operation import Operation
from layerzero.core.schema import OperationSchema, TensorSchema
from layerzero.ops import function_of

WIDTH = 120
"""Longest line of the project's own files."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a backend is written for.

    Attributes:
        name: the library's module, which names the backend.
        operations: what its kernel implements; all take the same tensors.
        kernel: the kernel's name behind the library's.
    """

    name: str
    operations: tuple[Operation, ...]
    kernel: str

    @property
    def schema(self) -> OperationSchema:
        """The schema of the first operation."""
        return self.operations[0].schema

    @property
    def constant(self) -> str:
        """The name of the library's ``Backend``."""
        return self.name.upper()

    @property
    def loader(self) -> str:
        """The name of the function that loads the kernel."""
        return f"_load_{self.kernel.replace('.', '_')}"

    def accepted(self) -> list[str]:
        """Optional arguments that a kernel should honour at least: those that the public function takes by position."""
        every = [name for each in self.operations for name in _choices(each.schema)]
        function = function_of(self.operations[0].name)
        if function is None:
            return list(dict.fromkeys(every))
        positional = [each.name for each in function.parameters if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
        return [name for name in positional if name in every]

    def left_out(self) -> list[str]:
        """Arguments that the operations have beside those."""
        known = {*(each.name for each in self.schema.required), *self.accepted()}
        return list(
            dict.fromkeys(name for each in self.operations for name in each.schema.arguments if name not in known)
        )


def _optional(schema: OperationSchema) -> list[str]:
    return [each.name for each in schema.optional]


def _choices(schema: OperationSchema) -> list[str]:
    """Optional tensors, and parameters that change a result."""
    return [*_optional(schema), *schema.chosen, *schema.scalars]


def declaration(subject: Subject) -> str:
    """The file of a backend."""
    name, names, load = subject.name, ", ".join(each.name for each in subject.operations), _load(subject)
    told = "\n".join(_wrapped(f"# Operations: {names}.", "# ", 0))
    torch = "import torch\n" if "torch." in load else ""
    torch += "from torch import Tensor\n\n" if "Tensor" in load else "\n" if torch else ""
    return f'''"""{name}: what its limits follow from, what was measured (device, versions, date).

Library: {name}, version and licence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

{torch}from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel

{told}
# What may be relied on, and every field of Kernel: docs/backends.md of LayerZero.

{subject.constant} = Backend(
    name="{name}",
    summary="One line for tables",
    import_name="{name}",  # the module whose presence means installed
    distribution="{name}",  # the package whose version counts; with it belong `versions` and `tested`
    platforms=("cpu",),
    install="pip install {name}",
)


def _library() -> Any:
    """Import the library; this is the only place that does, and it runs after a kernel was chosen."""
    raise NotImplementedError(f"a template: wanted the import of {name} in _library() of {{__file__}}, got none yet")


{load}


KERNELS = (
    Kernel(
        id="{name}.{subject.kernel}",
        operations={_tuple(each.name for each in subject.operations)},
        backend={subject.constant},
        load={subject.loader},
{_fields(subject)}        priority=20,  # decides where nothing was measured: 10 to 30 for a new kernel
        # deterministic, grad, graph_safe: False until conformance shows them; `flags` of the backend sets them for all
    ),
)
'''


def _fields(subject: Subject) -> str:
    first, schema = subject.operations[0], subject.schema
    lines = (
        [f'layout="{first.layouts[0]}",  # of {" or ".join(first.layouts)}: what the library reads']
        if first.layouts
        else []
    )
    if subject.accepted():
        lines.append(f"accepts={_tuple(subject.accepted())},")
    if subject.left_out():
        lines += _wrapped(
            f"# not accepted: {', '.join(subject.left_out())}; a call that brings one is refused", "# ", 8
        )
    copied = [each.name for each in schema.required if not each.resident and not each.mutated]
    dense = _called("limit.contiguous", [_quoted(name) for name in copied], 12, ",")
    note = "# others are copied before the call"
    beside = len(dense) == 1 and len(f"{dense[0]}  {note}") <= WIDTH - 12
    lines += [
        "limits=(",
        '    limit.platform("cpu"),',
        '    limit.dtype("float32"),',
        *(f"    {line}" for line in ([f"{dense[0]}  {note}"] if beside else [note, *dense])),
        "),",
    ]
    return "".join(f"        {line}\n" for line in lines)


def _load(subject: Subject) -> str:
    schema = subject.schema
    results = [each for each in schema.outputs if not each.when]
    kind = {0: "None", 1: "Tensor"}.get(len(results), f"tuple[{', '.join(['Tensor'] * len(results))}]")
    given = [each.name for each in schema.required] + [f"{name}={name}" for name in subject.accepted()]
    answer = f"output: {kind} = " if results else ""
    body = _called(f"{answer}library.{subject.kernel.rpartition('.')[2]}", given, 8)
    body += ["return output"] if results else []
    layout = f", in {subject.operations[0].layouts[0]}" if subject.operations[0].layouts else ""
    shapes = ", ".join(map(_shape, schema.required)) + f" → {', '.join(map(_shape, results)) or 'none'}"
    lines = [
        f"def {subject.loader}(facts: Facts) -> Callable[..., Any]:",
        f'    """Give what runs{layout}.',
        "",
        *(f"    {line}" for line in _wrapped(f"Shapes: {shapes}", "    ", 4)),
        *([f"    Writes into {' and '.join(schema.mutated)}."] if schema.mutated else []),
        '    """',
        "    library = _library()",
        "",
        *_signature(subject, kind),
        *(f"        {line}" for line in body),
        "",
        "    return run",
    ]
    return "\n".join(lines)


def _signature(subject: Subject, kind: str) -> Iterator[str]:
    taken = [f"{each.name}: Tensor" for each in subject.schema.required]
    keywords = [_keyword(subject, name) for name in subject.accepted()]
    every = [*taken, *(["*"] if keywords else []), *keywords]
    line = f"    def run({', '.join(every)}) -> {kind}:"
    if len(line) <= WIDTH:
        yield line
        return
    yield "    def run("
    yield from (f"        {text}," for text in every)
    yield f"    ) -> {kind}:"


def _keyword(subject: Subject, name: str) -> str:
    """A keyword of the kernel; what some operations lack, or a call may leave out, has a default."""
    schemas = [each.schema for each in subject.operations if name in each.schema.arguments]
    schema = schemas[0]
    if name in _optional(schema):
        return f"{name}: Tensor | None = None"
    declared = schema.param(name)
    text = " | ".join(map(_type, declared.kinds))
    text += " | None" if declared.neutral is None else ""
    default = f" = {declared.neutral!r}" if len(schemas) < len(subject.operations) else ""
    return f"{name}: {text}{default}"


def _type(kind: type) -> str:
    if kind is tuple:
        return "tuple[int, ...]"
    return kind.__name__ if hasattr(builtins, kind.__name__) else f"{kind.__module__}.{kind.__name__}"


def _called(target: str, given: Sequence[str], indent: int, ending: str = "") -> list[str]:
    """A call in as few lines as the project's formatter gives it: one, three, or one for each argument."""
    inside = ", ".join(given)
    if indent + len(f"{target}({inside}){ending}") <= WIDTH:
        return [f"{target}({inside}){ending}"]
    lines = [inside] if indent + 4 + len(inside) <= WIDTH else [f"{each}," for each in given]
    return [f"{target}(", *(f"    {line}" for line in lines), f"){ending}"]


def _shape(tensor: TensorSchema) -> str:
    return f"{tensor.name} ({', '.join(tensor.shape_vars)})"


def _tuple(names: Iterator[str] | Sequence[str]) -> str:
    texts = [_quoted(name) for name in names]
    inside = ", ".join(texts) + ("," if len(texts) == 1 else "")
    return (
        f"({inside})"
        if len(inside) < WIDTH - 24
        else "(\n" + "".join(f"            {each},\n" for each in texts) + "        )"
    )


def _quoted(name: str) -> str:
    return f'"{name}"'


def _wrapped(text: str, further: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH - indent, subsequent_indent=further)


def test_file(subject: Subject, module: str) -> str:
    """The test of a backend's kernels; ``module`` is what declares them."""
    return f'''"""Kernels of {subject.name} against their references; skipped where the library is absent."""

from __future__ import annotations

import pytest

from {module} import KERNELS
from layerzero.testing import conformance


@pytest.mark.parametrize("kernel", [kernel.id for kernel in KERNELS])
def test_it_conforms(kernel):
    report = conformance.run([kernel], calls=10).kernel(kernel)
    if report.refused:
        pytest.skip(report.refused)
    assert report.ok, str(report)
    assert report.passed, str(report)
'''


def package(subject: Subject, module: str) -> str:
    """``pyproject.toml`` of a package with one backend."""
    return f"""[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "layerzero-{subject.name.replace("_", "-")}"
version = "0.1.0"
description = "Kernels of {subject.name} for LayerZero"
requires-python = ">=3.11"
dependencies = ["layerzero"]

[project.entry-points."layerzero.backends"]
{subject.name} = "{module}"

[tool.setuptools.packages.find]
where = ["src"]
"""
