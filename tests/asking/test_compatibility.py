"""Which versions are known how well, and which packages do harm beside each other."""

from __future__ import annotations

import importlib.metadata

import pytest

import layerzero as lz
from layerzero.asking import compatibility
from layerzero.asking.compatibility import Status
from layerzero.engine import probe

LIBRARY = lz.Backend(name="lib", summary="", distribution="lib", versions=">=1,<2", tested=("1.2",), known_bad="==0.9")


@pytest.fixture
def installed(monkeypatch):
    """Packages that are pretended to be installed."""
    versions, real = {}, importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or real(name))
    probe.forget()
    yield versions
    probe.forget()


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("1.2", Status.TESTED),
        ("1.3", Status.EXPECTED),
        ("2.0", Status.UNTESTED),
        ("0.9", Status.BAD),
        ("x", Status.UNTESTED),
    ],
)
def test_what_is_known_of_a_version(version, known):
    assert compatibility.status(LIBRARY, version) is known


def test_a_tested_version_lies_within_the_declared_range():
    with pytest.raises(lz.RegistrationError, match=r"tested: wanted versions within '>=1,<2', got \['3.0'\]"):
        lz.Backend(name="lib", summary="", distribution="lib", versions=">=1,<2", tested=("1.2", "3.0"))


def test_doctor_warns_of_packages_that_do_harm_beside_each_other(installed):
    assert not any("beside" in issue for issue in lz.doctor().issues)
    installed["xformers"] = "0.0.35"
    assert not any("flash-attn-4" in issue for issue in lz.doctor().issues), "one of the two alone"
    installed["flash-attn-4"] = "4.0.0b36"
    (issue,) = [each for each in lz.doctor().issues if "beside" in each]
    assert issue.startswith("xformers 0.0.35 beside flash-attn-4 4.0.0b36: both own the namespace flash_attn")
    assert "uninstall one of them" in issue


def test_doctor_says_how_well_an_installed_version_is_known(installed):
    installed["xformers"] = "0.0.34"
    found = {each.name: each.status for each in lz.doctor().libraries}
    assert found["xformers (xformers)"] is Status.EXPECTED
    assert (
        next(each for each in lz.doctor().to_dict()["libraries"] if each["name"] == "xformers (xformers)")["status"]
        == "expected"
    )
    assert found["flashinfer (flashinfer-python)"] is None
