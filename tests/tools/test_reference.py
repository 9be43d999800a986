"""The reference has every command, and every option with its text. What pages link to is there."""

import re

import pytest

from configs.schema import Role, roles
from tests.house import ROOT, python_files
from tools.reference import COMMANDS, pages

ENTRY = re.compile(r"^`(\S+)` · (.+)\n:   (.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def reference():
    return pages()


def test_every_option_of_a_run_has_its_entry(reference):
    entries = ENTRY.findall(reference["options.md"])
    names = {("" if Role.FILE in role else "--") + name for name, role in roles().items()}
    assert len(entries) == len(names) and {name for name, _, _ in entries} == names
    assert all(text for _, _, text in entries)


def test_an_entry_says_what_the_option_takes_and_whether_it_may_change(reference):
    facts = {name: facts for name, facts, _ in ENTRY.findall(reference["options.md"])}
    assert facts["--name"] == "text; required; may change on resume"
    assert facts["--mesh.data"] == "integer ≥ -1; default `-1`; may change on resume"
    assert facts["--model.dtype"] == "`auto`, `bfloat16`, `float32`; default `auto`"
    assert facts["optimizer.x0_lambdas.beta1"] == "number ≥ 0 and < 1; default `0.96`; in a config file only"


def test_every_command_is_there():
    ours = [path for path in python_files() if not path.startswith(("bench/", "tests/"))]
    starts = re.compile(r"^    (run_command\(|sys\.exit\(exit_code_of)", re.MULTILINE)
    commands = {path for path in ours if starts.search((ROOT / path).read_text())}
    assert commands == {f"{name.replace('.', '/')}.py" for name in COMMANDS}


def test_what_a_page_links_to_is_there():
    """`make docs` checks pages and anchors, but neither pictures nor other files."""
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        links = re.findall(r"\]\(([^)#\s]+)", re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL))
        assert not [link for link in links if "://" not in link and not (page.parent / link).exists()], page
