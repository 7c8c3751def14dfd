"""Builds are passed on only where asked for, taken only where asked for, and only where what made them is here, too."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys

import pytest
import torch

import layerzero as lz
from command_lines import answer, run
from layerzero.backends.torch import aot_inductor, inductor
from layerzero.core.evidence import Measurement
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage import machine_exchange, records

KERNEL = "inductor.rms_norm"


def another_machine(monkeypatch, folder):
    """From here on, files lie elsewhere: LayerZero's and Inductor's."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    lz.configure()
    from layerzero import _assembly

    ENGINE.ledger = _assembly.ledger()
    return folder / "inductor" / "layerzero"


def called():
    facts = lz.facts("rms_norm", torch.randn(4, 64), torch.randn(64))
    ENGINE.ledger.called(facts)
    return facts


@pytest.fixture(params=["named by the kernel", "noted"])
def built(request, monkeypatch, tmp_path):
    """A build of a kernel, its facts, and a file that it was exported to; then another machine without it."""
    if not inductor.INDUCTOR.holds_for(torch.__version__.split("+")[0]):
        pytest.skip("Inductor's kernels are not for this torch")
    kernel_id, folder = KERNEL, another_machine(monkeypatch, tmp_path / "first")
    if request.param == "noted":
        kernel_id = "noted.rms_norm"
        backend = lz.Backend("noted", "files that are noted", version="1", origin="code")
        kernel = lz.Kernel(
            id=kernel_id, operations=("norm.rms",), backend=backend, load=lambda _: None, accepts=("eps",), jit=True,
            build_key=lambda facts: facts.size("hidden"), cache_folder=aot_inductor.cache_folder,
        )  # fmt: skip
        lz.register_backend([kernel])
    facts, kernel = called(), REGISTRY.kernel(kernel_id)
    folder.mkdir(parents=True)
    (folder / "abc.4096.pt2").write_bytes(b"machine code")
    if request.param == "noted":
        from layerzero.engine import jit

        jit.note(kernel, facts, [str(folder / "abc.4096.pt2")])
    else:
        aot_inductor.note(inductor._name(REGISTRY.operation("norm.rms"), facts), [(4096, folder / "abc.4096.pt2")])
    ENGINE.ledger.record_time(kernel, facts, Measurement(10.0, 10.0, 0.01, 20))
    file = tmp_path / "all.jsonl"
    assert answer(f"perfdb export {file} --builds --kernel {kernel_id}")["builds"] == 1
    yield kernel, facts, file, another_machine(monkeypatch, tmp_path / "second")
    if request.param == "noted":
        lz.unregister_kernel(kernel_id)


def is_built(kernel, facts):
    from layerzero.engine import jit

    return jit.is_kept(kernel, facts)


def test_a_build_reaches_another_machine_of_the_kind_where_the_user_says_so(built):
    kernel, facts, file, folder = built
    assert not is_built(kernel, facts)
    left = answer(f"perfdb import {file}")
    assert (left["builds"], left["builds_left"]) == (
        0,
        {"they are code; --builds takes them from a file that you trust": 1},
    )
    assert answer(f"perfdb import {file} --builds --dry-run")["builds"] == 1
    assert not folder.exists(), "nothing is written without being asked for"
    assert "1 builds would be taken with --builds" in run(f"perfdb diff {file}").output
    assert answer(f"perfdb import {file} --builds")["builds"] == 1
    assert (folder / "abc.4096.pt2").read_bytes() == b"machine code"
    assert is_built(kernel, facts)
    assert answer(f"perfdb import {file} --builds")["builds_left"] == {"it was built here already": 1}


@pytest.mark.parametrize(
    "key", ["library", "torch", "device", "capability", "python", "system", "triton", "c++", "nvcc"]
)
def test_what_another_thing_made_is_left_by_name(built, key):
    _, _, file, folder = built
    *lines, last = file.read_text().splitlines()
    data = json.loads(last)
    data["versions" if key in records.Versions.__struct_fields__ else "made_by"][key] = "another"
    file.write_text("\n".join([*lines, json.dumps(data)]) + "\n")
    here = machine_exchange.made_by()
    done = answer(f"perfdb import {file} --builds")
    if key in machine_exchange.HOST_COMPILERS and key not in here:
        assert done["builds"] == 1, "what has no compiler takes what one made"
        return
    (why,) = done["builds_left"]
    assert why.startswith(f"{key}: wanted ")
    assert why.endswith(", got another")
    assert not folder.exists()


def test_other_files_in_its_place_stay(built):
    _, _, file, folder = built
    folder.mkdir(parents=True)
    (folder / "abc.4096.pt2").write_bytes(b"another build")
    (why,) = answer(f"perfdb import {file} --builds")["builds_left"]
    assert why.endswith("other files of these names lie here")
    assert (folder / "abc.4096.pt2").read_bytes() == b"another build"


def test_a_folder_that_others_may_write_gets_no_build(built):
    _, _, file, folder = built
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    (why,) = answer(f"perfdb import {file} --builds")["builds_left"]
    assert why.startswith(f"{folder}: ")
    assert not (folder / "abc.4096.pt2").exists()


@pytest.mark.parametrize(
    "name", ["/etc/ld.so.preload", "../../outside.so", "a/../../outside.so", "..\\outside.so", "a\0b", ""]
)
def test_a_file_with_names_elsewhere_or_other_content_is_refused_whole(built, name):
    _, _, file, folder = built
    *lines, last = file.read_text().splitlines()
    data = json.loads(last)
    code = b"evil" if name else b"other code"
    data["files"][0] |= {"data": base64.b64encode(code).decode()}
    data["files"][0] |= {"name": name, "sha256": hashlib.sha256(code).hexdigest()} if name else {}
    file.write_text("\n".join([*lines, json.dumps(data)]) + "\n")
    refused = run(f"perfdb import {file} --builds")
    assert refused.exit_code == 1
    assert ("wanted files in the library's folder" if name else "its checksum does not hold") in refused.output
    assert not folder.exists()


def named(file, name):
    """Give the file of the exported build another name."""
    *lines, last = file.read_text().splitlines()
    data = json.loads(last)
    data["files"][0]["name"] = name
    file.write_text("\n".join([*lines, json.dumps(data)]) + "\n")


def test_every_folder_of_a_build_is_this_users_alone(built):
    _, _, file, folder = built
    named(file, "deep/er/abc.4096.pt2")
    (folder / "deep").mkdir(parents=True)
    (folder / "deep").chmod(0o777)
    (why,) = answer(f"perfdb import {file} --builds")["builds_left"]
    assert f"{folder / 'deep'} can be written by every user" in why
    (folder / "deep").rmdir()
    folder.rmdir()
    folder.parent.rmdir()
    before = os.umask(0)
    try:
        assert answer(f"perfdb import {file} --builds")["builds"] == 1
    finally:
        os.umask(before)
    modes = {each.stat().st_mode & 0o777 for each in (folder.parent, folder, folder / "deep", folder / "deep" / "er")}
    assert modes == {0o700}


def test_where_builds_cannot_be_written_nothing_is_taken(built):
    _, _, file, folder = built
    folder.parent.parent.mkdir(exist_ok=True)
    folder.parent.write_text("in the way")
    refused = run(f"perfdb import {file} --builds")
    assert (refused.exit_code, "wanted a place to write to" in refused.stderr) == (2, True), (
        refused.output,
        refused.exception,
    )
    assert answer("perfdb show")["rows"] == 0
    folder.parent.unlink()
    assert answer(f"perfdb import {file} --builds")["rows"] == answer("perfdb show")["rows"] == 1


def test_a_dry_run_leaves_what_is_known_of_builds(built, monkeypatch):
    _, _, file, _ = built
    forgotten = []
    monkeypatch.setattr(machine_exchange.NOTED, "forget", lambda: forgotten.append(True))
    run(f"perfdb import {file} --builds --dry-run")
    assert not forgotten
    run(f"perfdb import {file} --builds")
    assert forgotten


OWN = """
import layerzero as lz
from layerzero.backends.torch import aot_inductor

backend = lz.Backend("noted", "files that are noted", version="1", origin="code")
kernel = lz.Kernel(
    id="noted.rms_norm", operations=("norm.rms",), backend=backend, load=lambda _: None, accepts=("eps",), jit=True,
    build_key=lambda facts: facts.size("hidden"), cache_folder=aot_inductor.cache_folder,
)
lz.register_backend([kernel])
"""


@pytest.mark.parametrize("built", ["noted"], indirect=True)
def test_a_module_registers_the_kernels_of_a_build(built, monkeypatch, tmp_path):
    _, _, file, _ = built
    lz.unregister_kernel("noted.rms_norm")
    (tmp_path / "own_noted.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    unknown = {"noted.rms_norm: wanted a kernel that is registered here": 1}
    assert answer(f"perfdb import {file} --builds")["builds_left"] == unknown
    assert answer(f"perfdb diff {file}", 1)["builds_left"] == unknown
    done = answer(f"perfdb diff {file} --module own_noted")
    assert done["builds"] == 1, done
    lz.unregister_kernel("noted.rms_norm")
    monkeypatch.delitem(sys.modules, "own_noted")
    assert answer(f"perfdb import {file} --builds --module own_noted")["builds"] == 1


@pytest.mark.skipif(os.name != "posix", reason="needs programs that a line of a shell begins")
def test_a_compiler_of_the_same_name_and_another_version_is_another(monkeypatch, tmp_path):
    compiler, found = tmp_path / "g++", []
    monkeypatch.setenv("CXX", str(compiler))
    for text in ("echo 'g++ (Distribution) 12.2.0'; echo more", "echo 'g++ (Distribution) 13.1.0'", "exit 1"):
        compiler.write_text(f"#!/bin/sh\n{text}\n")
        compiler.chmod(0o755)
        found.append(machine_exchange.made_by.__wrapped__().get("c++"))
    assert found == ["(Distribution) 12.2.0", "(Distribution) 13.1.0", None]


def test_without_builds_the_file_has_none(built, tmp_path):
    file = tmp_path / "times.jsonl"
    assert answer(f"perfdb export {file}")["builds"] == 0
    assert "builds" not in json.loads(file.read_text().splitlines()[0])


def test_a_file_without_a_build_says_that_nothing_was_called(built, tmp_path):
    found = run(f"perfdb export {tmp_path / 'none.jsonl'} --builds --operation 'mlp.*'")
    assert "no build: none lies here for a call that this machine made" in " ".join(found.output.split())
