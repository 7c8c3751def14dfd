"""The commands of a deployment: ``solve``, ``plan show``, ``plan diff``, and ``ready`` and ``serve-health``."""

from __future__ import annotations

import importlib
import inspect
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from layerzero.cli.calls import ManifestFile, Model, Threads, Where, argument, flag, option
from layerzero.cli.output import FINE, NO, Answer, Commands, examples, existing, say

if TYPE_CHECKING:
    from torch.nn import Module


plan = Commands(help="Show plans, and what differs between them.", no_args_is_help=True)
plan.info.epilog = examples("plan show plan.json", "plan diff plan.json other.json")

PlanFile = Annotated[Path, argument("FILE", "A plan that lz.solve or `solve` wrote.")]


def solve(
    model: Annotated[
        str,
        argument(
            "MODEL",
            "module:function, which returns a model, or what Transformers reads a config from, without its weights.",
        ),
    ],
    out: Annotated[Path, option("FILE", "Where the plan goes.")],
    bucket: Annotated[
        list[str] | None, option("AXIS=SIZES", "Ends of buckets, as seq_len=128,512,2048; again for another axis.")
    ] = None,
    inputs: Annotated[
        str | None,
        option(
            "MODULE:FUNCTION", "A function of the axes, by name, that returns the model's inputs; token ids by default."
        ),
    ] = None,
    dtype: Annotated[str, option("DTYPE", "Dtype of a model of Transformers' config.", "--dtype")] = "bfloat16",
    budget_s: Annotated[float, option("SECONDS", "End after so long; 0 measures nothing.", min=0)] = 600.0,
    no_jit: Annotated[bool, flag("--no-jit", "Build nothing: choose from what is built.")] = False,
    strict: Annotated[
        bool, flag("--strict", "Where the plan is held, a call outside of its buckets is an error.")
    ] = False,
    threads: Threads = None,
) -> Answer:
    """Choose every kernel that a model needs within buckets of sizes, and write that down as one plan.

    The model's calls are recorded at each point of the grid, what they would choose is built, and every legal kernel is
    measured on them. lz.freeze(FILE) holds the plan in a process. A warning tells what time did not suffice for.
    """
    from layerzero.cli.flags import left_of
    from layerzero.core.system.disk import check_place
    from layerzero.serving.dry_run import token_ids
    from layerzero.serving.solve import solve as run
    from layerzero.testing.single_run import with_threads

    check_place(out)  # before minutes of measuring
    axes = list(map(_axis, bucket or []))
    buckets = dict(axes) or None
    if len(buckets or ()) < len(axes):
        raise ValueError(
            f"--bucket: wanted each axis once, with commas between its sizes, got {', '.join(bucket or [])}"
        )
    if buckets is None and inputs is None:
        raise ValueError("--bucket: wanted at least one, as seq_len=128,512, got none")
    given = None if inputs is None else _named(inputs, "--inputs")
    if buckets is None and given is not None:
        given = given()
    built = _model(model, dtype)
    if given is None:
        _, *axes_of_ids = inspect.signature(token_ids).parameters
        if unknown := ", ".join(set(buckets or ()).difference(axes_of_ids)):
            raise ValueError(f"--bucket: wanted {' or '.join(axes_of_ids)} without --inputs, got {unknown}")
        try:
            token_ids(built, **dict.fromkeys(axes_of_ids, 1))
        except TypeError as error:
            raise ValueError(f"--inputs: {error}") from error
    with with_threads(threads):
        found = run(
            built, given, buckets, compile_jit=not no_jit, budget_s=budget_s and left_of(budget_s), strict=strict
        )
    found.write(out)
    return Answer(_plain(found), lambda: [*str(found).splitlines(), f"written to {out}"])


def show(file: PlanFile) -> Answer:
    """Print a plan as its decision table.

    Exits with 1 for a file that is cut, was edited, or is no plan.
    """
    from layerzero.inspection.freeze import Frost

    found = Frost.load(existing(file, "a plan"))
    return Answer(_plain(found), lambda: [*str(found).splitlines()])


def diff(first: PlanFile, second: Annotated[Path, argument("OTHER", "Another one.")]) -> Answer:
    """Print what differs between two plans: model, machine, buckets, and the kernel of each call.

    Exits with 1 if anything differs.
    """
    from layerzero.inspection.freeze import Frost
    from layerzero.inspection.plan_document import differences

    found = differences(*[Frost.load(existing(file, "a plan")) for file in (first, second)])
    data = {"same": not found, "differences": [{"what": e.what, "first": e.first, "second": e.second} for e in found]}
    return Answer(data, lambda: [*map(str, found)] or ["nothing differs"], NO if found else FINE)


def _plain(document: Any) -> object:
    import msgspec

    return msgspec.to_builtins(document)


def _axis(text: str) -> tuple[str, list[int]]:
    """Read ``seq_len=128,512``. Raises: ValueError with wanted and got."""
    name, _, ends = text.partition("=")
    parts = ends.split(",")
    if not name or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--bucket: wanted AXIS=SIZES, as seq_len=128,512, got {text!r}")
    return name.strip(), [int(part) for part in parts]


def _named(text: str, flag: str) -> Any:
    """What ``module:name`` names. Raises: ValueError with wanted and got."""
    here = str(Path.cwd())
    sys.path[:0] = [] if here in sys.path else [here]  # as `python -m` has it
    home, _, name = text.partition(":")
    try:
        return getattr(importlib.import_module(home), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{flag}: wanted module:function, got {text!r}: {error}") from error


def _model(text: str, dtype: str) -> Module:
    """The model that a name stands for; of Transformers on the meta device, with LayerZero's attention."""
    import torch

    from layerzero.core.dtypes import dtype_named

    if ":" in text:
        named = _named(text, "MODEL")
        made = named() if callable(named) and not isinstance(named, torch.nn.Module) else named
        if not isinstance(made, torch.nn.Module):
            raise ValueError(f"MODEL: wanted a function that returns a torch.nn.Module, got {type(made).__name__}")
        return made
    from layerzero.integrations.transformers import register_with_transformers

    register_with_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(text)
    except (OSError, ValueError, RecursionError) as error:  # Transformers': no such name, no file of a model
        raise ValueError(
            f"MODEL: wanted module:function or a model that Transformers can load, got {text!r}: {error}"
        ) from error
    with torch.device("meta"):
        found: Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype_named(dtype), attn_implementation="layerzero"
        ).eval()
    return found


def add_to(app: Commands) -> None:
    """Register the commands."""
    lines = "ready", "ready --strict", "ready --for decoder --for serving", "ready --json"
    app.command("ready", *lines, modules=True)(ready)
    app.command(
        "serve-health", "serve-health", "serve-health --port 9400 --host 0.0.0.0 --manifest workload.json", modules=True
    )(serve_health)
    app.command(
        "solve",
        "solve my_model:build --bucket seq_len=128,512 --bucket batch=1,4 --out plan.json",
        "solve ./llama --bucket seq_len=128,512,2048 --budget-s 300 --out plan.json --json",
        modules=True,
    )(solve)
    plan.command("show", "plan show plan.json", "plan show plan.json --json")(show)
    plan.command("diff", "plan diff plan.json other.json", "plan diff plan.json other.json --json")(diff)
    app.add_typer(plan, name="plan", rich_help_panel=None)


Sets = Annotated[
    list[str] | None, option("SET", "A set of operations that must be served, as serving; again for more.", "--for")
]


def ready(
    manifest: ManifestFile = None,
    model: Model = "",
    device: Where = None,
    asked_for: Sets = None,
    strict: Annotated[bool, flag("--strict", "Exit with 1 where a part is degraded, too.")] = False,
) -> Answer:
    """Tell whether traffic may come.

    A line for each part: builds, settings, descriptors, tables (each call finds a kernel), headroom (workspaces fit
    into what is free), the database of times, health (kernels that rest, suspects, bans), libraries, telemetry, frozen
    choices, ranks, sets. Checks every call of the manifest, or else what this machine called so far. What libraries
    keep on disk counts as built. Builds and resting kernels of a serving process are known there alone:
    lz.readiness_check and the probes of lz.serve_health show them. Nothing runs, and nothing is built. A build that
    failed here is listed with its reason and the kernel that serves in its place. Exits with 0 if traffic may come,
    with 1 if a part is not ready: warmup would build something, or calls would raise or run out of memory. With
    --strict also with 1 where a part is degraded.
    """
    from layerzero.serving.readiness import readiness_check

    found = readiness_check(manifest, model=model, device=device, sets=asked_for or ())
    fine = found.ready and not (strict and found.degraded)
    return Answer(found.to_dict(), lambda: str(found).splitlines(), FINE if fine else NO)


def serve_health(
    port: Annotated[int, option("PORT", "Where to listen; 0 takes any free one.", "--port", min=0, max=65535)] = 9400,
    host: Annotated[str, option("ADDRESS", "Address to listen on; 0.0.0.0 lets other machines ask.")] = "127.0.0.1",
    manifest: ManifestFile = None,
    model: Model = "",
    device: Where = None,
    asked_for: Sets = None,
    fallback_file: Annotated[
        Path | None, option("FILE", "While it exists, torch's own kernels alone run here.")
    ] = None,
) -> Answer:
    """Serve /livez, /readyz, /metrics and /statez until Ctrl-C.

    /livez is 200 while the process can work, and /readyz is 200 or 503 with the lines of `layerzero ready`. /metrics
    has the numbers of lz.metrics for Prometheus, and /statez what `layerzero rolling-update` compares. This process
    sees what lies on disk: builds, times, bans, settings. A serving process calls lz.serve_health() or mounts
    layerzero.serving.probes:app, and has its own numbers in them.
    """
    from layerzero.serving import probes

    asked = {"manifest": manifest, "model": model, "device": device, "sets": asked_for or ()}
    server = probes.serve_health(port, host=host, fallback_file=fallback_file, **asked)  # type: ignore[arg-type]
    with closing(server):
        say(f"{server.url} answers /livez, /readyz, /metrics and /statez; Ctrl-C ends it")
        server.wait()
    return Answer({"url": server.url}, tuple)
