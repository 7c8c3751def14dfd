"""A function with the signature of another library's, which serves by calls of a public function where it can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Made = tuple[dict[str, Any], tuple[str, ...]]
"""The arguments of the public function, and notes about what of them is not as the caller gave it."""


@dataclass(frozen=True, slots=True)
class DropIn:
    """What questions about such a function need to know.

    Attributes:
        name: what it is called.
        function: name of the public function that it calls.
        home: the module that has it, which nothing imports before somebody asks for it.
        library: whose function it stands for, and which runs the calls that the public one does not take.
        call: from all its arguments, and the type of device that is asked about (empty for that of the tensors), to the
            call that it makes; InvalidCallError with the reason and what to do where it makes none.
        instead: the call of the public function that means the same for tensors as they are.
    """

    name: str
    function: str
    home: str
    library: str
    call: Callable[[Mapping[str, Any], str], Made]
    instead: str
