"""Write the golden files anew: ``PYTHONPATH=src:tests python -m golden``. A commit that changes them says why."""

from __future__ import annotations

from golden import choices, declarations
from golden.files import write

if __name__ == "__main__":
    write("declarations.txt", declarations.lines())
    write("choices.txt", choices.lines(range(choices.CALLS)))
