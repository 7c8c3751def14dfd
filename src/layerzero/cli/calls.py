"""``explain`` and ``which``: the flags that describe a call, shared by both."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from layerzero.cli.output import FINE, NO, Answer, import_modules, say

if TYPE_CHECKING:
    from layerzero.cli.question import CallQuestion
    from layerzero.core.plan import Report

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A function (attention), operation (norm.rms) or alias (attention.causal)."),
]
Shape = Annotated[
    str | None,
    typer.Option(
        "--shape",
        metavar="SIZES",
        help="Shape of the query or the input, as 1x2048x32x128; weights, keys and values follow.",
    ),
]
KvShape = Annotated[
    str | None,
    typer.Option("--kv-shape", metavar="SIZES", help="Shape of key and value; by default that of the query."),
]
CaseName = Annotated[
    str | None, typer.Option("--case", metavar="NAME", help="A named case in place of --shape; see `operations`.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="DTYPE", help="Dtype of the tensors; by default float32 on a CPU, bfloat16 elsewhere."
    ),
]
Layout = Annotated[str | None, typer.Option("--layout", metavar="BSHD|BHSD", help="Layout of attention's tensors.")]
Causal = Annotated[bool | None, typer.Option("--causal/--no-causal", help="Hide keys in the future; the default.")]
Param = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="NAME=VALUE",
        help="A further argument: window=128,0 softcap=30.0 return_lse=true; a tensor as SHAPE[:DTYPE]: "
        "attn_mask=1x1x8x8:bool. Again for more.",
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="cpu or cuda:0 for this machine's, or the name of any other: H100, MI300X, ...",
    ),
]
With = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="LIBRARY=VERSION", help="Pretend that a library is installed. Again for more."),
]
Without = Annotated[
    list[str] | None,
    typer.Option("--without", metavar="LIBRARY", help="Pretend that a library is absent. Again for more."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting for this question, as in a file. Again for more."),
]
Grad = Annotated[bool, typer.Option("--grad", help="Gradients are needed.")]
Capturing = Annotated[bool, typer.Option("--capturing", help="A CUDA graph is being captured.")]
Modules = Annotated[
    list[str] | None,
    typer.Option("--module", metavar="MODULE", help="Import this first: it registers kernels; again for more."),
]
Everything = Annotated[bool, typer.Option("--all", help="Also list each kernel that is made for other hardware.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def command(answer: Callable[[CallQuestion | None, Report, bool], Answer], *, lists: bool) -> Callable[..., Answer]:
    """Make a command that asks about a call and answers in one of two ways; ``lists`` is whether it lists kernels."""

    def ask(
        name: Name,
        shape: Shape = None,
        kv_shape: KvShape = None,
        case: CaseName = None,
        dtype: Dtype = None,
        layout: Layout = None,
        causal: Causal = None,
        param: Param = None,
        device: DeviceName = None,
        with_: With = None,
        without: Without = None,
        set_: Set = None,
        grad: Grad = False,
        capturing: Capturing = False,
        module: Modules = None,
        everything: Everything = False,
        json: AsJson = False,
    ) -> Answer:
        from layerzero.cli.flags import drop_in_question
        from layerzero.cli.plain import report as plain_report
        from layerzero.cli.question import Flags, question
        from layerzero.ops import DROP_INS, plain_function_of

        import_modules(module or ())
        flags = Flags(
            name=name,
            shape=shape,
            kv_shape=kv_shape,
            case=case,
            dtype=dtype,
            layout=layout,
            causal=causal,
            params=param or (),
            device=device,
            installed=with_ or (),
            missing=without or (),
            settings=set_ or (),
            grad=grad,
            capturing=capturing,
        )
        if plain_function_of(name) is not None:
            return answer(None, plain_report(flags), everything)
        asked = drop_in_question(flags, DROP_INS[name]) if name in DROP_INS else question(flags)
        return answer(asked, asked.ask(), everything)

    if not lists:
        whole = inspect.signature(ask, eval_str=True)
        ask.__signature__ = whole.replace(  # type: ignore[attr-defined]  # inspect and typer read it
            parameters=[each for each in whole.parameters.values() if each.name != "everything"]
        )
    return ask


def explained(asked: CallQuestion | None, report: Report, everything: bool) -> Answer:
    """Show the whole report; as text, kernels for other hardware are one line unless ``everything`` is set.

    On a screen that does not hold that, what keeps kernels from the call is a line for each kind of reason, too.
    """
    from layerzero.cli import explain_screen

    shown = functools.partial(explain_screen.explained, report, everything=everything)
    fits = None if everything else functools.partial(explain_screen.on_a_small_screen, report)
    return Answer(report.to_dict(), shown, FINE if report.chosen else NO, fits)


def named(asked: CallQuestion | None, report: Report, _: bool) -> Answer:
    """Show the kernel's id alone, so that a script can use it."""
    score = round(report.chosen.score, 3) if report.chosen else None
    data = {"kernel_id": report.kernel_id, "score": score, "operation": report.operation}
    if report.kernel_id is None:
        say(f"no kernel of {report.operation} is legal for this call; `layerzero explain` with these options says why")
        return Answer(data, tuple, NO)
    kernel_id = report.kernel_id
    return Answer(data, lambda: [kernel_id])
