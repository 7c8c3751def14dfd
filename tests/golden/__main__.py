"""Write the golden files anew: ``PYTHONPATH=src:tests python -m golden``. A commit that changes them says why.

``python -m golden print FILE [FIRST END]`` prints what a file would hold, for the test.
"""

from __future__ import annotations

import sys

from golden import choices, declarations
from golden.files import print_lines, write


def main(arguments: list[str]) -> None:
    """Write both files, or print one."""
    if not arguments:
        write("declarations.txt", declarations.lines())
        write("choices.txt", choices.lines(range(choices.CALLS)))
    elif arguments[1] == "declarations.txt":
        print_lines(declarations.lines())
    else:
        print_lines(choices.lines(range(*map(int, arguments[2:]))))


if __name__ == "__main__":
    main(sys.argv[1:])
