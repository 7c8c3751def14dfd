"""A backend is a library; a kernel is one implementation of one or more operations in it, as data."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from layerzero.core.device import PLATFORMS, Device
from layerzero.core.dtypes import dtype_named
from layerzero.core.errors import RegistrationError
from layerzero.core.facts import Facts
from layerzero.core.limit_kinds import Arch, Limit
from layerzero.core.operation import Operation, Tolerance
from layerzero.core.reasons import Reason

_ID = re.compile(r"[^\s,=*?\[\]]{1,200}")
"""What policies, lists in variables and globs can name, and what is left of it as a part of a file's name."""

FLAGS = (
    *("grad", "deterministic", "batch_invariant", "tp_invariant", "graph_safe", "jit"),
    *("checks_indices", "plans_sizes", "handles_empty", "handles_negated", "device_guard"),
)
"""Flags of a kernel that its backend may set for all of its kernels."""

_BY_CALL = ("deterministic", "batch_invariant", "tp_invariant", "stock", "proved_first")  # by a function of facts
_REQUIREMENT_NAME = re.compile(r"^[A-Za-z0-9_.-]+?\s*(?=[<>=!~])")


def within(version: str, specifier: str) -> bool:
    """Whether a version satisfies a specifier; local parts (``+cpu``) are ignored, unreadable versions never do."""
    try:
        return SpecifierSet(specifier).contains(Version(version).public, prereleases=True)
    except InvalidVersion:
        return False


def _is_range(text: str) -> bool:
    try:
        return bool(SpecifierSet(text))
    except InvalidSpecifier:
        return False


_OF_BACKEND: Any = None
"""Default of a flag: what the backend says."""

Load = Callable[[Facts], Callable[..., Any]]


class Trust(StrEnum):
    """Why a kernel may run before it proved itself on this machine."""

    DECLARED = "declared"
    """Built in at a tested version, or registered by its author."""
    PLUGIN = "plugin"
    """Came through an entry point or from a hub: refused where the policy requires vetting, until vetted."""
    UNTRIED = "untried"
    """Built in, never run: no version of its library is ``tested``, or it says so itself; refused like a plugin's."""

    @property
    def needs_verdict(self) -> bool:
        """Whether its kernels are refused until vetted, where the policy requires vetting."""
        return self is not Trust.DECLARED


@dataclass(frozen=True, slots=True)
class Release:
    """Versions of a library that were built for one environment, where each is built for one torch.

    Attributes:
        versions: which, as a PEP 440 specifier.
        requires: what they were built for: ``torch>=2.14,<2.15``.
        install: the command that installs one of them.
        proven: whether the declaration holds for them; where it does not, their kernels prove themselves first.
    """

    versions: str
    requires: tuple[str, ...]
    install: str
    proven: bool = True

    @property
    def beside(self) -> str:
        """What they were built for, as text."""
        return " and ".join(self.requires)


@dataclass(frozen=True, slots=True)
class Backend:
    """A kernel library, described without importing it.

    Attributes:
        name: the source that policies prefer, avoid, deny and allow.
        summary: one line for tables.
        import_name: the module whose presence means installed.
        distribution: the package whose version counts; several names are tried in order.
        versions: those that the declaration holds for (``>=2.13.0.2,<2.14``); others are refused until vetted.
        tested: the versions (of torch, where it comes with torch) whose kernels passed conformance; others within
            ``versions`` are expected to work.
        conflicts: packages that do harm along with it, each with what goes wrong.
        known_bad: versions that nothing makes good: they are known to be wrong, or another project's.
        requires: further demands on the environment: ``torch>=2.10``, ``cuda>=12.3``, ``driver>=575.51``.
        releases: builds of its versions, newest first, where they differ. The one of an installed version must fit. The
            first that fits is what there is to install.
        platforms: platforms that any of its kernels runs on; the others get none of them.
        least_sm: the compute capability from which its kernels run, but for those that bound it themselves.
        install: the command that installs it.
        homepage: where the library lives.
        version: its version where no package tells it, as of a hub kernel.
        refused: why none of its kernels may run here, where that was found before anything of it was imported.
        origin: ``builtin``, ``entry_point``, ``hub``, or, of a program's own, ``code`` or ``decorator``.
        flags: names of the flags of ``Kernel`` that its kernels have, but for those that say False themselves.
    """

    name: str
    summary: str
    import_name: str = ""
    distribution: str | tuple[str, ...] = ()
    versions: str = ""
    tested: tuple[str, ...] = ()
    known_bad: str = ""
    conflicts: tuple[tuple[str, str], ...] = ()
    requires: tuple[str, ...] = ()
    releases: tuple[Release, ...] = ()
    platforms: tuple[str, ...] = ("cpu",)
    least_sm: tuple[int, int] | None = None
    install: str = ""
    homepage: str = ""
    version: str = ""
    refused: Reason | None = None
    origin: str = "builtin"
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := set(self.flags) - set(FLAGS):
            raise RegistrationError(f"{self.name}: flags: wanted names among {', '.join(FLAGS)}, got {sorted(unknown)}")
        ranges = [each for each in (self.versions, self.known_bad) if each]
        ranges += [release.versions for release in self.releases]
        ranges += [_REQUIREMENT_NAME.sub("", requirement, count=1) for requirement in self.demands]
        for text in ranges:
            if not _is_range(text):
                wanted = "ranges such as '>=2.5,<3' and 'torch>=2.10'"
                raise RegistrationError(f"{self.name}: versions and requires: wanted {wanted}, got {text!r}")
        if outside := [each for each in self.tested if self.versions and not within(each, self.versions)]:
            raise RegistrationError(f"{self.name}: tested: wanted versions within {self.versions!r}, got {outside}")

    def __hash__(self) -> int:
        return hash((self.name, self.import_name))  # every candidate of every choice is looked up by its backend

    @property
    def demands(self) -> tuple[str, ...]:
        """What it requires, and what each of its releases does."""
        return (*self.requires, *(each for release in self.releases for each in release.requires))

    def release(self, version: str) -> Release | None:
        """The release that a version belongs to, of those that are known."""
        return next((each for each in self.releases if within(version, each.versions)), None)

    def holds_for(self, version: str) -> bool:
        """Whether the declaration was written for a version."""
        release = self.release(version)
        if self.releases and not (release and release.proven):
            return False
        return not self.versions or within(version, self.versions)

    @property
    def distributions(self) -> tuple[str, ...]:
        """Package names to look for, in order."""
        return self.distribution if isinstance(self.distribution, tuple) else (self.distribution,)

    def kernel(self, name: str, operations: str | tuple[str, ...], load: Load, *more: Limit, **fields: Any) -> Kernel:
        """Declare a kernel of this library: its id, operations and limits; ``fields`` are others of ``Kernel``."""
        of, limits = (operations,) if isinstance(operations, str) else operations, (*fields.pop("limits", ()), *more)
        return Kernel(id=name, operations=of, backend=self, load=load, limits=limits, **fields)


@dataclass(frozen=True, slots=True)
class Revision:
    """A capability descriptor that changed a kernel.

    Attributes:
        name: the file, or what stands for it.
        sha256: hash of its content.
        before: the kernel without it.
    """

    name: str
    sha256: str
    before: Kernel

    def __str__(self) -> str:
        return f"{self.name} (sha256 {self.sha256[:12]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One implementation; everything that choosing needs to know about it.

    A flag that is None is set where the backend's ``flags`` name it.

    Attributes:
        id: ``<backend>.<variant>``, unique.
        operations: names of the operations it implements.
        backend: its library.
        load: given the facts of the plan, import the library and return the callable. Called after selection only. The
            callable gets required tensors by position in schema order and what it ``accepts`` by keyword, in the
            kernel's layout. It returns the operation's results. Calls that agree in the facts read here share it, so
            read here all that it depends on; ``facts.only_this_call()`` excludes them.
        layout: layout of its tensors, None where the operation has none or it takes any. Name the one that the library
            reads; calls in another are moved, and that costs a copy where the library wants contiguous tensors.
        accepts: optional tensors and parameters that it honours; what it does not accept it is never offered. Bounds
            and handles that it names are passed on, those that it does not name are promises it has no use for.
        implies: arguments that a limit pins to the one value the callable computes; they are not passed. For a function
            that always does what other libraries have a flag for.
        renames: canonical argument name to the callable's name for it; ``load`` can return a library's own function.
        folds: arguments that the plan may fold into another one that it accepts (a mask), as its operation can. For a
            library that lacks the arguments themselves; what they are folded into takes memory and time.
        limits: what it demands of a call. Everything that the library gets wrong, refuses or dies of belongs here.
        grad: whether its backward pass is right, as ``conformance`` compares it; autograd calls are refused otherwise.
        deterministic: whether, or for which calls, a call gives the same bits each time. Not where atomics add up.
        batch_invariant: whether, or for which calls, a row has the same bits alone and in every batch.
        tp_invariant: whether, or for which calls, ranks' parts have the bits of the whole, sums by ``lz.tree_sum``.
        asked_for: whether it runs only where a setting asks for what it alone declares: it is slower than others.
        graph_safe: whether it may run under CUDA graph capture: it allocates by torch only, and waits for nothing.
        jit: whether it compiles on first use (over 0.25 s); refused until ``lz.warmup`` built it.
        build_key: what its compiled artefact depends on, for the facts of a call; the call's class if None.
        prebuilt: whether the artefact for a call exists, in an installed package or in the library's cache, so that
            nothing compiles. It is called in each choice.
        cache_folder: the folder in which its library keeps what it compiled, for other processes to find. None where it
            keeps nothing, or may not write. With it or ``prebuilt``, a child process compiles in the background, else a
            thread of this process.
        checks_indices: whether it raises by itself where a place or count leads beyond a tensor; on a CPU the plan
            looks before any other kernel runs.
        plans_sizes: whether its library plans each new size, for as long as a thousand calls take. Where no time is
            known at a size, a kernel with similar latency comes first.
        handles_empty: whether it may see a tensor without elements; the reference runs such calls otherwise.
        handles_negated: whether it reads tensors with the negative bit rightly, as torch does; others get copies.
        device_guard: whether it sets the current device itself; the plan does otherwise.
        workspace_bytes: memory it needs besides its results, for the facts of a call, where that is more than a few MB.
        priority: 0 to 100, what decides where nothing was measured. 10 to 30 for a new kernel.
        priority_since: another priority on devices of at least a compute capability: ``{(9, 0): 55}``. For a library
            that knows nothing of the units that came with them.
        widens: of a kernel that computes half precision in float32: whether that pays for such a call where the CPU
            emulates the dtype. Sizes that vary within a plan (rows, a batch) are read by class alone; equal ones
            (channels) as they are. None for every other kernel.
        proved_first: whether it is refused until ``layerzero vet`` proved it. Such a kernel never ran on such a device,
            or works on a form of its own of what a call names (a converted tokenizer). A function of the facts reads
            those alone that tell a verdict's class.
        stock: whether torch's own function for the operation runs this kernel for such a call. No library replaces
            stock by priority alone. It may read no size. Set it for kernels of torch itself only.
        trust: why it may run here; ``UNTRIED`` where it could not run yet. The registry sets that of a plugin.
        aliases: other names that locks and rules may use, such as those of a former version.
        tolerance: by dtype name, how far it may be from the reference where its operation's tolerance is too narrow.
        tolerance_reason: why it is that far; the conformance report prints it.
        revision: the capability descriptor that changed it, if one did; declarations leave it out.
    """

    id: str
    operations: tuple[str, ...]
    backend: Backend
    load: Load
    layout: str | None = None
    accepts: tuple[str, ...] = ()
    implies: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    folds: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()
    grad: bool = _OF_BACKEND
    deterministic: bool | Callable[[Facts], bool] = _OF_BACKEND
    batch_invariant: bool | Callable[[Facts], bool] = _OF_BACKEND
    tp_invariant: bool | Callable[[Facts], bool] = _OF_BACKEND
    asked_for: bool = False
    graph_safe: bool = _OF_BACKEND
    jit: bool = _OF_BACKEND
    build_key: Callable[[Facts], Hashable] | None = None
    prebuilt: Callable[[Facts], bool] | None = None
    cache_folder: Callable[[], Path | None] | None = None
    checks_indices: bool = _OF_BACKEND
    plans_sizes: bool = _OF_BACKEND
    handles_empty: bool = _OF_BACKEND
    handles_negated: bool = _OF_BACKEND
    device_guard: bool = _OF_BACKEND
    workspace_bytes: Callable[[Facts], int] | None = None
    priority: int = 50
    priority_since: Mapping[tuple[int, int], int] = field(default_factory=dict)
    stock: bool | Callable[[Facts], bool] = False
    widens: Callable[[Facts], bool] | None = None
    proved_first: bool | Callable[[Facts], bool] = False
    trust: Trust = Trust.DECLARED
    aliases: tuple[str, ...] = ()
    tolerance: Mapping[str, Tolerance] = field(default_factory=dict)
    tolerance_reason: str = ""
    revision: Revision | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not _ID.fullmatch(self.id):
            raise RegistrationError(f"id: wanted a name such as 'my_library.my_kernel', got {self.id!r}")
        for name in dict.fromkeys((*FLAGS, *_BY_CALL, "asked_for")):
            flag = getattr(self, name)
            if flag is None:
                object.__setattr__(self, name, name in self.backend.flags)
            elif not isinstance(flag, bool) and not (name in _BY_CALL and callable(flag)):
                wanted = "a function or a bool" if name in _BY_CALL else "a bool"
                raise RegistrationError(f"{self.id}: {name}: wanted {wanted}, got {flag!r}")
        if self.backend.least_sm and not any(isinstance(each, Arch) for each in self.limits):
            object.__setattr__(self, "limits", (Arch(self.backend.least_sm), *self.limits))
        object.__setattr__(self, "renames", MappingProxyType(dict(self.renames)))
        object.__setattr__(self, "tolerance", MappingProxyType(dict(self.tolerance)))
        if bool(self.tolerance) != bool(self.tolerance_reason.strip()):
            got = f"{dict(self.tolerance)} and {self.tolerance_reason!r}"
            raise RegistrationError(f"{self.id}: tolerance and tolerance_reason belong together, got {got}")
        list(map(dtype_named, self.tolerance))  # a misspelt dtype would widen nothing, in silence
        object.__setattr__(self, "priority_since", MappingProxyType(dict(sorted(self.priority_since.items()))))
        for priority in (self.priority, *self.priority_since.values()):
            if not isinstance(priority, int) or not 0 <= priority <= 100:
                raise RegistrationError(f"{self.id}: priority must be 0 to 100, is {priority!r}")
        if not self.operations:
            raise RegistrationError(f"{self.id}: declares no operation")
        if unknown := set(self.renames) - set(self.accepts):
            raise RegistrationError(f"{self.id}: renames {sorted(unknown)} without accepting them")
        for name in self.renames.values():
            if not name.isidentifier() or keyword.iskeyword(name):  # it becomes a word of the plan's text
                raise RegistrationError(f"{self.id}: renames: wanted the name of an argument, got {name!r}")
        if (self.build_key or self.prebuilt or self.cache_folder) and not self.jit:
            raise RegistrationError(f"{self.id}: jit: wanted True with build_key, prebuilt or cache_folder, got False")

    @classmethod
    def of_expression(cls, *operations: Operation, **fields: Any) -> Kernel:
        """Torch's own expression of operations, or their reference where they have none, as a kernel.

        It accepts every argument, and has gradients where nothing is written into. ``fields`` say the rest; a ``load``
        among them comes in place of the expression unless it is None.
        """
        compute = {each.name: each.expression or each.reference for each in operations}
        schema, name = operations[0].schema, operations[0].name
        given: dict[str, Any] = {
            "operations": tuple(compute),
            "load": lambda facts: compute[name if len(compute) == 1 else facts["operation"]],
            "accepts": (*(each.name for each in schema.optional), *schema.chosen, *schema.scalars),
            "grad": not schema.mutated,
        }
        return cls(**given | {field: value for field, value in fields.items() if value is not None})

    def __hash__(self) -> int:
        return hash(self.id)  # its mappings have no hash; measured times are kept by kernel

    @property
    def declared(self) -> Kernel:
        """The kernel as its backend declares it, without descriptors."""
        return self if self.revision is None else self.revision.before.declared

    @property
    def source(self) -> str:
        return self.backend.name

    @property
    def untried(self) -> bool:
        """Whether it never ran before it was shipped."""
        return self.trust is Trust.UNTRIED

    @property
    def is_reference(self) -> bool:
        """Whether this is an operation's own reference."""
        return self.backend.name == REFERENCE_BACKEND.name

    def priority_on(self, device: Device) -> int:
        """What decides on a device where nothing was measured."""
        found = self.priority
        if self.priority_since and device.sm is not None:
            for least, priority in self.priority_since.items():
                found = priority if device.sm >= least else found
        return found

    def is_stock(self, facts: Facts) -> bool:
        """Whether torch's own function runs this kernel for such a call."""
        return self.stock if isinstance(self.stock, bool) else self.stock(facts)

    @property
    def builds_apart(self) -> bool:
        """Whether what another process compiled serves this one."""
        return self.prebuilt is not None or self.cache_folder is not None

    def needs_proof(self, facts: Facts) -> bool:
        """Whether it is refused for such a call until it was proved."""
        return self.proved_first if isinstance(self.proved_first, bool) else self.proved_first(facts)


REFERENCE_BACKEND = Backend("reference", "Operations' own definitions in PyTorch; slow and right", platforms=PLATFORMS)
"""Owner of the kernels that the registry makes from every operation's reference."""
