"""The generated pages: tables that follow from the declarations, and nothing that this machine has."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from layerzero import backends
from layerzero.cli import listing
from layerzero.core.arguments import REQUIRED, Axis, Param, TensorSchema
from layerzero.core.dtypes import dtype_name
from layerzero.core.judge import Elementwise
from layerzero.core.kernel import Backend, Kernel, Release
from layerzero.core.limit_kinds import Dtype, Limit, OfTensors, OneOf, Platform
from layerzero.core.operation import Case, Function, Operation
from layerzero.core.plain import PlainFunction
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.schema import OperationSchema
from layerzero.ops import FUNCTIONS, OPERATION_ALIASES, OPERATIONS, PLAIN_FUNCTIONS, PLAIN_OPERATIONS
from layerzero.ops.attention.limits import SameHeads, SdpaEnabled, SquareCausal
from tools import matrix

HEADER = "<!-- Written by `python -m tools docs` from the declarations; edit those. -->"


def builtin_kernels() -> list[Kernel]:
    """The kernels that LayerZero declares, by priority; plugins are left out, for they differ by machine."""
    kernels = list(backends.builtin_kernels())
    return sorted(kernels, key=lambda kernel: (-kernel.priority, kernel.id))


def _neutral(param: Param) -> str:
    return "none" if param.neutral is REQUIRED else f"`{param.neutral}`"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a Markdown table."""
    lines = ["| " + " | ".join(headers) + " |", "|" + " --- |" * len(headers)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    return str(value).replace("|", r"\|").replace("\n", " ")


def code(names: Iterable[object]) -> str:
    """Write names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def _page(*blocks: str) -> str:
    return "\n\n".join([HEADER, *(block for block in blocks if block)]) + "\n"


def libraries() -> str:
    """docs/libraries.md: for each function, the libraries that have kernels for it, by where they run."""
    rows = []
    known: list[Function | PlainFunction] = [*FUNCTIONS.values(), *PLAIN_FUNCTIONS.values()]
    for function in known:
        names = {operation.name for operation in function.operations}
        kernels = [each for each in builtin_kernels() if names.intersection(each.operations)]
        others = "rocm", "hpu", "xpu", "mps"
        cells = [_libraries_on(platforms, kernels) for platforms in (("cpu",), ("cuda",), others)]
        if isinstance(function, PlainFunction):
            cells[1:] = "on its CPU", "on its CPU"
        rows.append([f"`lz.{function.name}`", *cells])
    intro = (
        "Libraries that have kernels for a function; which of them is taken, [support.md](support.md) and `layerzero "
        "explain` say. Where there is none, plain PyTorch runs, slow and right, and says so."
    )
    return _page("# Libraries by function", intro, table(["function", "on a CPU", "on NVIDIA GPUs", "elsewhere"], rows))


def _libraries_on(platforms: tuple[str, ...], kernels: Iterable[Kernel]) -> str:
    found = (each.backend.name for each in kernels if set(platforms).intersection(listing.platforms(each)))
    return ", ".join(dict.fromkeys(found)) or "the reference"


def support() -> str:
    """docs/support.md: for each function, the kernels that may run it and what they demand."""
    intro = (
        "Priority decides, from top to bottom, where nothing was measured. What an adaptation provides is not listed: "
        "views for layouts, copies for dense or aligned memory, repeated heads, folded masks. *Untried* kernels were "
        "written after their library's sources, where no device for them was: they are refused until `layerzero vet` "
        "has let them prove themselves on the machine. [kernels.md](kernels.md) has every limit, accepted argument "
        "and flag."
    )
    blocks = []
    known: list[Function | PlainFunction] = [*FUNCTIONS.values(), *PLAIN_FUNCTIONS.values()]
    for function in known:
        names = [operation.name for operation in function.operations]
        rows = []
        for kernel in builtin_kernels():
            runs = [name for name in names if name in kernel.operations]
            if runs:
                limits = _hard_limits(kernel)
                only = [f"only {', '.join(runs)}"] if len(runs) < len(names) else []
                marks = ["*untried*"] if kernel.untried else []
                dtypes = ", ".join(listing.dtypes(kernel)) or "any"
                platforms = ", ".join(listing.platforms(kernel))
                told = "; ".join([*marks, *only, *(limits or ["none"])])
                rows.append([f"`{kernel.id}`", platforms, dtypes, told])
        if any(operation.has_fallback for operation in function.operations):
            rows.append(["`reference.*`", "all", "any", "none"])
        heading = f"## lz.{function.name}\n\n{', '.join(names)}"
        blocks.append(f"{heading}\n\n{table(['kernel', 'platforms', 'dtypes', 'limits'], rows)}")
    return _page("# What runs where", intro, *blocks)


def _hard_limits(kernel: Kernel) -> list[str]:
    """Limits that no adaptation satisfies, nor the caller's own context."""
    adapted: tuple[type[Limit], ...] = (Platform, Dtype, OfTensors, SameHeads, SdpaEnabled)
    adapted += (SquareCausal,) if "causal" in kernel.folds else ()
    hard = [limit for limit in kernel.limits if not isinstance(limit, adapted)]
    return [each.describe() for each in hard if not (isinstance(each, OneOf) and each.foldable and kernel.folds)]


def operations() -> str:
    """docs/operations.md."""
    aliases = table(
        ["alias", "covers", "where"],
        (
            [f"`{alias}`", code(names), ", ".join(f"{fact} = {value}" for fact, value in implied.items())]
            for alias, (names, implied) in OPERATION_ALIASES.items()
        ),
    )
    intro = (
        "Results follow the dtypes of the arguments, under autocast as without it. `lz.scaled_dot_product_attention` "
        "alone casts as torch's function does. Others want tensors of the wanted dtype.\n\n"
        "`help(lz.attention)` says the arguments, shapes, dtypes and errors of a function.\n\n"
        "A function checks a call and routes it to one operation. Kernels implement operations; each operation also "
        "has a reference in plain PyTorch, which tests compare kernels with and which runs when nothing else may. Of "
        "operations without tensors the reference is the library that defines what they name; torch cannot stand in."
    )
    families = (
        [f"[{family}](operations/{family}.md)", code(each.name for each in found)]
        for family, found in _families().items()
    )
    listed = table(["family", "operations"], families)
    return _page("# Operations", intro, listed, "## Aliases that locks and rules may use", aliases)


def _families() -> dict[str, list[Operation]]:
    """Operations by the first word of their names."""
    found: dict[str, list[Operation]] = {}
    for name, operation in sorted((OPERATIONS | PLAIN_OPERATIONS).items()):
        found.setdefault(name.partition(".")[0], []).append(operation)
    return found


def operations_by_family() -> dict[str, str]:
    """docs/operations/FAMILY.md, by path."""
    return {
        f"docs/operations/{family}.md": _page(f"# Operations: {family}", *map(_operation, found))
        for family, found in _families().items()
    }


def _operation(operation: Operation) -> str:
    schema = operation.schema
    facts = [f"`lz.{listing.function_of(operation.name)}`"]
    facts += [f"layouts {', '.join(operation.layouts)}"] if operation.layouts else []
    facts += [f"generalises `{operation.sibling}`"] if operation.sibling else []
    facts.append(f"writes into {code(schema.mutated)}" if schema.mutated else "writes into no argument")
    tensors = [_tensor(each, "required" if each.required else "optional") for each in schema.inputs]
    tensors += [_tensor(each, f"result where {each.when}" if each.when else "result") for each in schema.outputs]
    params = [
        [f"`{each.name}`", f"`{listing.kind(each.types)}`", str(each.role), _neutral(each)] for each in schema.params
    ]
    cases = [[f"`{case.name}`", _values(case.sizes), _values(case.params)] for case in operation.cases]
    blocks = [
        f"## {operation.name}",
        f"{operation.summary}: {'; '.join(facts)}.",
        table(["tensor", "role", "axes", "dtypes"], tensors),
        table(["parameter", "type", "role", "neutral value"], params),
        *_judged(operation),
        table(["case", "sizes", "parameters"], cases),
    ]
    return "\n\n".join(blocks)


def _judged(operation: Operation) -> list[str]:
    """What a right result is: the tolerance, results that have another judge, and what several runs show."""
    told = []
    judges = operation.judges
    near = Elementwise(operation.tolerance, operation.tolerance_reason)
    own = {name: judge for name, judge in judges.items() if judge != near}
    if len(own) < len(judges):
        rows = [[dtype_name(dtype), each.rtol, each.atol] for dtype, each in operation.tolerance.items()]
        told.append(f"Tolerance against the reference in float64: {operation.tolerance_reason}.")
        told.append(table(["dtype", "relative", "absolute"], rows))
    told += [f"`{name}` is right with {judge}: {judge.reason}." for name, judge in own.items()]
    told += [f"Several runs together: {each.name}; {each.reason}." for each in operation.properties]
    return told


def _tensor(tensor: TensorSchema, role: str) -> list[str]:
    axes = f"({', '.join(tensor.shape_vars)})" if tensor.shape_vars else "see the function"
    dtypes = tensor.dtype_constraint
    name = f"`{tensor.name}`" + (f", given as `{tensor.given_as}`" if tensor.given_as else "")
    return [name, role, axes, ", ".join(sorted(map(dtype_name, dtypes))) if dtypes else "that of the inputs"]


def _values(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "neutral"


def kernels() -> str:
    """docs/kernels.md."""
    intro = (
        "Each kernel as it is declared, in a page for each library. A call is offered to a kernel only if every limit "
        "holds and every argument that differs from its neutral value is accepted. `layerzero explain` says which "
        "limit refused it. Priority decides only where nothing was measured."
    )
    rows = (
        [
            f"[{name}](kernels/{name}.md)",
            len(kernels),
            "; ".join(dict.fromkeys(each.backend.summary for each in kernels)),
        ]
        for name, kernels in _libraries().items()
    )
    references = (
        "## reference\n\nEvery operation of tensors has `reference.<operation>`: its definition in plain PyTorch. It "
        "takes every argument, dtype and platform, gives the same bits each time, has a backward pass and priority 0."
    )
    flags = table(["flag", "meaning"], ([f"`{name}`", meaning] for name, meaning in listing.FLAGS.items()))
    return _page("# Kernels", intro, table(["library", "kernels", "what it is"], rows), references, "## Flags", flags)


def _libraries() -> dict[str, list[Kernel]]:
    """Kernels by the name of their library."""
    found: dict[str, list[Kernel]] = {}
    for kernel in sorted(builtin_kernels(), key=lambda each: (each.backend.name, each.backend.import_name)):
        found.setdefault(kernel.backend.name, []).append(kernel)
    return found


def kernels_by_library() -> dict[str, str]:
    """docs/kernels/LIBRARY.md, by path."""
    pages = {}
    for name, kernels in _libraries().items():
        backends = dict.fromkeys(each.backend for each in kernels)
        blocks = [_library(backend, [each for each in kernels if each.backend == backend]) for backend in backends]
        pages[f"docs/kernels/{name}.md"] = _page(f"# Kernels: {name}", *blocks)
    return pages


def _release(release: Release) -> str:
    return f"{code(release.requires)} for `{release.versions}`{'' if release.proven else ' (to be vetted)'}"


def _library(backend: Backend, kernels: Sequence[Kernel]) -> str:
    names = " or ".join(name for name in backend.distributions if name)
    heading = f"## {backend.name}" + (f" ({names})" if names else "")
    lines = [f"{backend.summary}. Needs {_needs(kernels[0])}."]
    ways = [f"`{each.install}` ({each.beside})" for each in backend.releases]
    ways = ways or ([f"`{backend.install}`"] if backend.install else [])
    lines += [f"Install it: {', or '.join(ways)}."] if ways else []
    lines += [f"<{backend.homepage}>"] if backend.homepage else []
    return "\n\n".join([heading, " ".join(lines), *map(_kernel, kernels)])


def _needs(kernel: Kernel) -> str:
    """What must be installed: distribution, versions, further demands."""
    backend = kernel.backend
    names = " or ".join(name for name in backend.distributions if name)
    releases = " or ".join(
        f"{each.versions} beside {each.beside}{'' if each.proven else ' once it is vetted'}"
        for each in backend.releases
    )
    own = f"{names} {releases or backend.versions}".strip()
    return ", ".join(filter(None, [own, *backend.requires])) or "nothing"


def _priorities(kernel: Kernel) -> str:
    """The priority, and others with the compute capability from which they count."""
    later = [f"{priority} from {major}.{minor} on" for (major, minor), priority in kernel.priority_since.items()]
    return ", ".join([str(kernel.priority), *later])


def _kernel(kernel: Kernel) -> str:
    rows: list[list[object]] = [
        ["operations", code(kernel.operations)],
        ["priority", _priorities(kernel)],
        ["platforms", ", ".join(listing.platforms(kernel))],
        ["dtypes", ", ".join(listing.dtypes(kernel)) or "any"],
        ["layout", kernel.layout or "any"],
        ["further limits", "; ".join(listing.limits(kernel)) or "none"],
        ["arguments accepted", code(kernel.accepts) or "none"],
        ["folded into the mask", code(kernel.folds) or "none"],
        ["flags", code(listing.flags(kernel)) or "none"],
    ]
    rows += [["arguments fixed by a limit", code(kernel.implies)]] if kernel.implies else []
    rows += [["aliases", code(kernel.aliases)]] if kernel.aliases else []
    return f"### {kernel.id}\n\n{table(['property', 'value'], rows)}"


def compatibility() -> str:
    """docs/compatibility.md."""
    backends = sorted(
        {each.backend: None for each in builtin_kernels()}, key=lambda each: (each.name, each.import_name)
    )
    intro = (
        "*Tested*: its kernels passed `layerzero conformance` at that version ([on an H200](measurements/h200.md), or "
        "on a CPU). *Expected*: the declaration was written for this range, from sources or from a neighbouring "
        "version. Outside it a library is refused (`VERSION_UNSUPPORTED`) until `layerzero vet` has let its kernels "
        "prove themselves; a version known to be bad stays refused. `layerzero doctor` says which of these the "
        "installed versions are, and `layerzero libraries --for serving --device H100` which to install together."
    )
    rows = dict.fromkeys(
        (
            backend.name,
            code(name for name in backend.distributions if name) or "comes with torch",
            ("" if any(backend.distributions) else "torch ") + ", ".join(backend.tested) if backend.tested else "none",
            f"`{backend.versions}`" if backend.versions else "any",
            f"`{backend.known_bad}`" if backend.known_bad else "",
            ", ".join(filter(None, [code(backend.requires), *map(_release, backend.releases)])),
            ", ".join(backend.platforms),
        )
        for backend in backends
    )
    headers = ["library", "package", "tested", "expected", "known bad", "needs", "platforms"]
    pairs = (
        [f"`{next(iter(backend.distributions))}`", f"`{package}`", harm]
        for backend in backends
        for package, harm in backend.conflicts
    )
    ran = ["library", "package", "torch", "device", "passed", "wrong", "refused", "run on"]
    taken = (
        "Kernels of libraries that were installed, by the latest run that was kept of each device and torch. `make "
        "conformance` makes a run and takes it in, and names what passed before and does no more."
    )
    blocks = [
        table(headers, rows),
        "## What runs of conformance showed",
        taken,
        table(ran, matrix.cells(matrix.CHECKOUT)),
        "## Packages that do harm when both are installed",
        table(["package", "with", "what goes wrong"], pairs),
    ]
    return _page("# Compatibility", intro, *blocks)


def reasons() -> str:
    """docs/reasons.md."""
    intro = (
        "Why a kernel is refused: a code, the fact that decided, what was wanted and what was got. `layerzero explain` "
        "prints them, `Report.reasons(kernel)` returns them."
    )
    rows = ([f"`{each}`", Reason(each, "{fact}", "{wanted}", "{got}").message] for each in ReasonCode)
    return _page("# Reasons", intro, table(["code", "text"], rows))


def kernel_fields() -> str:
    """The fields of a kernel."""
    return _fields(Kernel)


def operation_fields() -> str:
    """The fields of all that an operation and its function are declared with."""
    kinds = (OperationSchema, TensorSchema, Axis, Param, Case, Operation, Function)
    return "\n\n".join(f"### `lz.{kind.__name__}`\n\n{_fields(kind)}" for kind in kinds)


def _fields(kind: Any) -> str:
    """A row for each field: its default, what it says and when to set it. Raises: KeyError for one without a text."""
    meanings = dict(_described(kind))
    rows = [
        [f"`{each.name}`", _default(each), meanings[each.name].replace("``", "`")]
        for each in dataclasses.fields(kind)
        if each.init
    ]
    return table(["field", "default", "what it says, and when to set it"], rows)


def _described(kind: type) -> Iterator[tuple[str, str]]:
    """Names and texts of a docstring's section of attributes; a text goes on where its lines are indented further."""
    _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    for names, text in re.findall(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
        yield from ((name, " ".join(text.split())) for name in names.split(", "))


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        told = repr(field.default) if isinstance(field.default, (tuple, frozenset)) else str(field.default)
        empty = field.default in ("", (), frozenset())
        return "empty" if empty else "required" if field.default is REQUIRED else f"`{told}`"
    return "required" if field.default_factory is dataclasses.MISSING else "empty"
