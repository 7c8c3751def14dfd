"""Commands made of their flags, and the flags of ``explain`` and ``which``, which describe a call."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from layerzero.cli.output import Answer, AsJson, Commands, Modules

NONE: Any = ()
"""The default of an option that may be given several times, of which typer makes a list."""


def option(metavar: str, meaning: str, *names: str, **more: Any) -> Any:
    """An option that takes a value; its name is that of its parameter unless it has others."""
    return typer.Option(*names, metavar=metavar, help=meaning, **more)


def flag(name: str, meaning: str, **more: Any) -> Any:
    """An option that is given or not."""
    return typer.Option(name, help=meaning, **more)


def argument(metavar: str, meaning: str) -> Any:
    """What stands behind a command without a name."""
    return typer.Argument(metavar=metavar, help=meaning)


def command(flags: type, answer: str) -> Callable[..., Answer]:
    """Make a command of a dataclass of its flags, whose docstring is the help.

    ``answer`` names the function that takes them, ``module:function``: it is imported when the command runs.
    """
    home, _, name = answer.partition(":")

    def ask(**typed: Any) -> Answer:
        found: Answer = getattr(importlib.import_module(home), name)(flags(**typed))
        return found

    ask.__signature__ = inspect.signature(flags, eval_str=True)  # type: ignore[attr-defined]  # typer reads it
    ask.__doc__ = flags.__doc__
    return ask


@dataclass(frozen=True, kw_only=True)
class CallFlags:
    """Print the id of the kernel that a call gets. Takes the options of explain."""

    name: Annotated[str, argument("NAME", "A function (attention), operation (norm.rms) or alias (attention.causal).")]
    shape: Annotated[
        str | None,
        option("SIZES", "Shape of the query or the input, as 1x2048x32x128; weights, keys and values follow."),
    ] = None
    kv_shape: Annotated[str | None, option("SIZES", "Shape of key and value; by default that of the query.")] = None
    case: Annotated[str | None, option("NAME", "A named case in place of --shape; see `operations`.")] = None
    dtype: Annotated[
        str | None, option("DTYPE", "Dtype of the tensors; by default float32 on a CPU, bfloat16 elsewhere.", "--dtype")
    ] = None
    layout: Annotated[str | None, option("BSHD|BHSD", "Layout of attention's tensors.")] = None
    causal: Annotated[bool | None, flag("--causal/--no-causal", "Hide keys in the future; the default.")] = None
    params: Annotated[
        list[str],
        option(
            "NAME=VALUE",
            "A further argument: window=128,0 softcap=30.0 return_lse=true; a tensor as SHAPE[:DTYPE]: "
            "attn_mask=1x1x8x8:bool. Again for more.",
            "--param",
        ),
    ] = NONE
    device: Annotated[
        str | None,
        option("DEVICE", "cpu or cuda:0 for this machine's, or the name of any other: H100, MI300X, ...", "--device"),
    ] = None
    installed: Annotated[
        list[str], option("LIBRARY=VERSION", "Pretend that a library is installed. Again for more.", "--with")
    ] = NONE
    missing: Annotated[
        list[str], option("LIBRARY", "Pretend that a library is absent. Again for more.", "--without")
    ] = NONE
    settings: Annotated[
        list[str], option("KEY=VALUE", "A setting for this question, as in a file. Again for more.", "--set")
    ] = NONE
    grad: Annotated[bool, flag("--grad", "Gradients are needed.")] = False
    capturing: Annotated[bool, flag("--capturing", "A CUDA graph is being captured.")] = False


@dataclass(frozen=True, kw_only=True)
class ExplainFlags(CallFlags):
    """Tell which kernel a call gets, and why.

    Every candidate is listed with its score or every reason against it; those for other hardware are counted. Nothing
    runs.
    """

    everything: Annotated[bool, flag("--all", "Also list each kernel that is made for other hardware.")] = False


ManifestFile = Annotated[Path | None, option("FILE", "A workload that lz.record wrote.", "--manifest")]
Model = Annotated[str, option("NAME", "What the manifest must have been recorded of; another is an error.", "--model")]


def device_here(text: str | None) -> str | None:
    """The name of a device of this machine, as torch reads it. Raises: BadParameter."""
    if text is not None:
        from layerzero.core import device

        try:
            device.device_here(text)
        except ValueError as error:
            raise typer.BadParameter(str(error).removeprefix("device: ")) from error
    return text


Where = Annotated[
    str | None, option("DEVICE", "Where; a GPU where there is one, else the CPU.", "--device", callback=device_here)
]
Threads = Annotated[
    int | None, option("N", "Threads on a CPU; by default as torch has them.", "--threads", min=1, max=4096)
]
Kernels = Annotated[list[str], option("KERNEL", "These kernels only: id, glob or library; again for more.", "--kernel")]


@dataclass(frozen=True, kw_only=True)
class _CallsToRun:
    """Which calls, and where."""

    operation: Annotated[str, argument("OPERATION", "A function, operation, alias or glob.")] = "*"
    shapes: Annotated[
        list[str],
        option(
            "SIZES",
            "Shape of the query or input, 1x2048x32x128; with :1x2048x8x128 for other keys; with commas or again "
            "for more.",
        ),
    ] = NONE
    manifest: ManifestFile = None
    device: Where = None
    param: Annotated[
        list[str], option("NAME=VALUE", "A parameter of the operation, in every call. Again for more.")
    ] = NONE
    module: Modules = None
    json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class _CallsToTime(_CallsToRun):
    """How they are timed, too."""

    dtype: Annotated[
        str | None,
        option("DTYPE", "With commas for more; by default bfloat16, on a CPU float32 and bfloat16.", "--dtype"),
    ] = None
    layout: Annotated[str | None, option("LAYOUT", "BSHD or BHSD of attention, NHD or HND of a cache.", "--layout")] = (
        None
    )
    threads: Threads = None
    samples: Annotated[
        int | None, option("N", "Samples of each kernel; by default the setting tune_samples.", min=3)
    ] = None
    without: Annotated[list[str], option("KERNEL", "Leave this library or kernel glob out. Again for more.")] = NONE

    @property
    def dtypes(self) -> list[str] | None:
        return None if self.dtype is None else self.dtype.split(",")


@dataclass(frozen=True, kw_only=True)
class TuneFlags(_CallsToTime):
    """Measure kernels, so that the fastest is chosen.

    Without --shapes, --cases or --manifest: a grid of sizes between which times can be predicted. What is known is
    skipped, so that an interrupted run goes on. Every kernel is compared with the reference first; a new one runs in a
    child process before. Kernels may compile. Exits with 1 if nothing was measured or known. --dtype and --layout leave
    out what was called or recorded in others. --param goes with --shapes or --cases; operations without tensors take it
    alone: what their kernels are measured for.
    """

    cases: Annotated[bool, flag("--cases", "The operations' own cases; `layerzero operations` lists them.")] = False
    model: Model = ""
    budget_s: Annotated[float | None, option("SECONDS", "End after so long; a second run goes on.", min=0)] = None
    again: Annotated[bool, flag("--again", "Measure what is known, too.")] = False
    graph: Annotated[bool, flag("--graph", "Time replays of CUDA graphs, not eager calls.")] = False
    no_isolation: Annotated[bool, flag("--no-isolation", "Run what is new on this machine in this very process.")] = (
        False
    )
    everything: Annotated[bool, flag("--all", "Show each call, not only those that changed.")] = False


@dataclass(frozen=True, kw_only=True)
class BenchFlags(_CallsToTime):
    """Run every legal kernel side by side, and compare.

    Without --shapes or --manifest: the operations' own cases, those first that tell most of models. With --kernel and
    without --dtype: the usual dtypes that these kernels take. Each result is printed as it comes. The end says which
    kernel is fastest where, what that gains over torch's own function, what LayerZero chooses now, and what time did
    not suffice for. With --all, or where it fits on a screen, each call has a table: median, p95, noise, GB/s and
    TFLOP/s with their share of this machine's copy and matrix product, and speed against torch's own function. It also
    has the distance from the reference in float64, what LayerZero chooses, and why other kernels are refused. On a GPU
    it has the device's own time, of replays of a CUDA graph with many calls. Their tensors lie outside of the L2 cache
    (cold) or, for small calls, in it (warm). A kernel that cannot be captured says why, and has the time of one launch
    between two events. With --timed device, order, rates and speed go by it. Times are not remembered. A kernel that
    gives a wrong result is banned until its library has another version or `layerzero vet --again` passes it, and
    failures are remembered. What this machine's memory does not hold is left out. Exits with 1 if a kernel is wrong or
    fails, or if nothing was measured.
    """

    operation: Annotated[str, argument("OPERATION", "A function, operation, alias or glob.")]
    budget_s: Annotated[float, option("SECONDS", "End after so long, whatever compiles; inf has no end.")] = 60.0
    kernel: Kernels = NONE
    timed: Annotated[
        str | None,
        option(
            "TIMES",
            "call (what a caller waits for), device (a GPU's time without launching) or both, the default on a GPU.",
        ),
    ] = None
    plot: Annotated[Path | None, option("FILE", "Draw the times into a PNG or SVG file.")] = None
    html: Annotated[Path | None, option("FILE", "Write one page with tables and a chart an operation.")] = None
    everything: Annotated[bool, flag("--all", "A table for each call, and each reason in full.")] = False


@dataclass(frozen=True, kw_only=True)
class VetFlags(_CallsToRun):
    """Let kernels prove themselves on this machine, in a child process.

    With neither --kernel nor --backend: those that may not run before. Without --shapes or --manifest: the operations'
    own cases. A verdict holds for sizes of the same powers of two, and until the library has another version. Kernels
    take turns; a class that time did not suffice for has no verdict. Exits with 1 if a kernel is wrong, dies or hangs,
    or if a class was left.
    """

    kernel: Kernels = NONE
    backend: Annotated[list[str], option("LIBRARY", "Vet this library only; again for more.")] = NONE
    dtype: Annotated[str | None, option("DTYPE", "Dtype of the tensors; by default each in turn.", "--dtype")] = None
    graph: Annotated[bool, flag("--graph", "Capture each call in a CUDA graph, and compare what replays give.")] = False
    again: Annotated[bool, flag("--again", "Also what has a verdict.")] = False
    budget_s: Annotated[float, option("SECONDS", "End after so long; a second run goes on. inf asks about all.")] = (
        100.0
    )
    operation_: Annotated[str | None, option("OPERATION", "The same as OPERATION, by name.", "--operation")] = None


def add_to(app: Commands) -> None:
    """Register the commands."""
    app.command(
        "vet",
        "vet",
        "vet rms_norm --shapes 512x1024,1x4096 --dtype bfloat16",
        "vet attention --kernel torch.sdpa.cpu_flash --shapes 1x8x4x16:1x8x2x16 --dtype float32 --device cpu",
        "vet layer_norm --backend torch --shapes 4x64 --again",
        "vet tokenize --param tokenizer_id=tokenizer.json",
        modules=True,
    )(command(VetFlags, "layerzero.cli.vet:answer"))
    app.command(
        "tune",
        "tune", "tune attention --dtype bfloat16 --budget-s 120", "tune --manifest workload.json",
        "tune rms_norm --shapes 1x4096,64x4096 --dtype float32", "tune tokenize --param tokenizer_id=cl100k_base",
        modules=True,
    )(command(TuneFlags, "layerzero.cli.tune:answer"))  # fmt: skip
    app.command(
        "bench",
        "bench attention", "bench attention --budget-s 300 --all",
        "bench attention --shapes 1x512x32x128:1x512x8x128 --dtype bfloat16",
        "bench rms_norm --shapes 1x4096,64x4096 --json", "bench rms_norm --shapes 8x64 --kernel torch.rms_norm",
        "bench rms_norm --shapes 64x4096 --timed device",
        "bench tokenize --param tokenizer_id=cl100k_base",
        'bench "norm.*" --html norms.html --plot norms.png',
        modules=True,
    )(command(BenchFlags, "layerzero.cli.bench:answer"))  # fmt: skip
