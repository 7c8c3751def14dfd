"""Commands for work on LayerZero: ``docs`` writes generated documentation, ``new-backend`` the files of a backend.

``matrix`` takes what runs of conformance showed into the page of compatibility.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from layerzero.core.errors import LayerZeroError
from tools import docs, matrix, new_backend


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools", description="Commands for work on LayerZero.")
    parser.add_argument("--root", type=Path, default=matrix.CHECKOUT, help="the source checkout; this one by default")
    commands = parser.add_subparsers(dest="command", required=True)
    written = commands.add_parser("docs", help="write the files that follow from the declarations")
    written.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    backend = commands.add_parser(
        "new-backend",
        help="write declaration, test and table line of a backend",
        description="What it writes runs at once, and fails with the next step until the library's calls are filled "
        "in. Nothing is overwritten.",
        epilog="example: python -m tools new-backend my_library --operation rms_norm",
    )
    backend.add_argument("name", help="the library's module, which names the backend")
    backend.add_argument("--operation", required=True, help="a function, operation or alias that it implements")
    backend.add_argument(
        "--package", type=Path, metavar="FOLDER", help="write a package of its own into FOLDER/NAME, for plugins"
    )
    runs = commands.add_parser("matrix", help="take runs of conformance into the page of compatibility")
    runs.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=f"what `{matrix.COMMAND}` wrote")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code: 0 fine, 1 a file is stale or a kernel wrong, 2 no sense in the question."""
    given = _parser().parse_args(words)
    try:
        if given.command == "docs":
            code, lines = docs.answer(given.root, check=given.check)
        elif given.command == "matrix":
            code, lines = matrix.answer(given.root, given.runs)
        else:
            code, lines = 0, new_backend.answer(given.name, given.operation, given.root, given.package)
    except (LayerZeroError, ValueError, OSError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
