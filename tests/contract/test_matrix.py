"""``python -m tools matrix``: what it keeps of a run of conformance, and what it calls drift."""

import json

import pytest

from layerzero.core.device import Device
from layerzero.engine.registry import REGISTRY
from layerzero.testing.conformance import KernelReport, Result, machine
from layerzero.testing.report import ConformanceReport
from tools import matrix
from tools.__main__ import main

KERNEL = "torch.rms_norm"
OPERATIONS = REGISTRY.kernel(KERNEL).operations


@pytest.fixture
def take(tmp_path, capsys):
    """Take a run of one kernel in; gives the exit code and what was said."""

    def taken(*statuses, refused="", operations=OPERATIONS, package="torch 2.13.0"):
        results = [Result(KERNEL, operations[0], f"check {n}", each, "why") for n, each in enumerate(statuses)]
        mine = KernelReport(KERNEL, "torch", tuple(operations), package, refused, results=results)
        absent = KernelReport("quack.rms_norm", "quack", (), "quack-kernels", "[NOT_INSTALLED] quack is absent")
        report = ConformanceReport(0, "cpu", machine(Device.detect("cpu")), [mine, absent])
        run = tmp_path / "run.json"
        run.write_text(json.dumps(report.to_dict()))
        code = main(["--root", str(tmp_path), "matrix", str(run)])
        said = capsys.readouterr()
        return code, said.out + said.err

    return taken


def kept(root):
    (path,) = (root / matrix.FOLDER).glob("*.json")
    return json.loads(path.read_text())["kernels"]


def test_a_run_becomes_a_row_of_what_could_run_there(take, tmp_path):
    code, said = take("passed", "refused", "passed")
    assert (code, "1 passed" in said) == (0, True)
    found = kept(tmp_path)[KERNEL]
    date = found.pop("date")
    assert found == {"status": "passed", "checks": 2, "library": "torch", "package": "torch 2.13.0"}
    (cells,) = matrix.cells(tmp_path)
    assert cells[:2] == ["torch", "torch 2.13.0"]
    assert cells[4:] == [1, "", 0, date]


def test_what_a_run_did_not_have_keeps_its_date_and_does_not_count(take, tmp_path):
    take("passed")
    (path,) = (tmp_path / matrix.FOLDER).glob("*.json")
    row = json.loads(path.read_text())
    row["kernels"]["torch.layer_norm"] = row["kernels"][KERNEL] | {"date": "2026-01-01"}
    path.write_text(json.dumps(row))
    code, said = take("refused", refused="[DTYPE_UNSUPPORTED] why")
    assert (code, "1 refused" in said, "passed" in said.splitlines()[-2]) == (1, True, False)
    assert {each["date"] for each in kept(tmp_path).values()} > {"2026-01-01"}


def test_what_passed_and_does_no_more_is_drift(take, tmp_path):
    take("passed")
    code, said = take(refused="[VERSION_UNSUPPORTED] wanted another", package="torch 2.99")
    assert code == 1
    assert f"drift: {KERNEL} passed with torch 2.13.0, and is refused: [VERSION_UNSUPPORTED] wanted another" in said
    code, said = take("passed", "died")
    assert code == 1
    assert f"wrong: {KERNEL} with torch 2.13.0: {REGISTRY.kernel(KERNEL).operations[0]}, check 1: died: why" in said
    assert f"`{KERNEL}`" in next(matrix.cells(tmp_path))[5]


def test_a_version_that_passed_is_named_where_its_declaration_does_not(take):
    assert "torch: 2.99 passed and is not among `tested` of its declaration" in take("passed", package="torch 2.99")[1]
    assert "declaration" not in take("passed", package="torch 2.13.0")[1]


def test_a_run_of_some_operations_and_what_is_no_run_are_refused(take, tmp_path, capsys):
    code, said = take("passed", operations=("norm.layer",))
    assert (code, "wanted every operation" in said) == (2, True)
    (tmp_path / "other.json").write_text("{}")
    assert main(["matrix", str(tmp_path / "other.json")]) == 2
    assert "wanted a run of `layerzero conformance --json > RUN`, got none" in capsys.readouterr().err


def test_no_version_that_is_called_tested_has_a_wrong_kernel_in_what_was_kept():
    for cells in matrix.cells(matrix.CHECKOUT):
        assert not cells[5], cells
