"""Free-threaded interpreters: the extension needs the GIL, and Python serves rather than switch it on for all."""

import os
import subprocess
import sys
import sysconfig

import pytest

from layerzero.engine import accelerator

SAYS = "import sys, layerzero as lz; lz.rms_norm; print(sys._is_gil_enabled(), lz.doctor().versions['hit path'])"


@pytest.mark.skipif(
    accelerator.HOT is None and not sysconfig.get_config_var("Py_GIL_DISABLED"), reason=accelerator.ABSENT
)
@pytest.mark.parametrize(("wish", "why"), [("", "would switch it on"), ("1", "which this process keeps off")])
def test_python_serves_in_a_process_without_a_gil_and_says_why(monkeypatch, wish, why):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    monkeypatch.setenv("LAYERZERO_NATIVE", wish)
    with pytest.raises(accelerator._Absent, match=why):
        accelerator._load()


def test_a_wish_of_no_meaning_is_told_and_decides_nothing(monkeypatch, caplog):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    monkeypatch.setenv("LAYERZERO_NATIVE", "of")
    with pytest.raises(accelerator._Absent, match="would switch it on"):
        accelerator._load()
    assert "LAYERZERO_NATIVE: wanted 1, 0 or dlpack, got 'of'" in caplog.text


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="wanted a free-threaded interpreter")
@pytest.mark.parametrize(("wish", "said"), [("", "False in Python"), ("1", "True in C")])
def test_a_free_threaded_interpreter_has_no_gil_unless_the_extension_is_asked_for(wish, said):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    command = [sys.executable, "-W", "ignore", "-c", SAYS]
    shown = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment | {"LAYERZERO_NATIVE": wish}
    )
    assert shown.stdout.startswith(said)
