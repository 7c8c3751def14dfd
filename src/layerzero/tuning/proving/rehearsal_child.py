"""``python -m layerzero.tuning.proving.rehearsal_child ANSWERS < questions``: many questions in one process.

The questions are a JSON list of :class:`layerzero.tuning.proving.child.Question`. Every answer is a line that is
appended to a file: that a question's kernel runs now, then what was found. Who reads the file knows what was running
when it ended.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from layerzero.tuning.proving.child import Question, ask, quiet


class Line(msgspec.Struct, frozen=True):
    """What is said about a question: its number, a state of :mod:`layerzero.tuning.proving.child`, and a text."""

    number: int
    state: str
    detail: str = ""


def main(answers: Path, questions: list[Question]) -> None:
    """Answer them in turn."""
    file = os.open(answers, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for number, question in enumerate(questions):

        def say(state: str, detail: str = "", number: int = number) -> None:
            os.write(file, msgspec.json.encode(Line(number, state, detail)) + b"\n")

        ask(question, say)
    os.close(file)


if __name__ == "__main__":
    with quiet():
        main(Path(sys.argv[1]), msgspec.json.decode(sys.stdin.buffer.read(), type=list[Question]))
