"""``python -m tools docs``: write the pages and blocks that follow from the declarations, or say which are stale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from layerzero.core.system.disk import write_whole
from tools import pages, pages_descriptors, pages_usage, stub

COMMAND = "python -m tools docs"
END = "<!-- /generated -->"
BLOCKS: dict[str, tuple[str, Callable[[], str]]] = {
    "docs/adding_operations.md": ("<!-- generated: fields of operations -->", pages.operation_fields),
    "docs/backends.md": ("<!-- generated: fields of Kernel -->", pages.kernel_fields),
}
"""Files that are written by hand but for one block: the line that begins it, and what stands in it."""

PAGES: dict[str, Callable[[], str]] = {
    "docs/commands.md": pages_usage.commands,
    "docs/compatibility.md": pages.compatibility,
    "docs/descriptors.md": pages_descriptors.descriptors,
    "docs/kernels.md": pages.kernels,
    "docs/libraries.md": pages.libraries,
    "docs/operations.md": pages.operations,
    "docs/reasons.md": pages.reasons,
    "docs/settings.md": pages_usage.settings,
    "docs/support.md": pages.support,
    "src/layerzero/__init__.pyi": stub.stub,
}

FOLDERS: dict[str, Callable[[], dict[str, str]]] = {
    "docs/kernels": pages.kernels_by_library,
    "docs/operations": pages.operations_by_family,
}
"""Folders of nothing but generated pages; each function gives their texts by path."""


def answer(root: Path, *, check: bool) -> tuple[int, list[str]]:
    """Write the stale files, or only name them. Returns: the exit code, and what to say."""
    texts = wanted(root)
    stale: dict[str, str | None] = {path: text for path, text in texts.items() if _read(root / path) != text}
    present = [path.relative_to(root).as_posix() for folder in FOLDERS for path in (root / folder).glob("*.md")]
    stale |= {path: None for path in present if path not in texts}
    stale = dict(sorted(stale.items()))
    if check:
        lines = [f"stale: {path}" for path in stale]
        lines.append(f"next step: `{COMMAND}` writes them" if stale else "the generated documentation is current")
        return bool(stale), lines
    for path, text in stale.items():
        if text is None:
            (root / path).unlink()
        else:
            (root / path).parent.mkdir(exist_ok=True)
            write_whole(root / path, text.encode())
    written = [f"{'removed' if text is None else 'wrote'} {path}" for path, text in stale.items()]
    return 0, written or ["the generated documentation was current"]


def wanted(folder: Path) -> dict[str, str]:
    """Path to text of every generated file; what lies around a block stays. Raises: ValueError without its lines."""
    if not (folder / "pyproject.toml").is_file():
        raise ValueError(f"{folder}: wanted a source checkout of layerzero, got none; give its folder with --root")
    texts = {path: page() for path, page in PAGES.items()}
    for by_path in FOLDERS.values():
        texts |= by_path()
    for path, (start, block) in BLOCKS.items():
        before, found, rest = _read(folder / path).partition(start)
        _, end, after = rest.partition(END)
        if not found or not end:
            raise ValueError(
                f"{folder}: wanted a source checkout of layerzero whose {path} has the lines {start} and {END}, got "
                "none; give its folder with --root"
            )
        texts[path] = f"{before}{start}\n\n{block()}\n\n{END}{after}"
    return texts


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
