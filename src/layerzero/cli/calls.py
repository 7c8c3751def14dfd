"""Commands made of their flags, and the flags of ``explain`` and ``which``, which describe a call."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

import typer

from layerzero.cli.output import Answer, import_modules

NONE: Any = ()
"""The default of an option that may be given several times, of which typer makes a list."""

Modules = Annotated[
    list[str] | None,
    typer.Option("--module", metavar="MODULE", help="Import this first: it registers kernels; again for more."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


class Flags(Protocol):
    """What was typed behind a command."""

    @property
    def module(self) -> list[str] | None:
        """Modules to import first."""


F = TypeVar("F", bound=Flags)


def command(flags: type[F], answer: str) -> Callable[..., Answer]:
    """Make a command of a dataclass of its flags, whose docstring is the help.

    ``answer`` names the function that takes them, ``module:function``: it is imported when the command runs.
    """
    home, _, name = answer.partition(":")

    def ask(**typed: Any) -> Answer:
        asked = flags(**typed)
        import_modules(asked.module or ())
        found: Answer = getattr(importlib.import_module(home), name)(asked)
        return found

    ask.__signature__ = inspect.signature(flags, eval_str=True)  # type: ignore[attr-defined]  # typer reads it
    ask.__doc__ = flags.__doc__
    return ask


@dataclass(frozen=True, kw_only=True)
class CallFlags:
    """Print the id of the kernel that a call gets. Takes the options of explain."""

    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A function (attention), operation (norm.rms) or alias (attention.causal)."
        ),
    ]
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="SIZES",
            help="Shape of the query or the input, as 1x2048x32x128; weights, keys and values follow.",
        ),
    ] = None
    kv_shape: Annotated[
        str | None,
        typer.Option("--kv-shape", metavar="SIZES", help="Shape of key and value; by default that of the query."),
    ] = None
    case: Annotated[
        str | None, typer.Option("--case", metavar="NAME", help="A named case in place of --shape; see `operations`.")
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="DTYPE", help="Dtype of the tensors; by default float32 on a CPU, bfloat16 elsewhere."
        ),
    ] = None
    layout: Annotated[
        str | None, typer.Option("--layout", metavar="BSHD|BHSD", help="Layout of attention's tensors.")
    ] = None
    causal: Annotated[
        bool | None, typer.Option("--causal/--no-causal", help="Hide keys in the future; the default.")
    ] = None
    params: Annotated[
        list[str],
        typer.Option(
            "--param",
            metavar="NAME=VALUE",
            help="A further argument: window=128,0 softcap=30.0 return_lse=true; a tensor as SHAPE[:DTYPE]: "
            "attn_mask=1x1x8x8:bool. Again for more.",
        ),
    ] = NONE
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="cpu or cuda:0 for this machine's, or the name of any other: H100, MI300X, ...",
        ),
    ] = None
    installed: Annotated[
        list[str],
        typer.Option("--with", metavar="LIBRARY=VERSION", help="Pretend that a library is installed. Again for more."),
    ] = NONE
    missing: Annotated[
        list[str],
        typer.Option("--without", metavar="LIBRARY", help="Pretend that a library is absent. Again for more."),
    ] = NONE
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="A setting for this question, as in a file. Again for more."),
    ] = NONE
    grad: Annotated[bool, typer.Option("--grad", help="Gradients are needed.")] = False
    capturing: Annotated[bool, typer.Option("--capturing", help="A CUDA graph is being captured.")] = False
    module: Modules = None
    json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class ExplainFlags(CallFlags):
    """Tell which kernel a call gets, and why.

    Every candidate is listed with its score or every reason against it; those for other hardware are counted. Nothing
    runs.
    """

    everything: Annotated[
        bool, typer.Option("--all", help="Also list each kernel that is made for other hardware.")
    ] = False
