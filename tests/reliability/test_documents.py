"""Files that users name: read with an error that names them, written whole or not at all, and tried before the work."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner

import layerzero as lz
from layerzero.cli import bench_tables
from layerzero.cli.app import main
from layerzero.core.system import disk
from layerzero.engine.frozen_choices import FrozenChoice
from layerzero.tuning.measurement.workload import Manifest

CALL = torch.randn(4, 8), torch.randn(8)


BROKEN = {
    "no UTF-8": b"\xff\xfe\x00strict",
    "endless nesting": b"[" * 100_000,
    "nothing": b"",
    "zeros": bytes(100),
    "a date that is none": b"2020-99-99",
    "half": b'{"schema_version": "2.0", "backend": {',
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize(("read", "error"), [
    (lz.load_config, lz.PolicyError),
    (lz.load_descriptor, lz.DescriptorError),
    (lz.freeze, lz.FrozenChoiceError),
    (Manifest.load, ValueError),
])  # fmt: skip
def test_a_damaged_document_is_an_error_that_names_it(tmp_path, what, read, error):
    path = tmp_path / "document"
    path.write_bytes(BROKEN[what])
    if read is lz.load_config and what == "nothing":
        return  # no settings
    with pytest.raises(error, match=str(path)) as raised:
        read(str(path))
    assert type(raised.value) is error


@pytest.mark.parametrize(("place", "value"), [
    (("call", "operation"), "nope"),
    (("call", "operation"), "attention.gqa.decode"),
    (("call", "device"), "cuda:99"),
    (("call", "device"), "nope"),
    (("call", "tensors", "input", "dtype"), "float7"),
    (("call", "tensors", "input", "strides"), (1,)),
    (("call", "tensors", "input", "strides"), (10**30, 1)),
    (("state", "sdpa_disabled"), True),
    (("state",), {}),
])  # fmt: skip
def test_frozen_choices_of_calls_that_cannot_be_are_differences(place, value):
    lz.rms_norm(*CALL)
    whole = msgspec.to_builtins(lz.freeze())
    lz.thaw()
    (name, choice), *_ = (
        (name, each) for name, each in whole["choices"].items() if each["call"]["operation"] == "norm.rms"
    )
    inner = choice
    for each in place[:-1]:
        inner = inner[each]
    inner[place[-1]] = value
    try:
        changed = {name: msgspec.convert(choice, FrozenChoice)}
    except msgspec.ValidationError:
        return  # as in a file
    frost = msgspec.structs.replace(lz.freeze(), choices=changed)
    lz.thaw()
    with pytest.raises(lz.FrozenChoiceError, match="wanted"):
        lz.freeze(frost.sealed())
    assert lz.frozen() is None


def test_frozen_choices_of_settings_that_are_no_such_text_are_a_difference():
    lz.rms_norm(*CALL)
    frost = msgspec.structs.replace(lz.freeze(), settings="none").sealed()
    lz.thaw()
    with pytest.raises(lz.FrozenChoiceError, match="settings: wanted"):
        lz.freeze(frost)


def test_choices_of_calls_with_a_handle_are_frozen_and_verified(tmp_path):
    tables, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    query, cache = torch.randn(1, 1, 4, 64), torch.randn(4, 16, 2, 64)
    lz.paged_attention(query, cache, cache, tables, lengths, step=lz.StepMetadata(tables, lengths))
    document = lz.freeze()
    lz.thaw()
    document.write(tmp_path / "frozen.json")
    assert any(each.call.params.get("step") not in (None, "none") for each in document.choices.values())
    assert lz.freeze(tmp_path / "frozen.json").hash == document.hash


# writing


@pytest.fixture
def nowhere(tmp_path):
    return tmp_path / "missing" / "document.png"


def test_an_error_of_writing_names_the_file_that_was_asked_for(tmp_path, nowhere):
    for act in (disk.check_place, lambda path: disk.write_whole(path, b"x")):
        with pytest.raises(FileNotFoundError) as raised:
            act(nowhere)
        assert raised.value.filename == str(nowhere)
        with pytest.raises(IsADirectoryError):
            act(tmp_path)
    disk.check_place(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_recording_that_could_not_be_written_does_not_begin(nowhere):
    with pytest.raises(FileNotFoundError, match=r"document\.png"), lz.record(nowhere):
        pytest.fail("the program ran")


def test_a_recording_whose_disk_filled_up_lies_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    real = disk.write_all

    def full(file, data):
        if "temporary" not in str(Path(f"/proc/self/fd/{file}").readlink()):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, data)

    monkeypatch.setattr(disk, "write_all", full)
    with pytest.raises(OSError, match="No space left") as raised, lz.record(tmp_path / "workload.json"):
        lz.rms_norm(*CALL)
    (note,) = raised.value.__notes__
    assert Manifest.load(note.removeprefix("what was recorded lies in ")).calls[0].count == 1
    assert not (tmp_path / "workload.json").exists()


@pytest.mark.parametrize("option", ["--plot", "--html"])
def test_bench_looks_at_its_files_before_it_measures(nowhere, monkeypatch, option):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("layerzero.cli.bench.compare", lambda *_, **__: pytest.fail("it measured"))
    run = CliRunner().invoke(main, ["bench", "rms_norm", "--shapes", "1x64", option, str(nowhere)])
    assert run.exit_code == 2, run.output
    assert f"{nowhere}: wanted a place to write to, got: No such file" in run.output


def test_bench_tells_what_it_measured_though_its_page_could_not_be_written(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write_all", full)
    path = tmp_path / "page.html"
    arguments = ["bench", "rms_norm", "--shapes", "1x64", "--dtype", "float32", "--kernel", "torch.rms_norm"]
    run = CliRunner().invoke(main, [*arguments, "--samples", "3", "--json", "--html", str(path)])
    assert run.exit_code == 1, run.output
    assert "No space left" in run.stderr
    assert json.loads(run.stdout)["calls"][0]["operation"] == "norm.rms"
    assert list(tmp_path.iterdir()) == []


def test_no_command_writes_a_file_in_another_way():
    source = Path(lz.__file__).parent
    ways = (".write_text(", ".write_bytes(", '.open("w', ', "w")')
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if any(way in path.read_text(encoding="utf-8") for way in ways)
    }
    assert found == {"core/system/disk.py"}
    assert callable(bench_tables.check)
