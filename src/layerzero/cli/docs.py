"""``layerzero docs``: write the pages and blocks that follow from the declarations, or say which are stale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from layerzero.cli import pages, pages_backends, pages_descriptors, pages_stub, pages_usage
from layerzero.cli.output import FINE, NO, Answer
from layerzero.core.system.disk import write_whole

END = "<!-- /generated -->"
BLOCKS: dict[str, tuple[str, Callable[[], str]]] = {
    "docs/adding_operations.md": ("<!-- generated: fields of operations -->", pages_backends.operation_fields),
    "docs/backends.md": ("<!-- generated: fields of Kernel -->", pages_backends.kernel_fields),
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
    "src/layerzero/__init__.pyi": pages_stub.stub,
}


def answer(root: Path | None, *, check: bool) -> Answer:
    """Write the stale files, or only name them. Raises: ValueError if there is no source checkout."""
    folder = root or Path(__file__).parents[3]
    stale = {path: text for path, text in wanted(folder).items() if _read(folder / path) != text}
    data = {"checked" if check else "written": sorted(stale) if not check else sorted([*PAGES, *BLOCKS])}
    if check:
        data["stale"] = sorted(stale)
        lines = [f"stale: {path}" for path in sorted(stale)]
        lines.append("next step: `layerzero docs` writes them" if stale else "the generated documentation is current")
        return Answer(data, lambda: lines, NO if stale else FINE)
    for path, text in stale.items():
        (folder / path).parent.mkdir(exist_ok=True)
        write_whole(folder / path, text.encode())
    lines = [f"wrote {path}" for path in sorted(stale)] or ["the generated documentation was current"]
    return Answer(data, lambda: lines)


def wanted(folder: Path) -> dict[str, str]:
    """Path to text of every generated file; what lies around a block stays. Raises: ValueError without its lines."""
    if not (folder / "pyproject.toml").is_file():
        raise ValueError(f"{folder}: wanted a source checkout of layerzero, got none; give its folder with --root")
    texts = {path: page() for path, page in PAGES.items()}
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
