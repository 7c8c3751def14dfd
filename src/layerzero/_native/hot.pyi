from collections.abc import Callable
from typing import Any, Self

from layerzero.core.conditions import Conditions
from layerzero.core.plan import Plan

class Index:
    def remove(self, identities: set[int], /) -> int: ...
    def clear(self) -> None: ...
    def __len__(self) -> int: ...

class Function:
    def __new__(
        cls,
        *,
        name: str,
        doc: str,
        parameters: tuple[tuple[str, int, object, bool, tuple[int, ...]], ...],
        positional: int,
        mutated: tuple[tuple[int, int, int], ...],
        sdpa: bool,
        python: Callable[..., Any],
        miss: Callable[..., Any],
        failed: Callable[..., Any],
        scoped: Callable[[], Index],
    ) -> Self: ...
    def builtin(self) -> Callable[..., Any]: ...
    def publish(self, index: Index, /) -> None: ...
    def unwatched(self, way: Callable[..., Any], /) -> None: ...
    def put(
        self,
        index: Index,
        exact: bytes,
        coarse: bytes,
        plan: Plan,
        run: Callable[..., Any],
        reads_negated: bool,
        conditions: Conditions | None,
        /,
    ) -> None: ...

def setup(**sources: Any) -> None: ...
def watch(callback: Callable[[], object], /) -> None: ...
def set_scopes(count: int, /) -> None: ...
def state() -> tuple[tuple[int, int] | None, bool | None, int | None]: ...
