"""Ports: what the engine has done by the layers above it, which it cannot import.

``layerzero._assembly`` fills them as this module is imported. The defaults do nothing and remember nothing on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerzero import core
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger
from layerzero.core.operation import Function
from layerzero.core.plan import Plan
from layerzero.core.recipe import Workspace

if TYPE_CHECKING:
    from layerzero.backends.hub.build import Build


def _no_call(name: str) -> Any:
    raise KeyError(f"wanted a public function, got {name!r}, and layerzero.engine.functions is not connected")


@dataclass(slots=True)
class Services:
    """The ports, each a function.

    Attributes:
        ledger: open what is remembered about kernels.
        update_descriptors: load the capability descriptors that are configured now; tells whether all are in force.
        call: the public function of a name, as :class:`layerzero.engine.call.Call`.
        register_function: give the operations of a plugin their public function.
        importing: mark a plugin of a version on disk while it is imported; gives how it ended an earlier process.
        try_hub: import builds of the hub in a child process; gives what is wrong with each, by its hash.
        sample: let a plan time a share of its calls.
        vet_later: run kernels in a child process, in the background, for the class of a call.
        build_later: build kernels in the background for a call.
        workspace: what was measured of the memory that a kernel takes for calls like this one.
        builds: what calls of this machine would choose and is not built, one line each.
        isolate: load a kernel in a process of its own; gives what calls it there.
        unable_to_isolate: what keeps a kernel's library from a process of its own: fact, wanted, got and next step.
    """

    ledger: Callable[[], Ledger] = Ledger
    update_descriptors: Callable[[], bool] = lambda: True
    call: Callable[[str], Any] = _no_call
    register_function: Callable[[Function], object] = lambda *_: None
    importing: Callable[[str, str], AbstractContextManager[str]] = lambda *_: nullcontext("")
    try_hub: Callable[[Sequence[Build]], Mapping[str, str]] = lambda builds: {each.sha256: "" for each in builds}
    sample: Callable[[Plan, Function, float], None] = lambda *_: None
    vet_later: Callable[[Iterable[Kernel], Facts], None] = lambda *_: None
    build_later: Callable[[Iterable[Kernel], Facts], None] = lambda *_: None
    workspace: Callable[[Kernel, Facts], Workspace | None] = lambda *_: None
    builds: Callable[[], list[str]] = list
    isolate: Callable[[Kernel, Facts], Callable[..., Any]] = lambda kernel, facts: kernel.load(facts)
    unable_to_isolate: Callable[[Kernel, Any], tuple[str, object, object, str] | None] = lambda *_: None


SERVICES = Services()
"""The ports of this process."""

for _install in core.INSTALLERS:
    _install(SERVICES)
