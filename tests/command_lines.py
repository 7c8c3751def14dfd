"""Commands that are run in this process."""

from __future__ import annotations

import json
import shlex

from typer.testing import CliRunner

from layerzero.cli.app import main

GQA = "--shape 1x2048x32x128 --kv-shape 1x2048x8x128 --dtype bfloat16 --layout BSHD"
FA3 = f"attention {GQA} --causal --device H100 --with flash_attn_3=3.0.0 --without flash-attn"


def run(line, **options):
    return CliRunner().invoke(main, shlex.split(line), prog_name="layerzero", **options)


def answer(line, code=0):
    result = run(f"{line} --json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)
