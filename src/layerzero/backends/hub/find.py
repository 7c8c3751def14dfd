"""Repositories of hub kernels on this disk: a folder of the user's, or the cache that ``kernels download`` fills.

A folder holds ``<owner>/<name>/build/<variant>``, or what a cache of the hub does:
``kernels--<owner>--<name>/snapshots/<commit>/build/<variant>``. Nothing else is looked at, and nothing is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_CACHED = re.compile(r"kernels--(?P<owner>.+?)--(?P<name>.+)")


class Found(NamedTuple):
    """A repository: ``owner/name``, its folder, its commit in a cache of the hub, and whether refs/main names it."""

    repo: str
    path: Path
    revision: str = ""
    is_main: bool = False


def cache_of_the_hub() -> Path:
    """The folder that the ``kernels`` package downloads to, by the variables that it reads."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(os.environ.get("KERNELS_CACHE") or os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def repositories(folder: Path) -> Iterator[Found]:
    """Every repository in a folder, sorted; a cache gives one for each commit. Raises: OSError."""
    for owner in sorted(each for each in folder.iterdir() if each.is_dir()):
        cached = _CACHED.fullmatch(owner.name)
        if cached is not None:
            repo = f"{cached['owner']}/{cached['name']}"
            main = owner / "refs" / "main"
            commit = main.read_text().strip() if main.is_file() else ""
            yield from (Found(repo, each, each.name, each.name == commit) for each in _folders(owner / "snapshots"))
        elif _NAME.fullmatch(owner.name):
            for path in _folders(owner):
                if _NAME.fullmatch(path.name) and (path / "build").is_dir():
                    yield Found(f"{owner.name}/{path.name}", path)


def _folders(parent: Path) -> list[Path]:
    return sorted(each for each in parent.iterdir() if each.is_dir()) if parent.is_dir() else []


def variants_in(repository: Path) -> list[Path]:
    """The folders of every build variant."""
    return [each for each in _folders(repository / "build") if (each / "metadata.json").is_file()]
