"""Questions about functions that stand for another library's: they are about the call that such a function makes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from layerzero.core.argument_errors import bound
from layerzero.core.device import Device
from layerzero.core.drop_in import DropIn, Made
from layerzero.core.errors import InvalidCallError
from layerzero.ops import DROP_INS


def drop_in_named(asked: object) -> DropIn | None:
    """The one that is given as itself; its module is asked only where somebody has imported it."""
    if not callable(asked):
        return None
    homes = ((each, sys.modules.get(each.home)) for each in DROP_INS.values())
    return next((each for each, home in homes if asked is getattr(home, each.name, None)), None)


def call_made(of: DropIn, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: Device | None) -> Made:
    """The call that it makes; ``device`` is the one that is asked about, if that is not where the tensors lie.

    Raises: TypeError for a call that does not fit the signature; InvalidCallError where the library's own runs.
    """
    given = bound(of.name, getattr(importlib.import_module(of.home), of.name), args, kwargs)
    return of.call(given, "" if device is None else device.torch_type)


def refused(of: DropIn, error: InvalidCallError) -> InvalidCallError:
    """The error of a call that the public function does not take: the library's own answers it, or refuses it too."""
    why = f"{of.library}'s own function runs this call, since lz.{of.function} does not take it"
    return InvalidCallError(of.name, [f"{why}: {each}" for each in error.problems], error.code)
