"""The commands of ``layerzero``; what each needs is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerzero.cli import calls, checks, deployment, perfdb_exchange, plans
from layerzero.cli.calls import CallFlags, ExplainFlags, argument, command, flag, option
from layerzero.cli.output import (
    FINE,
    NO,
    Answer,
    AsJson,
    Commands,
    Program,
    examples,
    existing,
    import_modules,
    say,
    stdout_console,
)
from layerzero.cli.perfdb import perfdb

main = Program(
    name="layerzero",
    help="Choose the fastest valid kernel for each call, and say why.",
    epilog=examples(
        "doctor", "explain attention --shape 1x2048x32x128 --kv-shape 1x2048x8x128 --dtype bfloat16", "kernels rms_norm"
    )
    + "\n\nExit codes: 0 fine, 1 the answer is no, 2 the question makes no sense, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config = Commands(help="Show settings, explain them, check a file of them.", no_args_is_help=True)
config.info.epilog = examples("config show", "config check layerzero.yaml")
main.add_typer(config, name="config", rich_help_panel=None)


descriptor = Commands(help="Check files that narrow kernels without code.", no_args_is_help=True)
descriptor.info.epilog = examples("descriptor check torch.json")
main.add_typer(descriptor, name="descriptor", rich_help_panel=None)


perfdb_exchange.add_to(perfdb)
main.add_typer(perfdb, name="perfdb", rich_help_panel=None)


def _version(wanted: bool) -> None:
    if wanted:
        from layerzero import __version__

        typer.echo(f"layerzero {__version__}")
        raise typer.Exit


Version = Annotated[bool, flag("--version", "Print the version.", is_eager=True, callback=_version)]


@main.callback()
def options(version: Version = False) -> None:
    """Take the options of all commands."""


@main.command("demo", "demo", 'demo --text "Where is my parcel?" --repeat 50', "demo --json")
def demo(
    text: Annotated[list[str] | None, option("SENTENCE", "A sentence to embed; give it again for more.")] = None,
    repeat: Annotated[int, option("N", "Timed runs of each model.", min=1)] = 20,
    json: AsJson = False,
) -> Answer:
    """Run an encoder and a decoder, stock, with LayerZero's attention, and optimised.

    One screen: times side by side, how equal the results are, what changed, why, and what to do next.
    """
    import io

    from layerzero.cli.demo import demo as run

    spoken = io.StringIO()
    try:
        data = run(stdout_console(spoken if json else None), json=json, texts=text, repeat=repeat)
    except SystemExit:
        say(spoken.getvalue().rstrip())
        raise
    return Answer(data, tuple)


main.command(
    "explain",
    "explain attention --shape 1x2048x32x128 --kv-shape 1x2048x8x128 --dtype bfloat16 --causal",
    "explain attention --shape 1x2048x32x128 --device H100 --with flash_attn_3=3.0.0",
    "explain attention --shape 8x128x12x32 --layout BSHD --no-causal --param attn_mask=8x1x128x128:bool",
    "explain attention.gqa.decode --case llama3_8b_b64 --dtype bfloat16 --param softcap=30.0",
    "explain rms_norm --shape 512x1024 --set prefer=torch --json",
    modules=True,
)(command(ExplainFlags, "layerzero.cli.explain_screen:explain"))
main.command(
    "which",
    "which rms_norm --shape 512x1024",
    "which attention --shape 1x1x32x128 --kv-shape 1x4096x8x128",
    modules=True,
)(command(CallFlags, "layerzero.cli.explain_screen:which"))


@main.command(
    "doctor",
    "doctor",
    "doctor --all",
    "doctor --load --strict",
    "doctor --for decoder",
    "doctor --confirm --module my_kernels",
)
def doctor(
    load: Annotated[bool, flag("--load", "Also load every library, so that broken ones show.")] = False,
    confirm: Annotated[
        bool, flag("--confirm", "First run every suspect in a child process: cleared, or banned.")
    ] = False,
    again: Annotated[bool, flag("--again", "With --confirm: run the banned as well.")] = False,
    module: Annotated[
        list[str] | None, option("MODULE", "With --confirm: import this, which registers kernels.", "--module")
    ] = None,
    strict: Annotated[bool, flag("--strict", "Exit with 1 if there are issues.")] = False,
    everything: Annotated[
        bool, flag("--all", "Also list each library that is not installed or made for other hardware.")
    ] = False,
    asked_for: Annotated[
        str | None, option("SET", "Tell what each operation of decoders, encoders, … has here, on one screen.", "--for")
    ] = None,
) -> Answer:
    """Diagnose this machine and its libraries.

    Lists devices, installed libraries, why any of them is unusable, kernels that failed, and what to do. Builds in the
    background follow. At most five lines at the end say what would make calls faster here. Libraries that are not
    installed, and those for other hardware, are counted.
    """
    from layerzero.cli import doctor as screen
    from layerzero.inspection.diagnosis import doctor as diagnose
    from layerzero.serving.advice import advice
    from layerzero.serving.readiness import jit_status
    from layerzero.tuning.verification.rehearsal import confirm_suspects

    if (again or module) and not confirm:
        raise ValueError("doctor: --again and --module say how to confirm: wanted --confirm with them, got none")
    screen.ask_a_child()
    import_modules(module or [])
    deployment.try_builds()
    confirmed = confirm_suspects(modules=module or [], again=again) if confirm else ()
    diagnosis = diagnose(load=load, asked_for=asked_for)
    code = NO if strict and diagnosis.issues else FINE
    status, faster = jit_status(), advice()
    data = diagnosis.to_dict() | ({"confirmed": [each.to_dict() for each in confirmed]} if confirm else {})
    data |= {"jit": status.to_dict(), "faster": [each.to_dict() for each in faster]}
    lines = [f"confirmed: {each}" for each in confirmed]
    lines += ["confirmed: nothing, there is no suspect"] if confirm and not confirmed else []
    shown = screen.diagnosis(diagnosis, everything=everything)
    return Answer(data, lambda: [*lines, *shown, *screen.faster(status, faster)], code)


@main.command(
    "kernels",
    "kernels",
    "kernels rms_norm",
    "kernels rms_norm --all",
    'kernels "attention.gqa.*" --json',
    "kernels --descriptor --backend torch",
    modules=True,
)
def kernels(
    operation: Annotated[str | None, argument("OPERATION", "An operation, function, alias or glob.")] = None,
    descriptor: Annotated[
        bool, flag("--descriptor", "Print what is declared as capability descriptors, in JSON.")
    ] = False,
    backend: Annotated[str | None, option("NAME", "Only kernels of this library.")] = None,
    everything: Annotated[bool, flag("--all", "Also list each kernel that is made for other hardware.")] = False,
) -> Answer:
    """List kernels, their limits, and what is installed.

    With neither OPERATION nor --backend: the libraries that run here, and how many kernels of which functions each has.
    """
    from layerzero.cli import listing
    from layerzero.engine.registry import REGISTRY

    if descriptor:
        return listing.declared(operation or "*", backend)
    kernels = REGISTRY.kernels(operation or "*")
    found = listing.on_this_machine(listing.of_backend(kernels, backend) if backend else kernels)
    brief = operation is None and backend is None and not everything
    shown = listing.libraries(found) if brief else listing.kernels(found, everything=everything)
    return Answer([listing.kernel_data(each) for each in found], lambda: shown)


@main.command("operations", "operations", "operations --json")
def operations() -> Answer:
    """List operations and their named cases."""
    from layerzero.cli import listing
    from layerzero.inspection.answers import list_operations

    found = list_operations()
    return Answer([listing.operation_data(each) for each in found], lambda: listing.operations(found))


checks.add_to(main)


@config.command("show", "config show", "config show --json")
def config_show() -> Answer:
    """Print every effective setting and where it comes from."""
    from layerzero.cli import listing
    from layerzero.engine.config import CONFIGURATION

    effective = CONFIGURATION.effective_with_origin()
    data = {key: {"value": value, "origin": origin} for key, (value, origin) in effective.items()}
    return Answer(data, lambda: listing.effective(effective))


@config.command("keys", "config keys")
def config_keys() -> Answer:
    """Print every key with its type, default and meaning."""
    from layerzero.cli import listing
    from layerzero.engine.settings import SETTINGS

    data = {
        key: {"type": listing.kind(each.kind), "default": each.default, "meaning": each.meaning}
        for key, each in SETTINGS.items()
    }
    return Answer(data, lambda: listing.keys(SETTINGS))


@config.command("check", "config check layerzero.yaml")
def config_check(file: Annotated[Path, argument("FILE", "A YAML file of settings.")]) -> Answer:
    """Check a file of settings.

    Exits with 1 if a key, a value, or the name of a kernel, operation or fact in it is wrong.
    """
    from layerzero.cli.listing import problems

    found = problems(existing(file, "a file of settings"))
    data = {"file": str(file), "valid": not found, "problems": found}
    return Answer(data, lambda: found or [f"{file}: fine"], NO if found else FINE)


@descriptor.command("check", "descriptor check torch.json")
def descriptor_check(file: Annotated[Path, argument("FILE", "A JSON file with a capability descriptor.")]) -> Answer:
    """Check a capability descriptor.

    Exits with 1 if a field, a value, or the name of a kernel or operation in it is wrong; every problem is listed.
    """
    from layerzero.cli import listing

    return listing.checked(existing(file, "a capability descriptor"))


calls.add_to(main)
plans.add_to(main)
deployment.add_to(main)
