"""Notes of builds: they count as long as the files that they name, and are read once while those stay."""

from __future__ import annotations

import os
import shutil
import time

import torch

import layerzero as lz
from background_calls import CALL, compiling
from layerzero.core.system import disk
from layerzero.engine import jit
from layerzero.engine.jit import BUILT


def test_notes_of_builds_count_as_long_as_their_files_exist(tmp_path):
    kernel = compiling("test.noted", None, cache_folder=lambda: tmp_path)
    facts = lz.facts("rms_norm", *CALL)
    assert not BUILT.ready(kernel, facts)
    with jit.opened_files() as opened:
        (tmp_path / "part").write_text("compiled")
        (tmp_path / "part").rename(tmp_path / "kernel.cubin")
        (tmp_path.parent / "elsewhere").write_text("no artefact")
    jit.note(kernel, facts, opened)
    assert BUILT.ready(kernel, facts)
    assert not BUILT.ready(kernel, lz.facts("rms_norm", torch.ones(4, 4096), torch.ones(4096)))
    (tmp_path / "kernel.cubin").unlink()
    assert not BUILT.ready(kernel, facts), "the cache was wiped"


def test_a_file_that_is_only_locked_stands_for_what_lies_beside_it(tmp_path):
    kernel = compiling("test.locked", None, cache_folder=lambda: tmp_path)
    facts = lz.facts("rms_norm", *CALL)
    with jit.opened_files() as opened:
        os.close(os.open(tmp_path / "abc.lock", os.O_RDONLY | os.O_CREAT))
    jit.note(kernel, facts, opened)
    assert not BUILT.ready(kernel, facts), "the library kept nothing: a full disk, perhaps"
    (tmp_path / "abc.o").write_text("compiled, and read outside of Python")
    jit.note(kernel, facts, opened)
    assert BUILT.ready(kernel, facts)
    (tmp_path / "abc.o").unlink()
    assert not BUILT.ready(kernel, facts), "the lock alone is no artefact"


def test_notes_are_read_once_while_their_folder_stays_as_it_is(tmp_path, monkeypatch):
    read, real = [], disk.read_plain
    monkeypatch.setattr(disk, "read_plain", lambda path, most: (read.append(path), real(path, most))[1])
    folder, noted = tmp_path / jit.NOTES, jit.Noted()
    assert noted.files(folder / "a.json") is None
    assert not read, "a folder that does not exist is not looked into"
    folder.mkdir()

    def settle():
        past = time.time_ns() - 10 * jit.SETTLED_NS
        os.utime(folder, ns=(past, past))

    assert [noted.files(folder / "a.json") for _ in range(2)] == [None, None]
    assert len(read) == 2, "it was changed just now, and may change again at what the file system calls the same time"
    settle()
    assert [noted.files(folder / name) for name in ("a.json", "b.json") * 3] == [None] * 6
    assert len(read) == 4
    (folder / "a.json").write_text('["a.cubin"]')
    assert noted.files(folder / "a.json") == ["a.cubin"], "another process built it"
    settle()
    assert [noted.files(folder / "a.json") for _ in range(3)] == [["a.cubin"]] * 3
    assert len(read) == 6
    shutil.rmtree(folder)
    assert noted.files(folder / "a.json") is None, "it was wiped"
