"""Which versions are known how well, and which packages do harm beside each other."""

from __future__ import annotations

import dataclasses
import importlib.metadata

import pytest

import layerzero as lz
from layerzero.core.device import Device
from layerzero.core.kernel import Release
from layerzero.engine import probe
from layerzero.inspection import diagnosis
from layerzero.inspection.diagnosis import VersionStatus

LIBRARY = lz.Backend(name="lib", summary="", distribution="lib", versions=">=1,<2", tested=("1.2",), known_bad="==0.9")


@pytest.fixture
def installed(monkeypatch):
    """Packages that are pretended to be installed."""
    versions, real = {}, probe.installed_version
    monkeypatch.setattr(probe, "installed_version", lambda name: versions.get(name) or real(name))
    probe.forget()
    yield versions
    probe.forget()


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("1.2", VersionStatus.TESTED),
        ("1.3", VersionStatus.EXPECTED),
        ("2.0", VersionStatus.UNTESTED),
        ("0.9", VersionStatus.BAD),
        ("x", VersionStatus.UNTESTED),
    ],
)
def test_what_is_known_of_a_version(version, known):
    assert diagnosis.status(LIBRARY, version) is known


def test_a_tested_version_lies_within_the_declared_range():
    with pytest.raises(lz.RegistrationError, match=r"tested: wanted versions within '>=1,<2', got \['3.0'\]"):
        lz.Backend(name="lib", summary="", distribution="lib", versions=">=1,<2", tested=("1.2", "3.0"))


def test_the_version_of_a_distribution_is_the_one_that_its_metadata_tells(monkeypatch, tmp_path):
    for name, text in (("one", "Version: 1.5+cpu \nName: one\n\nVersion: 9\n"), ("two", "Name: two\n\nVersion: 9\n")):
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        (tmp_path / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\n{text}")
    (tmp_path / "old-3.egg-info").mkdir()
    (tmp_path / "old-3.egg-info" / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: old\nVersion: 3\n\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert probe.installed_version("torch") == importlib.metadata.version("torch")
    names = "one", "two", "old", "none"
    assert [probe.installed_version(each) for each in names] == ["1.5+cpu", None, "3", None]
    monkeypatch.syspath_prepend(str(tmp_path / "more"))  # what was looked up for one path is kept in tests
    monkeypatch.setattr(importlib.metadata.Distribution, "version", property(lambda _: {}["Version"]))
    assert [probe.installed_version(each) for each in names] == ["1.5+cpu", None, "3", None], "as importlib_metadata"


def test_doctor_warns_of_packages_that_do_harm_together(installed):
    assert not any("both own" in issue for issue in lz.doctor().issues)
    installed["xformers"] = "0.0.35"
    assert not any("flash-attn-4" in issue for issue in lz.doctor().issues), "one of the two alone"
    installed["flash-attn-4"] = "4.0.0b36"
    (issue,) = [each for each in lz.doctor().issues if "both own" in each]
    assert issue.startswith("xformers 0.0.35 with flash-attn-4 4.0.0b36: both own the namespace flash_attn")
    assert "uninstall one of them" in issue


def test_doctor_says_how_well_an_installed_version_is_known(installed):
    installed["xformers"] = "0.0.34"
    found = {each.name: each.status for each in lz.doctor().libraries}
    assert found["xformers (xformers)"] is VersionStatus.EXPECTED
    assert (
        next(each for each in lz.doctor().to_dict()["libraries"] if each["name"] == "xformers (xformers)")["status"]
        == "expected"
    )
    assert found["flashinfer (flashinfer-python)"] is None


OF_ONE_TORCH = lz.Backend(
    name="lib",
    summary="",
    distribution="lib",
    versions=">=2,<4",
    known_bad="==2.0",
    releases=(
        Release("==4.*", ("torch>=2.15,<2.16",), "pip install lib==4", proven=False),
        Release("==3.*", ("torch>=2.14,<2.15",), "pip install lib==3"),
        Release(">=2.1,<3", ("torch>=2.13,<2.14",), "pip install lib==2.1"),
    ),
)


NONE_FITS = (
    "lib is absent, >=2,<4 is needed. No release of it is known for torch 2.12.0; install one with its own: pip "
    "install lib==4 with torch>=2.15,<2.16 or pip install lib==3 with torch>=2.14,<2.15 or pip install lib==2.1 "
    "with torch>=2.13,<2.14"
)
FITS, VET = "Install a version that fits: pip install lib", "prove this one here: `layerzero vet --backend lib`"


@pytest.mark.parametrize(
    ("torch", "lib", "told"),
    [
        ("2.14.1", "3.1", ""),
        ("2.13.0", "2.5", ""),
        ("2.13.0", None, "lib is absent, >=2.1,<3 is needed. Install it: pip install lib==2.1"),
        ("2.14.0", None, "lib is absent, ==3.* is needed. Install it: pip install lib==3"),
        ("2.12.0", None, NONE_FITS),
        (
            "2.15.0",
            None,
            "lib is absent, ==4.* is needed. Install it: pip install lib==4, then " + VET.replace("this one", "it"),
        ),
        ("2.14.0", "2.5", f"torch must be >=2.13,<2.14, is 2.14.0. {FITS}==3"),
        ("2.13.0", "2.0", f"lib version must be >=2,<4, not ==2.0, is 2.0. {FITS}==2.1"),
        # its release is known, its kernels are not: they prove themselves
        ("2.15.0", "4.1", f"lib version must be >=2,<4, is 4.1. {VET}"),
        ("2.13.0", "2.0.5", f"lib version must be >=2,<4, is 2.0.5. {FITS}==2.1; or {VET}"),
    ],
)
def test_each_release_wants_the_torch_that_it_was_made_for(torch, lib, told):
    libraries = {"torch": torch} | ({"lib": lib} if lib else {})
    reason = probe.Machine(libraries=libraries).state(OF_ONE_TORCH, Device.detect("cpu")).reason
    assert (reason.message if reason else "") == told


def test_a_release_without_a_range_is_refused():
    with pytest.raises(lz.RegistrationError, match="versions and requires: wanted ranges such as"):
        dataclasses.replace(OF_ONE_TORCH, releases=(Release("4", ("torch>=2.15",), "pip install lib"),))
