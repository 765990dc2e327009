"""What a release and the forge say of the package: names, versions, links, workflows and issue forms."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

import blockfp
from blockfp import formats, recipes

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
REPOSITORY = PROJECT["urls"]["Repository"]


def yaml_of(path):
    return pytest.importorskip("yaml").safe_load((ROOT / path).read_text())


def readme_on_pypi():
    """The README after the substitutions that the build makes."""
    settings = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = "".join((ROOT / fragment["path"]).read_text() for fragment in settings["fragments"])
    for rule in settings["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"].replace("$HFPR_VERSION", blockfp.__version__), text)
    return text


def test_links_of_the_readme_on_pypi_are_absolute_and_lead_to_files():
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)#]+)[^)]*\)", readme_on_pypi())
    assert len(links) > 20
    owner = REPOSITORY.removeprefix("https://github.com/")
    pages, raw = f"{REPOSITORY}/blob/v", f"https://raw.githubusercontent.com/{owner}/v"
    for image, link in links:
        assert link.startswith(raw if image else pages), link
        assert (ROOT / link.removeprefix(raw if image else pages).partition("/")[2]).exists(), link


def test_extras_are_for_users_and_groups_for_contributors():
    assert set(PROJECT["optional-dependencies"]) == {"jax", "torch", "cli", "all"}
    groups = PYPROJECT["dependency-groups"]
    included = {entry["include-group"] for group in groups.values() for entry in group if isinstance(entry, dict)}
    assert included <= set(groups)
    asked = re.findall(r"--group (\w+)", (ROOT / "Makefile").read_text() + (ROOT / "CONTRIBUTING.md").read_text())
    assert set(asked) == set(groups) - {"clients"}


def test_kernels_are_built_and_loaded_by_the_same_bounds_of_tvm_ffi():
    bounds = [
        [one for one in of if one.startswith("apache-tvm-ffi")]
        for of in (PROJECT["dependencies"], PYPROJECT["build-system"]["requires"])
    ]
    assert bounds[0] == bounds[1]
    assert re.fullmatch(r"apache-tvm-ffi>=[\d.]+,<[\d.]+", bounds[0][0])


def test_types_are_published_and_name_every_choice():
    """mypy and pyright check users' calls only with the marker; names are written out for them."""
    assert (Path(blockfp.__file__).parent / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert get_args(formats.FormatName) == formats.NAMES
    assert get_args(recipes.RecipeName) == tuple(recipes.RECIPES)


def test_the_citation_names_this_version_and_repository():
    citation = yaml_of("CITATION.cff")
    assert citation["version"] == blockfp.__version__
    assert citation["repository-code"] == REPOSITORY
    assert citation["license"] == PROJECT["license"]


def test_workflows_use_targets_that_exist_and_test_the_supported_versions():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs = {name: yaml_of(f".github/workflows/{name}.yml")["jobs"] for name in ("ci", "release")}
    commands = [step.get("run", "") for of in jobs.values() for job in of.values() for step in job["steps"]]
    made = set(re.findall(r"\bmake ([a-z]+)", "\n".join(commands)))
    assert {"test", "site", "sanitize", "cuda", "dist"} == made <= targets

    rows = jobs["ci"]["test"]["strategy"]["matrix"]["include"]
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert sorted({row["python"] for row in rows}) == sorted(named)
    for library in ("torch", "jax"):
        (oldest,) = (
            one.partition(">=")[2] for one in PROJECT["optional-dependencies"][library] if one.startswith(f"{library}>")
        )
        assert rows[0][library].startswith(oldest)
        assert f"{rows[-1][library]} |" in (ROOT / "docs" / "promises.md").read_text()
    assert jobs["release"]["publish"]["permissions"] == {"id-token": "write"}


@pytest.mark.parametrize("form", ["bug", "request"])
def test_issue_forms_ask_for_the_machine(form):
    fields = {field["id"]: field["attributes"] for field in yaml_of(f".github/ISSUE_TEMPLATE/{form}.yml")["body"]}
    assert "blockfp info --json" in fields["info"]["label"]
