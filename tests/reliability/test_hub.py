"""Planted kernels of the hub: each is refused by name, before anything of it is imported."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import layerzero as lz
from hub_builds import ACTIVATION, OWNER, VARIANT, module_of, plant, plant_in, settings
from layerzero._native import __path__ as native
from layerzero.backends.hub import checks
from layerzero.engine.registry import REGISTRY

pytest.importorskip("kernels.variants", reason="the package that reads hub kernels is not installed")
pytest.importorskip("kernel_abi_check", reason="the package that checks shared libraries is not installed")

X = torch.ones(4, 64)
OTHER = "torch-universal" if VARIANT == "torch-cpu" else "torch-rocm" if torch.version.hip else "torch-cuda"
COMMITS = "a" * 40, "b" * 40
HERE = f"torch{torch.__version__.split('.')[0]}{torch.__version__.split('.')[1]}"


def look_again(folder, **more):
    """A process looks once for each change of the settings."""
    lz.configure(**{"hub.enabled": False})
    REGISTRY.ready()
    lz.configure(**settings(folder, **more))
    REGISTRY.ready()


def refusal(folder, kernel="hub.activation.silu_mul", **more):
    """What lz.explain says of a planted kernel."""
    look_again(folder, **more)
    reasons = lz.explain("silu_mul", X).reasons(kernel)
    assert [str(each.code) for each in reasons][:1] == ["HUB_REFUSED"], reasons
    return str(reasons[0])


def edited(file, data):
    def change(folder):
        (plant(folder) / file).write_bytes(data)

    return change


def without(file):
    return lambda folder: (plant(folder) / file).unlink()


def made(**fields):
    return lambda folder: plant(folder, **fields)


def native_library(name):
    libraries = [path for place in native for path in Path(place).glob("*.so")]
    if not libraries:
        pytest.skip("LayerZero's own extension, which is no stable ABI, was not built")
    return lambda folder: plant(folder, files={name: libraries[0].read_bytes()})


def a_folder_for(file):
    return lambda folder: (plant(folder) / file).mkdir()


def link_to_itself(folder):
    file = plant(folder) / "__init__.py"
    file.unlink()
    file.symlink_to(file)


def nothing_built(folder):
    (folder / OWNER / "activation" / "build").mkdir(parents=True)


PLANTED = {
    "an edited file": (edited("__init__.py", b"import os"), "activation digest"),
    "an edited byte of metadata": (edited("metadata.json", b'{"name": "activation"'), "activation metadata"),
    "metadata of another kind": (edited("metadata.json", b"[]"), "activation metadata"),
    "metadata that is no text": (edited("metadata.json", b"\xff\xfe"), "activation metadata"),
    "a missing file": (without("__init__.py"), "activation digest"),
    "a file too many": (edited("more.py", b""), "activation digest"),
    "a hidden file": (edited(".more.py", b""), "activation digest"),
    "no metadata": (without("metadata.json"), "activation files"),
    "a link to itself": (link_to_itself, "activation files"),
    "no digest": (made(digest=None), "activation digest"),
    "an unknown digest": (made(digest={"algorithm": "md5", "files": {}}), "activation metadata"),
    "no module": (made(id=None), "activation metadata"),
    "another kernel's name": (lambda folder: plant_in(folder / OWNER / "activation", "relu"), "activation name"),
    "a module that is no name": (made(id="no name"), "activation namespace"),
    "torch's module": (made(id="torch"), "activation namespace"),
    "a module that is built in": (made(id="sys"), "activation namespace"),
    "a module that somebody else has": (made(id="antigravity"), "activation namespace"),
    "LayerZero's module": (made(id="layerzero"), "activation namespace"),
    "torch's namespace": (made(id="aten"), "activation namespace"),
    "a namespace that is taken": (made(id="planted_namespace"), "activation namespace"),
    "an owner that is not allowed": (made(owner="somebody"), "hub.allow"),
    "an owner of a similar name": (made(owner=f"{OWNER}-evil"), "hub.allow"),
    "an older torch": (made(variant="torch25-cxx11-cpu-x86_64-linux"), "activation ABI"),
    "an older C++": (made(variant=f"{HERE}-cxx98-cpu-x86_64-linux"), "activation ABI"),
    "another CPU": (made(variant=f"{HERE}-cxx11-cpu-riscv64-linux"), "activation ABI"),
    "another system": (made(variant=f"{HERE}-cpu-aarch64-plan9"), "activation ABI"),
    "another accelerator": (made(variant="torch-neuron"), "activation ABI"),
    "a variant of no name": (made(variant="release"), "activation ABI"),
    "no build": (nothing_built, "activation ABI"),
    "a library of one Python": (made(files={"_k.cpython-311-x86_64-linux-gnu.so": b""}), "activation ABI"),
    "a library without the stable ABI": (lambda folder: native_library("_k.abi3.so")(folder), "activation ABI"),
    "a library that is text": (made(files={"_k.abi3.so": b"not a library"}), "activation ABI"),
    "a library with a version": (made(files={"lib/libk.so.6": b""}), "activation ABI"),
    "a library of Windows": (made(files={"_k.dll": b"MZ"}), "activation ABI"),
    "a kernel that needs another": (made(**{"kernel-depends": [{"repo-id": "somebody/kernel", "version": 1}]}), None),
    "a package that is unknown": (made(**{"python-depends": ["planted"]}), "activation dependencies"),
    "a later kernels": (made(**{"kernels-minver": "99.0"}), None),
    "a backend that LayerZero has not": (made(backend={"type": "metal"}), "activation backend"),
    "a signature that is garbage": (edited("metadata.json.sigstore", b"planted"), "activation signature"),
    "a signature that is empty": (edited("metadata.json.sigstore", b"{}"), "activation signature"),
    "a signature that is a folder": (a_folder_for("metadata.json.sigstore"), "activation files"),
}
"""What is planted, and the check that refuses it; None for whichever sees it first."""


@pytest.fixture(scope="module")
def taken():
    library = torch.library.Library("planted_namespace", "DEF")
    library.define("taken(Tensor x) -> Tensor")
    return library


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_refused_by_name_before_it_is_imported(what, tmp_path):
    make, fact = PLANTED[what]
    before = set(sys.modules)
    make(tmp_path)
    said = refusal(tmp_path)
    assert fact is None or f"{fact}: wanted" in said, said
    assert module_of("activation") not in sys.modules
    assert not [each for each in sys.modules.keys() - before if "planted" in each]
    assert lz.which("silu_mul", X)["kernel_id"] != "hub.activation.silu_mul"


def test_what_is_refused_is_logged_once(tmp_path, caplog):
    plant(tmp_path, owner="once")
    for _ in range(3):
        refusal(tmp_path)
    assert len([each for each in caplog.messages if "once/activation of the hub is not used" in each]) == 1


def test_two_of_one_name_or_of_one_module_are_not_both_taken(tmp_path):
    plant(tmp_path)
    plant(tmp_path, owner="somebody")
    look_again(tmp_path, allow=[f"{OWNER}/*", "somebody/*"])
    assert REGISTRY.hub.told() == {
        "somebody/activation": f"{OWNER}/activation has its name; hub.allow may name one of them"
    }
    plant(tmp_path, "rmsnorm", id=module_of("activation"))
    look_again(tmp_path)
    reasons = lz.explain("rms_norm", torch.ones(4, 64), torch.ones(64)).reasons("hub.rmsnorm.rms_norm")
    assert "rmsnorm namespace: wanted one of its own" in str(reasons[0])


# the lockfile


def locked(folder, change=lambda text: text):
    file = folder.parent / "hub.lock"
    file.write_text(change(checks.text_of(checks.repositories(folder))))
    return str(file)


def test_what_a_lockfile_pins_is_found_and_nothing_else(tmp_path):
    folder = tmp_path / "hub"
    plant(folder)
    lockfile = locked(folder)
    plant(folder, "rmsnorm", text="")
    lz.configure(**settings(folder, lockfile=lockfile))
    assert not any(each.code == "HUB_REFUSED" for each in lz.explain("silu_mul", X).reasons("hub.activation.silu_mul"))
    assert "hub.lockfile" in REGISTRY.hub.told()[f"{OWNER}/rmsnorm"]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(f'"{VARIANT}": "', f'"{VARIANT}": "0'),
        lambda text: text.replace('"revision": ""', f'"revision": "{COMMITS[0]}"'),
        lambda text: text.replace(OWNER, "somebody"),
        lambda text: json.dumps(json.loads(text) | {"more": 1}),
        lambda text: json.dumps(json.loads(text) | {"kernels": {}}),
        lambda text: json.dumps(json.loads(text) | {"version": 2}),
        lambda text: text[:-20],
        lambda text: "",
    ],
)
def test_a_lockfile_that_was_edited_is_refused_with_all_that_it_names(change, tmp_path):
    folder = tmp_path / "hub"
    plant(folder)
    lz.configure(**settings(folder, lockfile=locked(folder, change)))
    assert "hub.activation.silu_mul" not in [each.id for each in lz.list_kernels("silu_mul")]
    assert "hub.lockfile of the hub is not used" in "".join(lz.doctor().issues)


def test_other_content_than_was_locked_is_refused(tmp_path):
    folder = tmp_path / "hub"
    plant(folder)
    lockfile = locked(folder)
    plant(folder, text=f"{ACTIVATION}\n")  # whole by itself
    assert "activation hash" in refusal(folder, lockfile=lockfile)
    shutil.rmtree(folder)
    plant(folder, variant=OTHER)
    assert "no such variant by hub.lockfile" in refusal(folder, lockfile=lockfile)


def test_of_a_cache_of_the_hub_the_locked_commit_is_taken(tmp_path):
    cached = tmp_path / f"kernels--{OWNER}--activation" / "snapshots"
    for commit in COMMITS:
        plant_in(cached / commit, text=f"{ACTIVATION}# {commit}\n")
    first = [each for each in checks.repositories(tmp_path) if each.revision == COMMITS[0]]
    lockfile = tmp_path.parent / "cache.lock"
    lockfile.write_text(checks.text_of(first))
    look_again(tmp_path, lockfile=str(lockfile))
    assert [each.revision for each in REGISTRY.hub.builds] == [COMMITS[0]]
    assert REGISTRY.hub.builds[0].refused is None
    (cached / COMMITS[0]).rename(cached / ("c" * 40))
    look_again(tmp_path, lockfile=str(lockfile))
    assert "activation revision" in str(lz.explain("silu_mul", X).reasons("hub.activation.silu_mul")[0])


def test_of_several_commits_the_one_that_main_names_is_taken(tmp_path):
    cached = tmp_path / f"kernels--{OWNER}--activation"
    for commit in COMMITS:
        plant_in(cached / "snapshots" / commit)
    said = refusal(tmp_path)
    assert "activation revision: wanted one, or a refs/main that names one of them" in said
    assert all(commit[:12] in said for commit in COMMITS)
    main = cached / "refs" / "main"
    main.parent.mkdir()
    main.write_text("c" * 40)
    assert "activation revision" in refusal(tmp_path)
    for commit in COMMITS:
        main.write_text(f"{commit}\n")
        look_again(tmp_path)
        assert [(each.revision, each.refused) for each in REGISTRY.hub.builds] == [(commit, None)]


# signatures


def test_a_signature_that_verifies_is_noted_and_its_publisher_is_asked_for(tmp_path, monkeypatch):
    from kernels.verify import DEFAULT_POLICIES
    from sigstore import models, verify

    asked = []

    class Verifier:
        def verify_artifact(self, data, bundle, policy):
            asked.append((data, bundle, policy._children))

    place = plant(tmp_path)
    (place / "metadata.json.sigstore").write_bytes(b"signed")
    monkeypatch.setattr(verify.Verifier, "production", lambda offline: Verifier() if offline else None)
    monkeypatch.setattr(models.Bundle, "from_json", lambda data: data)
    build = checks.checked(next(iter(checks.repositories(tmp_path))), [f"{OWNER}/*"], None)
    assert build.signed
    assert asked == [((place / "metadata.json").read_bytes(), b"signed", DEFAULT_POLICIES)]


def test_what_quantises_by_scales_of_its_own_has_no_adapter():
    """Rows of zeros have the least scale of ``lz.quantize``; fp8-fbgemm and finegrained-fp8 give 2e-15 and 0."""
    assert lz.quantize(torch.zeros(2, 32), "fp8_e4m3", per="row")[1].tolist() == [[pytest.approx(1 / (448 * 512))]] * 2
    assert {"fp8-fbgemm", "finegrained-fp8"}.isdisjoint(checks.ADAPTERS)
