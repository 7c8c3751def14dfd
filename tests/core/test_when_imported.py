"""What is done once another module is imported: however that is asked for, in whichever thread, and if it fails."""

import importlib
import importlib.util
import logging
import sys
import threading

import pytest

from layerzero.core.import_hook import when_imported

NAME = "waited_for"


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield tmp_path / f"{NAME}.py"
    sys.modules.pop(NAME, None)
    sys.meta_path[:] = finders


def test_that_a_module_is_looked_for_is_no_import_of_it(module):
    module.write_text("value = 1\n")
    told, finders = [], len(sys.meta_path)
    when_imported(NAME, lambda: told.append(sys.modules[NAME].value))
    when_imported(NAME, lambda: told.append("second"))
    for _ in range(2):
        spec = importlib.util.find_spec(NAME)
        assert spec.loader.get_filename() == str(module)
        assert told == []
    importlib.import_module(NAME)
    assert sorted(told, key=str) == [1, "second"]
    assert len(sys.meta_path) == finders


def test_an_import_that_failed_is_waited_for_again(module):
    module.write_text("raise RuntimeError\n")
    told = []
    when_imported(NAME, lambda: told.append(True))
    with pytest.raises(RuntimeError):
        importlib.import_module(NAME)
    assert told == []
    module.write_text("value = 'a text of another length'\n")
    importlib.import_module(NAME)
    assert told == [True]


def test_a_module_that_another_thread_imports_just_now_is_told_when_it_is_complete(module, monkeypatch):
    begun, goes_on = threading.Event(), threading.Event()
    module.write_text("import sys\nbegun, goes_on = sys.waited_by\nbegun.set()\ngoes_on.wait(60)\nvalue = 1\n")
    monkeypatch.setattr(sys, "waited_by", (begun, goes_on), raising=False)
    told, finders = [], len(sys.meta_path)
    thread = threading.Thread(target=importlib.import_module, args=(NAME,))
    thread.start()
    assert begun.wait(60)
    when_imported(NAME, lambda: told.append(sys.modules[NAME].value))
    assert told == []
    goes_on.set()
    thread.join(60)
    assert told == [1]
    assert len(sys.meta_path) == finders


def test_what_fails_then_breaks_no_import_and_is_logged(module, caplog):
    module.write_text("value = 1\n")

    def told():
        raise AttributeError("torch._ops has no _OpNamespace")

    when_imported(NAME, told)
    with caplog.at_level(logging.WARNING, "layerzero"):
        assert importlib.import_module(NAME).value == 1
        when_imported(NAME, told)
    assert [NAME in each.getMessage() and "_OpNamespace" in each.getMessage() for each in caplog.records] == [True] * 2
