"""Settings that hold in a ``with`` block: in one thread or task, entered and left as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from layerzero.core.errors import PolicyError
from layerzero.core.system import forking
from layerzero.engine.policy import Policy
from layerzero.engine.settings import SETTINGS, checked

if TYPE_CHECKING:
    from layerzero.engine.config import Configuration


T = TypeVar("T")


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Let a variable have a value meanwhile, in this thread or task only."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@dataclass(slots=True)
class _Scope:
    """The layers that hold in one context, and the policy they made of a state of the configuration.

    Tasks inherit it, and so do threads without a GIL: where its block was left, ``outer`` holds.
    """

    layers: tuple[Mapping[str, Any], ...]
    base: Policy
    policy: Policy
    outer: _Scope | None
    left: bool = False


class Scopes:
    """How many ``with`` blocks are open in the process, and which hold in this context.

    The call path tests ``active`` and reads the context variable only when it is not zero.
    """

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self.active = 0
        self._open: dict[int, Policy] = {}  # by the ids of blocks: one that goes is left
        self._watchers: list[Callable[[int], None]] = []
        self._lock = forking.lock()
        self._current: ContextVar[_Scope | None] = ContextVar("layerzero_scope", default=None)

    def watch(self, watcher: Callable[[int], None]) -> None:
        """Tell a hit path that is not Python how many blocks are open, now and from now on."""
        with self._lock:
            self._watchers.append(watcher)
            watcher(self.active)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """What the open blocks made of the settings, in whatever threads."""
        return (*self._open.values(),)  # one step without a GIL, too, which tuple() is not

    def _tell(self) -> None:
        self.active = len(self._open)
        for watcher in self._watchers:
            watcher(self.active)

    def scope(self, values: Mapping[str, Any]) -> SettingsBlock:
        """Let settings hold inside a ``with`` block, in this thread or task only.

        Entering raises: PolicyError if a key or value is wrong.
        """
        return SettingsBlock(self, values)

    def enter(self, block: SettingsBlock, scope: _Scope) -> Token[_Scope | None]:
        """Let a scope hold here, and count its block."""
        with self._lock:
            self._open[id(block)] = scope.policy
            self._tell()
        return self._current.set(scope)

    def leave(self, block: SettingsBlock) -> None:
        """Count a block no more; nothing for one that is not counted."""
        with self._lock:
            self._open.pop(id(block), None)
            self._tell()

    def restore(self, scope: _Scope, token: Token[_Scope | None] | None) -> None:
        """Let hold here what held before a scope; without a token, only where that one holds.

        Raises: ValueError in another context than the token's.
        """
        if token is not None:
            self._current.reset(token)
        elif self._current.get() is scope:
            self._current.set(scope.outer)

    def _here(self) -> _Scope | None:
        scope = self._current.get()
        while scope is not None and scope.left:
            scope = scope.outer
        return scope

    def made_of(self, values: Mapping[str, Any]) -> _Scope:
        """A scope of these values within the one that holds here. Raises: PolicyError."""
        outer = self._here()
        inner = checked(values, "scope")
        for name in inner:
            if not SETTINGS[name].scoped:
                raise PolicyError(f"scope: {name} holds for the whole process; set it with lz.configure or in a file")
        layers = (*(outer.layers if outer else ()), inner)
        return _Scope(layers, self._configuration.policy, self._configuration.effective(*layers), outer)

    def layers(self) -> tuple[Mapping[str, Any], ...]:
        """The settings of the blocks that hold here, outermost first."""
        scope = self._here()
        return scope.layers if scope else ()

    def policy(self) -> Policy:
        """The policy that holds in this context."""
        scope, base = self._current.get(), self._configuration.policy
        if scope is not None and scope.left:
            scope = self._here()
        if scope is None:
            return base
        if scope.base is not base:  # lz.configure was called meanwhile
            scope.policy, scope.base = self._configuration.effective(*scope.layers), base
        return scope.policy


class SettingsBlock(ContextDecorator, AbstractContextManager[None]):
    """A ``with`` block in which settings hold. An interrupt leaves it entered or not, and never half.

    Python looks for signals where a function begins and after each call, so a generator may be interrupted between what
    it does and its ``try``. One that comes as ``__exit__`` begins is made good when the block goes.
    """

    _scope: _Scope | None = None  # of the class: one that was interrupted as it was made has them, too
    _token: Token[_Scope | None] | None = None

    def __init__(self, scopes: Scopes, values: Mapping[str, Any]) -> None:
        self._scopes, self._values = scopes, values

    def __reduce__(self) -> tuple[Any, ...]:
        """Another block of these settings, entered nowhere: of the process that reads it, with what it decorates."""
        return _block_here, (self._values,)

    def _recreate_cm(self) -> SettingsBlock:
        return SettingsBlock(self._scopes, self._values)  # each call of a decorated function enters one of its own

    def __enter__(self) -> None:
        if self._scope is not None:
            raise RuntimeError("this scope is entered already: make another one for a block inside it")
        try:
            self._scope = self._scopes.made_of(self._values)
            self._token = self._scopes.enter(self, self._scope)
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *_: object) -> None:
        self._leave()

    def __del__(self) -> None:
        if self._scope is not None:
            self._undo(None)

    def _leave(self) -> None:
        try:
            self._undo(self._token)
        except Exception:
            raise
        except BaseException:  # an interrupt: what is left of it
            self._undo(None)
            raise

    def _undo(self, token: Token[_Scope | None] | None) -> None:
        self._scopes.leave(self)
        if self._scope is not None:
            self._scope.left = True
            self._scopes.restore(self._scope, token)
        self._scope = self._token = None


def _block_here(values: Mapping[str, Any]) -> SettingsBlock:
    from layerzero.engine.config import SCOPES

    return SCOPES.scope(values)
