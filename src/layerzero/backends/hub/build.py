"""One build of a hub kernel: what is known of it, its kernels' common fields, and its import."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader, FileFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel, Trust
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.system import forking

_importing = forking.held_by_forks()  # a forked child finds no half of a module


class RefusedBuildError(ImportError):
    """A hub kernel may not be imported; ``reason`` says which check failed, what it wanted and what it got."""

    def __init__(self, fact: str, wanted: str, got: str, hint: str = "") -> None:
        self.reason = Reason(ReasonCode.HUB_REFUSED, fact, wanted, got, hint)
        super().__init__(self.reason.message)


@dataclass(frozen=True, slots=True)
class Build:
    """A build variant of a repository on this disk.

    Attributes:
        repo: ``owner/name``.
        path: the folder of the variant, or of the repository where no variant fits.
        revision: the commit that it was downloaded at; empty where nothing tells.
        variant: the folder's name, as ``torch-cpu``; empty where none fits.
        id: the module and the namespace of ``torch.ops`` that it may take.
        sha256: of its ``metadata.json``, which has a hash of every other file.
        platform: what it runs on.
        compiled: whether it has shared libraries.
        signed: whether a publisher that is known signed the metadata.
        version: that of the metadata.
        refused: why it may not be imported.
    """

    repo: str
    path: str
    revision: str = ""
    variant: str = ""
    id: str = ""
    sha256: str = ""
    platform: str = "cpu"
    compiled: bool = False
    signed: bool = False
    version: str = ""
    refused: Reason | None = None

    @property
    def name(self) -> str:
        return self.repo.partition("/")[2]

    @property
    def backend(self) -> Backend:
        """The library that its kernels belong to."""
        at = f"@{self.revision[:12]}" if self.revision else ""
        return Backend(
            name=f"hub.{self.name}",
            summary=f"{self.repo}{at} of the Hugging Face hub{', signed' if self.signed else ''}",
            import_name=self.id or self.repo,
            version=f"{self.version}+{self.sha256[:16]}" if self.sha256 else "unknown",
            platforms=(self.platform,),
            homepage=f"https://huggingface.co/kernels/{self.repo}",
            origin="hub",
            refused=self.refused,
        )

    def kernel(self, name: str, *operations: str, load: Callable[[Facts], Callable[..., Any]], **fields: Any) -> Kernel:
        """A kernel of this build. One that is compiled for an accelerator never ran where it was declared."""
        return Kernel(**self.fields(name), operations=operations, load=load, **fields)

    def fields(self, name: str) -> dict[str, Any]:
        """What each kernel of this build has: its name, library, trust and a low priority until it was measured."""
        trust = Trust.UNTRIED if self.compiled and self.platform != "cpu" else Trust.PLUGIN
        return {"id": f"hub.{self.name}.{name}", "backend": self.backend, "trust": trust, "priority": 20}

    def module(self) -> ModuleType:
        """Import it, once in a process; its files are hashed again first.

        Raises: RefusedBuildError where a file changed since it was checked, or this device's architecture is none of
            the build's, or something else took the module's name.
        """
        from kernels.resolver import Metadata
        from kernels.validate import ArchValidator

        folder = Path(self.path)
        if changed := altered(folder, self.sha256):
            raise RefusedBuildError(f"{self.repo} digest", "the files that were checked", changed)
        with _importing:
            if self.id in sys.modules:
                file, loaded = folder / "__init__.py", sys.modules[self.id]
                if getattr(loaded, "__file__", None) != str(file):
                    raise RefusedBuildError(f"{self.repo} namespace", f"{self.id} of {file}", repr(loaded))
                return loaded
            try:
                metadata = Metadata.read_from_file(folder / "metadata.json")
                ArchValidator().validate_metadata(metadata=metadata, variant=self.variant)
            except RuntimeError as error:
                raise RefusedBuildError(f"{self.repo} architecture", "a build for this device", str(error)) from error
            return _imported(self.id, folder)


class _Source(SourceFileLoader):
    """Source without bytecode: digests leave that out, and Python would run what was put there."""

    def path_stats(self, path: str | bytes) -> NoReturn:  # noqa: ARG002  # comes before any bytecode is read
        raise OSError(errno.ENOTSUP, "no bytecode is read or written")


def _imported(name: str, folder: Path) -> ModuleType:
    """Import a package by a name that no folder has, with submodules from its own files alone."""
    loaders: list[tuple[type, list[str]]] = [(ExtensionFileLoader, [".abi3.so"]), (_Source, [".py"])]
    for place in (folder, *(each for each in folder.rglob("*") if each.is_dir())):
        sys.path_importer_cache[str(place)] = FileFinder(str(place), *loaders)
    file = str(folder / "__init__.py")
    spec = importlib.util.spec_from_file_location(
        name, file, loader=_Source(name, file), submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def sha256_of(path: Path) -> str:
    """The hash of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def altered(variant: Path, sha256: str) -> str:
    """What of a variant's files is not as its metadata says; empty where all are. Raises: OSError, ValueError."""
    from kernels._rust import Digest, DigestValidationError, Metadata  # kernels.verify has them, and imports sigstore

    text = (variant / "metadata.json").read_bytes()
    if hashlib.sha256(text).hexdigest() != sha256:
        return "another metadata.json"
    expected = Metadata.from_bytes(text).digest
    if expected is None:
        return "no digest of its files"
    try:
        expected.validate(Digest.hash_variant(expected.algorithm, variant))
    except DigestValidationError as error:
        return "; ".join(str(each) for each in error.violations[:3])
    return ""
