"""Test that pyproject.toml declares what the code imports, and that constraints.txt has every package's version."""

import tomllib
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.repository import ROOT, closure, imports, python_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = [Requirement(text) for texts in PROJECT["optional-dependencies"].values() for text in texts]


def applies(needed: Requirement, extra: str = "") -> bool:
    return needed.marker is None or needed.marker.evaluate({"extra": extra})


def names(requirements: list[Requirement]) -> set[str]:
    return {canonicalize_name(needed.name) for needed in requirements}


def pins() -> dict[str, str]:
    """Return the version of each package on this Python and system."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    versions = {canonicalize_name(pin.name): pin.specifier for pin in pinned if applies(pin)}
    assert {(len(spec), *(part.operator for part in spec)) for spec in versions.values()} == {(1, "==")}
    return {name: next(iter(spec)).version for name, spec in versions.items()}


def installed() -> dict[str, str]:
    """Return the versions without what a build adds to its own, as in 2.13.0+cpu."""
    found = metadata.distributions()
    return {canonicalize_name(each.name): Version(each.version).public for each in found}


def test_each_package_that_the_code_imports_is_declared():
    """What another package brings today, it may not bring tomorrow, or in another version."""
    distributions = metadata.packages_distributions()
    ours = {path.split("/")[0].removesuffix(".py") for path in python_files()}

    def packages(paths: list[str]) -> set[str]:
        modules = {name.split(".")[0] for path in paths for name in imports(path)}
        found = {name for module in modules - ours for name in distributions.get(module, [])}
        return {canonicalize_name(name) for name in found}

    training = packages(closure("train.py"))
    assert {"jax", "orbax-checkpoint", "tensorboardx", "etils"} <= training
    assert training - names(BASE) <= {"torch", "wandb"}  # only if a user asks for them
    assert packages([path for path in python_files() if not path.startswith("tests/")]) <= names(BASE + EXTRAS)


def test_constraints_agree_with_pyproject():
    versions = pins()
    for needed in BASE + EXTRAS:
        if applies(needed):
            assert versions[canonicalize_name(needed.name)] in needed.specifier, needed


def test_this_set_up_has_the_version_of_every_package_that_it_needs():
    """`make` installs with constraints.txt, so set-ups of one commit have the same packages, whenever they are made."""
    versions, here = pins(), installed()
    different = [name for name in here.keys() & versions.keys() if here[name] != versions[name]]
    assert not different
    to_read = [(needed, "") for needed in BASE + EXTRAS]
    reached: set[tuple[str, str]] = set()
    while to_read:
        needed, extra = to_read.pop()
        name = canonicalize_name(needed.name)
        if name not in here or not applies(needed, extra):
            continue
        assert name in versions, f"constraints.txt lacks {name}"
        for wanted in {"", *needed.extras} - {extra for of, extra in reached if of == name}:
            reached.add((name, wanted))
            to_read += [(Requirement(text), wanted) for text in metadata.requires(name) or []]
    assert {"jaxlib", "tensorstore", "scipy"} <= {name for name, _ in reached}
