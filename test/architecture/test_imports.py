"""Who may import whom. The tables are the rules; a module that needs an exception argues for it in a line here."""

import subprocess
import sys
import textwrap
from graphlib import CycleError, TopologicalSorter

import pytest
import tree
from tree import Module

# Modules of `rfork` that may import torch, and so may be imported only where torch is.
MAY_IMPORT_TORCH = (
    "rfork.inventory",
    "rfork.digest",
    "rfork.regions",
    "rfork.fence",
    "rfork.transports.collective",
    "rfork.transports.courier",
)
# These look at a machine and start processes; they import torch inside functions, in processes of their own.
MAY_IMPORT_TORCH_INSIDE_FUNCTIONS = ("rfork.doctor", "rfork.demo")

# What is too heavy, or too close to one engine or machine, for a module to import unless it is its job.
JOBS = {
    "sglang": (),
    "sglang_rfork": (),
    "transformers": ("rfork.demo",),
    "mooncake": ("rfork.transports", "rfork.doctor", "rfork.demo"),
    "redis": ("rfork.planner.store",),
}

# No module of the first imports the second. Records know no service, services don't know each other's insides.
APART = (
    ("rfork.planner", "rfork.seed"),
    ("rfork.seed", "rfork.planner.app"),
    ("rfork.seed", "rfork.planner.state"),
    ("rfork.wire", "rfork.seed"),
    ("rfork.wire", "rfork.client"),
    ("rfork.transports", "rfork.seed"),
    ("rfork.transports", "rfork.client"),
    ("rfork.seed", "rfork.cli"),
    ("rfork.client", "rfork.cli"),
    ("rfork.planner", "rfork.cli"),
)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("package", JOBS)
def test_only_those_whose_job_it_is_import(package: str) -> None:
    guilty = [module.name for module in tree.modules("rfork") if module.imports_package(package)]
    assert [name for name in guilty if not within(name, JOBS[package])] == []


def test_torch_is_imported_in_named_modules_only() -> None:
    allowed = (*MAY_IMPORT_TORCH, *MAY_IMPORT_TORCH_INSIDE_FUNCTIONS)
    guilty = [module.name for module in tree.modules("rfork") if module.imports_package("torch")]
    assert [name for name in guilty if not within(name, allowed)] == []


@pytest.mark.parametrize(("package", "other"), APART, ids=lambda name: name)
def test_parts_stay_apart(package: str, other: str) -> None:
    guilty = [
        module.name
        for module in tree.modules("rfork")
        if within(module.name, (package,)) and module.imports_package(other)
    ]
    assert guilty == []


def test_unittest_mocks_are_not_used() -> None:
    """Mocks agree with anything. Use `transports/memory.py`, a real planner, real servers."""
    mock = ("unittest." + "mock", "Magic" + "Mock", "mocker" + ".")
    guilty = [
        tree.relative(path)
        for path in tree.files()
        if path.suffix == ".py" and any(word in (tree.text(path) or "") for word in mock)
    ]
    assert guilty == []


def test_the_planner_and_the_command_line_run_without_torch_and_sglang() -> None:
    """Import them for real where both are missing, with all that they import in turn."""
    names = [module.name for module in tree.modules("rfork") if needs_no_torch(module)]
    assert "rfork.planner.app" in names
    program = textwrap.dedent(
        f"""
        import importlib, sys
        for missing in ("torch", "sglang", "mooncake", "transformers", "numpy"):
            sys.modules[missing] = None
        for name in {names!r}:
            importlib.import_module(name)
        """
    )
    run = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=False)
    assert run.returncode == 0, run.stderr


def needs_no_torch(module: Module) -> bool:
    return within(
        module.name, ("rfork.planner", "rfork.cli", "rfork.wire", "rfork.identity", "rfork.manifest", "rfork.config")
    ) and (not module.name.endswith("__main__"))


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Also not inside a function: what two modules need of each other belongs into a third."""
    known = {module.name: module.imports for package in tree.PACKAGES for module in tree.modules(package)}
    graph = {name: (imports & known.keys()) - {name} for name, imports in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None
