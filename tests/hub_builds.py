"""Folders of hub kernels as tests make them: pure Python builds that run on any CPU, whole or planted wrong."""

from __future__ import annotations

import base64
import hashlib
import json

import torch

ACTIVATION = """
import torch

def silu_and_mul(out, x):
    gate, up = x.chunk(2, -1)
    return out.copy_(torch.nn.functional.silu(gate.float()) * up.float())

def gelu_and_mul(out, x):
    gate, up = x.chunk(2, -1)
    return out.copy_(torch.nn.functional.gelu(gate.float()) * up.float())
"""

RMSNORM = """
import torch

def apply_rms_norm(input, weight, eps):
    return torch.nn.functional.rms_norm(input.float(), weight.shape, weight.float(), eps).to(input.dtype)
"""

ROTARY = """
def apply_rotary(x1, x2, cos, sin, out1, out2, conj):
    first, second = x1 * cos - x2 * sin, x1 * sin + x2 * cos
    out1.copy_(first)
    out2.copy_(second)
"""

OWNER = "kernels-community"
VARIANT = "torch-universal" if torch.version.cuda or torch.version.hip else "torch-cpu"
"""The package takes a build for CPUs where torch is one, and builds of Python alone with every torch."""


def plant(folder, name="activation", text=ACTIVATION, *, owner=OWNER, variant=VARIANT, files=None, **metadata):
    """Write a build as kernel-builder does; returns the variant's folder."""
    return plant_in(folder / owner / name, name, text, variant=variant, files=files, **metadata)


def plant_in(repository, name="activation", text=ACTIVATION, *, variant=VARIANT, files=None, **metadata):
    """The same in a repository's folder, as a cache of the hub names it."""
    place = repository / "build" / variant
    place.mkdir(parents=True, exist_ok=True)
    content = {"__init__.py": text.encode(), **(files or {})}
    for file, data in content.items():
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_bytes(data)
    digests = {file: base64.b64encode(hashlib.sha256(data).digest()).decode() for file, data in content.items()}
    known = {
        "name": name,
        "id": module_of(name),
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    kept = {key: value for key, value in (known | metadata).items() if value is not None}
    (place / "metadata.json").write_text(json.dumps(kept))
    return place


def module_of(name):
    """The module that a planted build takes, unless it says another."""
    return f"_planted_{name.replace('-', '_')}_cpu_0a1b2c3"


def settings(folder, **more):
    """What ``lz.configure`` needs to find them."""
    given = {"enabled": True, "folder": str(folder), "lockfile": None, "allow": [f"{OWNER}/*"], **more}
    return {f"hub.{key}": value for key, value in given.items()}
