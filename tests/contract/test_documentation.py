"""Everything is documented, the generated pages are current, and what README.md shows works."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import json
import logging
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import typer.main
from typer.testing import CliRunner

import layerzero as lz
from layerzero.cli.app import main
from layerzero.core.kernel import Trust
from layerzero.core.ledger import Ledger
from layerzero.engine import probe
from layerzero.engine.config import CONFIGURATION, known_variables
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.settings import SETTINGS
from layerzero.ops import FORMER_NAMES, FUNCTIONS, OPERATIONS, PLAIN_FUNCTIONS
from layerzero.testing import fuzz
from layerzero.tuning.storage.store import StoreLedger
from tools import docs, pages
from tools.__main__ import main as tool
from tools.pages_usage import EXAMPLE, walk

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@functools.cache
def page(name):
    return (ROOT / "docs" / name).read_text()


def run(line):
    return CliRunner().invoke(main, shlex.split(line), prog_name="layerzero")


def blocks(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_every_setting_is_documented():
    text = page("settings.md")
    assert [key for key, each in SETTINGS.items() if f"| `{key}` |" not in text or each.meaning not in text] == []


def test_commands_and_names_lie_on_one_line():
    """A command that two lines share is not copied as it is."""
    found = []
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")):
        text = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), path.read_text(), flags=re.DOTALL)
        lines = enumerate(text.replace("``", "").splitlines(), 1)
        found += [f"{path.relative_to(ROOT)}:{number}" for number, line in lines if line.count("`") % 2]
    assert found == [], "wanted both backquotes of a command or a name on one line"


def test_every_environment_variable_is_documented():
    assert [name for name in known_variables() if f"| `{name}` |" not in page("settings.md")] == []


def test_every_reason_is_documented():
    text = page("reasons.md")
    assert [code for code in lz.ReasonCode if f"| `{code}` |" not in text] == []


def test_every_command_is_documented():
    text = page("commands.md")
    for path, command in walk(typer.main.get_command(main), "layerzero"):
        section = text.partition(f"## {path}\n")[2].partition("\n## ")[0]
        for parameter in command.params:
            assert parameter.help
            assert parameter.help.replace("|", r"\|") in section, (path, parameter.name)


def test_every_operation_is_documented():
    for name in OPERATIONS:
        assert f"`{name}`" in page("operations.md")
        assert f"## {name}\n" in page(f"operations/{name.partition('.')[0]}.md")
        assert name in page("support.md")


def test_every_kernel_is_documented():
    for kernel in pages.builtin_kernels():
        assert f"### {kernel.id}\n" in page(f"kernels/{kernel.backend.name}.md")
        assert f"| `{kernel.id}` |" in page("support.md")


def test_every_function_has_its_libraries_listed():
    text = page("libraries.md")
    assert [name for name in (*FUNCTIONS, *PLAIN_FUNCTIONS) if f"| `lz.{name}` |" not in text] == []


def test_kernels_that_never_ran_are_marked():
    """A reader of the tables would take them for the others; there may be none."""
    untried = {each.id for each in pages.builtin_kernels() if each.trust is Trust.UNTRIED}
    rows = [line.split(" | ") for line in page("support.md").splitlines() if line.startswith("| `")]
    assert {name.strip("| `") for name, *_, limits in rows if "*untried*" in limits} == untried
    sections = [part for path in ROOT.glob("docs/kernels/*.md") for part in path.read_text().split("\n### ")[1:]]
    assert {each.partition("\n")[0] for each in sections if "`untried`" in each} == untried
    listed = json.loads(run("kernels quantized_linear --json").output)
    assert {each["id"] for each in listed if each["untried"]} == {each["id"] for each in listed} & untried


def test_generated_files_are_current(capsys):
    assert tool(["docs", "--check"]) == 0, capsys.readouterr().out


def test_a_stale_file_fails_and_is_written(tmp_path, capsys):
    def said(*words, code):
        assert tool(["--root", str(tmp_path), "docs", *words]) == code
        return capsys.readouterr().out.splitlines()

    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "src/layerzero").mkdir(parents=True)
    shutil.copy(ROOT / "src/layerzero/__init__.pyi", tmp_path / "src/layerzero")
    kernels = tmp_path / "docs" / "kernels.md"
    kernels.write_text(kernels.read_text() + "by hand\n")
    (tmp_path / "docs" / "reasons.md").unlink()
    (tmp_path / "docs" / "kernels" / "gone.md").write_text("a library that is declared no more\n")
    fields = tmp_path / "docs" / "backends.md"
    fields.write_text(fields.read_text().replace("<!-- /generated -->", "by hand\n<!-- /generated -->"))

    stale = ["docs/backends.md", "docs/kernels.md", "docs/kernels/gone.md", "docs/reasons.md"]
    assert said("--check", code=1) == [
        *(f"stale: {each}" for each in stale),
        "next step: `python -m tools docs` writes them",
    ]
    assert kernels.read_text().endswith("by hand\n")  # checking writes nothing

    assert said(code=0) == [f"{'removed' if 'gone' in each else 'wrote'} {each}" for each in stale]
    assert said("--check", code=0) == ["the generated documentation is current"]
    assert fields.read_text() == page("backends.md")


def test_a_folder_that_is_no_checkout_is_an_error(tmp_path, capsys):
    assert tool(["--root", str(tmp_path), "docs", "--check"]) == 2
    assert f"error: {tmp_path}: wanted a source checkout of layerzero, got none" in capsys.readouterr().err


def test_documentation_does_not_depend_on_what_is_installed(monkeypatch):
    @lz.register_kernel("norm.rms", "mine.rms_norm")
    def mine(input, weight):
        return input

    monkeypatch.setattr(probe, "installed_version", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    texts = docs.wanted(ROOT)
    assert [path for path, text in texts.items() if (ROOT / path).read_text() != text] == []
    assert not [path for path, text in texts.items() if "mine.rms_norm" in text]


def test_the_documented_settings_are_accepted(tmp_path):
    assert f"```yaml\n{EXAMPLE}\n```" in page("settings.md")
    file = tmp_path / "settings.yaml"
    file.write_text(EXAMPLE)
    lz.load_config(file)


def test_every_document_is_in_the_index():
    folder = Path(lz.__file__).parents[2] / "docs"
    linked = set(re.findall(r"\]\((\w+\.md)\)", (folder / "README.md").read_text()))
    assert linked == {path.name for path in folder.glob("*.md")} - {"README.md"}


def test_the_code_in_the_readme_runs():
    namespace = {}
    for block in blocks("python"):
        exec(block, namespace)
    assert namespace["output"].shape == (2, 1, 32, 128)


def test_the_code_about_choices_runs(capsys):
    namespace = {}
    for block in blocks("python", page("choices.md")):
        exec(block, namespace)
    assert namespace["output"].shape == (1, 16, 4, 64)
    assert "mine.rms_norm" in capsys.readouterr().out


def test_the_code_about_operating_runs(capsys):
    log, namespace = logging.getLogger("layerzero.events"), {}
    before = [*log.handlers]
    try:
        for block in blocks("python", page("operating.md")):
            exec(block, namespace)
    finally:
        namespace["listener"].close()
        log.handlers, _ = before, log.setLevel(logging.NOTSET)
    said = capsys.readouterr().out
    assert "settings: ready: " in said
    assert "layerzero_epochs_total " in said


def test_the_code_about_quantizing_runs():
    (block,) = re.findall(r"```python\n(.*?)```", page("quantizing.md"), re.DOTALL)
    found: dict[str, torch.Tensor] = {}
    exec(compile(block.replace("4096, 4096", "64, 64").replace("(16, 4096", "(16, 64"), "quantizing.md", "exec"), found)
    assert found["narrow"].shape == (16, 32)
    assert found["scales"].shape == (16, 2)
    torch.testing.assert_close(found["exact"], found["quick"], rtol=0.05, atol=0.1)
    torch.testing.assert_close(found["again"], found["x"], rtol=0.25, atol=1.0)


def test_the_code_about_quantised_weights_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", page("quantized.md"), re.DOTALL)
    found: dict[str, torch.Tensor] = {}
    exec(block, found)
    assert torch.equal(found["other"].dequantized(), found["numbers"])
    torch.testing.assert_close(found["y"], found["x"] @ found["numbers"].t(), rtol=1e-3, atol=1e-3)
    assert capsys.readouterr().out.strip() == block.rstrip().rpartition("# ")[2]


def test_the_code_about_mixtures_runs():
    found: dict[str, torch.Tensor] = {}
    block, *_ = re.findall(
        r"```python\n(.*?)```", page("experts.md"), re.DOTALL
    )  # tests/integrations covers the others
    exec(compile(block, "experts.md", "exec"), found)
    x, down, wanted = found["x"], found["down"], torch.zeros_like(found["x"])
    for token, (ids, shares) in enumerate(zip(found["chosen"], found["weights"], strict=True)):
        for each, share in zip(ids.tolist(), shares.tolist(), strict=True):
            gate, up = (found["gate_up"][each] @ x[token]).chunk(2)
            wanted[token] += share * (down[each] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(found["y"], wanted, rtol=1e-4, atol=1e-4)


def test_the_backend_in_the_documentation_works():
    text = (ROOT / "docs/backends.md").read_text()
    declared, registered = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "register" not in declared  # a built-in file or an entry point's module is found by itself
    exec(declared + registered, {})
    x, w = torch.randn(4, 64), torch.randn(64)
    with lz.scope(locks={"rms_norm": "fastnorm.rms_norm"}):
        torch.testing.assert_close(lz.rms_norm(x, w), torch.nn.functional.rms_norm(x, (64,), w, 1e-6))


def test_the_operation_in_the_documentation_works(capsys):
    text = page("adding_operations.md")
    declared, registered, _ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "register" not in declared  # a family's file or an entry point's module is found by itself
    space = {}
    exec(declared + registered, space)
    x, y = space["x"], space["y"]
    try:
        assert "mine.blend" in capsys.readouterr().out
        torch.testing.assert_close(space["result"], x + 0.25 * y)
        torch.testing.assert_close(lz.blend(x, y, clamp=True), (x + y).relu())
        with pytest.raises(lz.InvalidCallError, match="other: wanted shape"):
            lz.blend(x, y[:2])
        report = fuzz.run(40, 1, operations=["example.blend"])
        assert report.ok, str(report)
        assert report.kernels["mine.blend"]
    finally:
        lz.unregister_operation("example.blend")
    assert not hasattr(lz, "blend")


@pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroFallbackWarning")  # its kernel is another line
def test_the_family_in_the_documentation_works():
    space = {}
    exec(re.findall(r"```python\n(.*?)```", page("adding_operations.md"), re.DOTALL)[2], space)
    lz.register_operation(space["LERP"])
    try:
        mixed = lz.register_function(*space["FUNCTIONS"])
        x, y = torch.randn(4, 32), torch.randn(4, 32)
        torch.testing.assert_close(mixed(x, y, 0.25), torch.lerp(x, y, 0.25))
        with pytest.raises(lz.InvalidCallError, match="other: wanted shape"):
            mixed(x, y[:2])
    finally:
        lz.unregister_operation("mix.lerp")


def test_the_folder_in_the_documentation_is_that_of_families():
    named = set(re.findall(r"\| `(\w+\.py)`", page("adding_operations.md")))
    files = {path.name for path in (ROOT / "src/layerzero/ops").glob("*/*.py")}
    assert named <= files


def test_the_roles_in_the_documentation_are_those_of_parameters():
    listed = set(re.findall(r"^\| `([A-Z]+)` \|", page("adding_operations.md"), re.MULTILINE))
    assert listed == set(lz.Role.__members__)


@pytest.mark.skipif((torch.backends.cudnn.version() or 91501) <= 91500, reason="torch asks an older cuDNN last")
def test_the_documented_explanation_is_real(tmp_path, monkeypatch):
    (block,) = blocks("console", page("choices.md"))
    command, _, shown = block.partition("\n")
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))  # with the times that ship
    monkeypatch.setenv("COLUMNS", "100")
    CONFIGURATION.reset()
    ENGINE.ledger = StoreLedger(Ledger())
    real = [line.rstrip() for line in run(command.removeprefix("$ layerzero ")).stdout.splitlines()]
    assert [line for line in shown.splitlines() if line not in real] == []


def test_every_link_leads_somewhere():
    broken = [
        f"{path}: {target}"
        for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)[^)]*\)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert broken == []


def test_links_of_pages_stay_on_the_site():
    """``make site`` refuses a link to a file that it does not copy."""
    copied = re.search(r"cp -r (.*) build/pages/", (ROOT / "Makefile").read_text())[1].split()
    outside = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md"))
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)[^)]*\)", path.read_text())
        if (path.parent / target).resolve().relative_to(ROOT.resolve()).parts[0] not in copied
    ]
    assert outside == []


def test_the_glossary_stays_short():
    assert page("glossary.md").count("\n| ") - 1 <= 40


def test_nothing_is_installed_by_the_name_of_another_project():
    """A checkout is installed by its path: ``layerzero`` on PyPI is not this project."""
    texts = [ROOT / "README.md", *(path for part in ("docs", "examples", "src") for path in (ROOT / part).rglob("*.*"))]
    named = re.compile(r"pip install [^`\n]*?\blayerzero\b(?!-)")
    found = [path for path in texts if path.suffix in (".md", ".py") and named.search(path.read_text())]
    assert found == []


def test_files_that_a_page_names_exist():
    names = "architecture.md", "perfdb.md", "security.md", "adding_operations.md"
    files = {
        path.relative_to(ROOT).as_posix()
        for part in ("src", "tests", "tools", "benchmarks")
        for path in (ROOT / part).rglob("*.*")
    }
    named = {each for name in names for each in re.findall(r"`((?:\w+/)+\w+\.(?:py|txt|c))`", page(name))}
    assert {each for each in named if not any(f"/{file}".endswith(f"/{each}") for file in files)} == set()


def test_names_in_the_code_of_a_page_are_imported_or_made_there():
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        known = {*dir(builtins), "__file__", "model", "ids", "prompt"}  # the reader's
        for block in blocks("python", path.read_text()):
            nodes = list(ast.walk(ast.parse(block)))
            known |= {(each.asname or each.name).partition(".")[0] for each in nodes if isinstance(each, ast.alias)}
            known |= {each.name for each in nodes if isinstance(each, (ast.FunctionDef, ast.ClassDef))}
            known |= {each.arg for each in nodes if isinstance(each, ast.arg)}
            known |= {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
            assert {each.id for each in nodes if isinstance(each, ast.Name)} <= known, (path, block)


def test_names_that_a_page_says_are_public_exist():
    texts = [README, (ROOT / "CHANGELOG.md").read_text(), *map(page, ("choices.md", "serving.md", "operating.md"))]
    named = {name for text in texts for name in re.findall(r"\blz\.([A-Za-z_]\w*)", text)} - {"NAME"}
    assert {name for name in named if name not in FORMER_NAMES and not hasattr(lz, name)} == set()


def test_the_changelog_has_a_place_for_what_comes_next():
    assert "\n## [Unreleased]\n" in (ROOT / "CHANGELOG.md").read_text()


def test_every_error_and_warning_is_raised_somewhere():
    from layerzero.core import errors

    missing = {name for name in vars(errors) if name.endswith(("Error", "Warning"))}
    for path in (ROOT / "src/layerzero").rglob("*.py"):
        text = path.read_text()
        if any(name in text for name in missing):
            nodes = [*ast.walk(ast.parse(text))]
            caught = {id(name) for each in nodes if isinstance(each, ast.ExceptHandler) for name in ast.walk(each.type)}
            missing -= {each.id for each in nodes if isinstance(each, ast.Name) and id(each) not in caught}
    assert not missing, "an error without an emitter is a promise that nobody keeps"
