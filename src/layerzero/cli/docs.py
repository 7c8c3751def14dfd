"""``layerzero docs``: write the pages that follow from the declarations, or say which are stale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from layerzero.cli import pages, pages_descriptors, pages_stub, pages_usage
from layerzero.cli.output import FINE, NO, Answer

START, END = "<!-- generated: support -->", "<!-- /generated -->"
PAGES: dict[str, Callable[[], str]] = {
    "docs/commands.md": pages_usage.commands,
    "docs/compatibility.md": pages.compatibility,
    "docs/descriptors.md": pages_descriptors.descriptors,
    "docs/kernels.md": pages.kernels,
    "docs/operations.md": pages.operations,
    "docs/reasons.md": pages.reasons,
    "docs/settings.md": pages_usage.settings,
    "src/layerzero/__init__.pyi": pages_stub.stub,
}


def answer(root: Path | None, *, check: bool) -> Answer:
    """Write the stale files, or only name them. Raises: ValueError if there is no source checkout."""
    folder = root or Path(__file__).parents[3]
    stale = {path: text for path, text in wanted(folder).items() if _read(folder / path) != text}
    data = {"checked" if check else "written": sorted(stale) if not check else sorted([*PAGES, "README.md"])}
    if check:
        data["stale"] = sorted(stale)
        lines = [f"stale: {path}" for path in sorted(stale)]
        lines.append("next step: `layerzero docs` writes them" if stale else "the generated documentation is current")
        return Answer(data, lambda: lines, NO if stale else FINE)
    for path, text in stale.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    lines = [f"wrote {path}" for path in sorted(stale)] or ["the generated documentation was current"]
    return Answer(data, lambda: lines)


def wanted(folder: Path) -> dict[str, str]:
    """Path to text of every generated file; README.md keeps what lies around its table."""
    readme = _read(folder / "README.md")
    before, start, rest = readme.partition(START)
    _, end, after = rest.partition(END)
    if not (folder / "pyproject.toml").is_file() or not start or not end:
        raise ValueError(
            f"{folder}: wanted a source checkout of layerzero whose README.md has the lines {START} and {END}, got "
            "none; give its folder with --root"
        )
    texts = {path: page() for path, page in PAGES.items()}
    return texts | {"README.md": f"{before}{START}\n\n{pages.support()}\n\n{END}{after}"}


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
