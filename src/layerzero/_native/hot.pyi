from collections.abc import Callable
from typing import Any, Self

from layerzero.core.plan import Plan
from layerzero.core.reuse_conditions import Conditions

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
        asked: tuple[tuple[object, ...], ...],
        python: Callable[..., Any],
        miss: Callable[..., Any],
        failed: Callable[..., Any],
        scoped: Callable[[], Index],
    ) -> Self: ...
    def builtin(self) -> Callable[..., Any]: ...
    def publish(self, index: Index, /) -> None: ...
    def unwatched(self, way: Callable[..., Any], /) -> None: ...
    def key(self, values: tuple[object, ...], /) -> tuple[bytes, bytes] | None: ...
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

class Direct:
    def __new__(
        cls,
        target: Callable[..., Any],
        wanted: int,
        places: tuple[int, ...],
        constants: tuple[object, ...],
        keywords: tuple[str, ...],
        /,
    ) -> Self: ...
    def __call__(self, *values: Any) -> Any: ...

class Bound:
    def __new__(
        cls,
        *,
        function: Function,
        owner: object,
        otherwise: Callable[..., Any],
        failed: Callable[..., Any],
        exact: bytes,
        values: tuple[object, ...],
        passed: tuple[int, ...],
        guarded: bool,
    ) -> Self: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def install(self, index: Index, plan: Plan, run: Callable[..., Any], negated: bool, /) -> None: ...

INTERFACE: int

def setup(**sources: Any) -> None: ...
def watch(callback: Callable[[], object], /) -> None: ...
def set_scopes(count: int, /) -> None: ...
def reader() -> str: ...
def distinct(tensor: object, /) -> bool | None: ...
def within(tensor: object, low: int, high: int, /) -> bool | None: ...
def firsts_within(table: object, counts: object, per: int, high: int, /) -> bool | None: ...
def slots(
    tables: object, lens: object, starts: object, tokens: int, page_size: int, pages: int, out: object, /
) -> int | None: ...
def state() -> tuple[tuple[int, int] | None, bool | None, int | None, int | None]: ...
def version(cls: type, /) -> int: ...
def places(made: dict[Any, Any], items: tuple[Any, ...], /) -> bytes: ...
def unchanged(
    objects: tuple[Any, ...],
    classes: tuple[Any, ...],
    dicts: tuple[Any, ...],
    keys: tuple[Any, ...],
    lists: tuple[Any, ...],
    names: tuple[Any, ...],
    /,
) -> bool: ...
def stands(address: int, places: bytes, words: bytes, /) -> bool: ...
def checksum(address: int, count: int, /) -> int: ...
def stream(to: int, address: int, count: int, /) -> None: ...
