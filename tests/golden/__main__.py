"""Write the golden files anew: ``PYTHONPATH=src:tests python -m golden``. A commit that changes them says why.

``python -m golden FIRST END`` prints what the files would hold, with these draws of calls, for the tests.
"""

from __future__ import annotations

import json
import sys

from golden import calls, choices, declarations
from golden.files import write


def main(arguments: list[str]) -> None:
    """Write the files, or print what they would hold."""
    draws = range(*map(int, arguments)) if arguments else range(choices.DRAWS)
    made = {"declarations.txt": declarations.lines(), "choices.txt": choices.lines(draws), "calls.txt": calls.lines()}
    if arguments:
        json.dump({name: list(lines) for name, lines in made.items()}, sys.stdout)
    else:
        for name, lines in made.items():
            write(name, lines)


if __name__ == "__main__":
    main(sys.argv[1:])
