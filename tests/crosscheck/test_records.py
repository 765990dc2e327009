"""Figures of docs/benchmarks.md and the records in benchmarks/results that they are copied from."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest
from documented import PAGES

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
RECORD = re.compile(r"[\w-]+-20\d\d-\d\d-\d\d\.json")
sys.path.append(str(BENCHMARKS))

SECTIONS = {text.partition("\n")[0]: text for text in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
BY_A_PROGRAM = "Casts on a CPU"


def test_pages_name_the_records_that_are_kept():
    """No record is named that isn't kept, and none is kept that no page names."""
    named = {name for page in PAGES for name in RECORD.findall(page.read_text())}
    kept = {path.name for path in RESULTS.iterdir()}
    assert named
    assert named == kept, f"not kept: {sorted(named - kept)}; not named: {sorted(kept - named)}"


def test_every_program_is_named_with_its_command():
    """A file of benchmarks/ is a program that some page says how to run, or a part of one."""
    sources = {path.stem: path.read_text() for path in BENCHMARKS.glob("*.py")}
    imported = set()
    for node in (node for source in sources.values() for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    command = re.compile(r"(?:python|torchrun\s[^`]*?)\sbenchmarks/(\w+)\.py")
    named = {name for page in PAGES for name in command.findall(page.read_text())}
    programs = {name for name, source in sources.items() if '__name__ == "__main__"' in source}
    assert programs - named == set()
    assert sources.keys() - programs - imported == set()


def test_the_tables_of_casts_on_a_cpu_are_those_of_the_record():
    """What `python benchmarks/cpu.py --write` writes."""
    import cpu_tables

    (name,) = RECORD.findall(SECTIONS[BY_A_PROGRAM])
    begins, ends = (f"<!-- benchmarks/cpu.py {word} -->" for word in ("begins", "ends"))
    assert PAGE.split(begins)[1].split(ends)[0].strip() == cpu_tables.tables(json.loads((RESULTS / name).read_text()))


def words(text):
    return frozenset(re.findall("[a-z0-9]+", text.lower().replace(",", "")))


def names(label):
    """Words of a label that a record has to know, too: those in code, and those with a digit."""
    label = re.sub(r"20\d\d-\d\d-\d\d", "", label)
    in_code = frozenset().union(*map(words, re.findall("`([^`]*)`", label)))
    return in_code | {word for word in words(label) if re.search(r"\d", word)}


def figures(value, around=frozenset()):
    """(number, words of the keys and texts around it) of every number in a record."""
    if isinstance(value, dict):
        beside = [x for x in value.values() if isinstance(x, str | int)]
        around = around.union(*(words(str(x)) for x in beside))
        for key, inner in value.items():
            yield from figures(inner, around | words(key))
    elif isinstance(value, list):
        for inner in value:
            yield from figures(inner, around)
    elif isinstance(value, int | float):
        yield value, around


def tables(text):
    """(header, rows) of each Markdown table, as lists of cells."""
    for block in re.findall(r"(?:^\|.*\|\n)+", text + "\n", flags=re.MULTILINE):
        header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines())
        yield header, rows


def written(cell):
    """(number, its last place) of each number in a cell; code, dates and parts of names are none."""
    for digits in re.findall(r"(?<![\w.-])-?\d[\d,]*(?:\.\d+)?(?![\w-])", re.sub(r"`[^`]*`|20\d\d-\d\d-\d\d", "", cell)):
        yield float(digits.replace(",", "")), 10.0 ** -len(digits.partition(".")[2])


@pytest.mark.parametrize("section", [name for name, text in SECTIONS.items() if name != BY_A_PROGRAM and "\n|" in text])
def test_figures_are_those_of_the_records(section):
    """Each number of a table is a rounded one of the section's records, beside the names of its row and column."""
    text = SECTIONS[section]
    found = [pair for name in set(RECORD.findall(text)) for pair in figures(json.loads((RESULTS / name).read_text()))]
    assert found, "a section with tables names its records"
    known = frozenset().union(*(around for _, around in found))
    wrong = []
    for header, rows in tables(text):
        for row in rows:
            for label, cell in zip(header[1:], row[1:], strict=True):
                wanted = (names(row[0]) | names(label)) & known
                near = [number for number, around in found if wanted <= around]
                for number, place in written(cell):
                    if not any(abs(number - unit * x) <= 0.5001 * place for x in near for unit in (1, 1e-3)):
                        wrong.append(f"{number:g} ({row[0]}; {label})")
    assert wrong == []
