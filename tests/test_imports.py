"""Imports point one way: executor -> planner -> simulator -> simulator.specs -> simulator.errors (STYLE.md)."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("simulator", "planner", "executor")
# Lowest first; a module is in the last layer whose name it starts with.
LAYERS = ("simulator.errors", "simulator.specs", "simulator", "planner", "executor")
ORDER = {"simulator.errors": 0, "simulator.specs": 1, "simulator": 2, "planner": 3, "executor": 4}
# Modules that may import below the top: the command, so that planning starts without torch, and encodings, since most
# runs have none and PyG takes 1.9 s to import.
LATE_IMPORTERS = ("executor.cli", "executor.cli_cluster", "executor.encodings")
# What only `executor` may import: torch, and what imports it.
TORCH = ("torch", "torch_geometric", "triton")


def layer_of(module: str) -> str | None:
    """Return the layer that a module belongs to; None for other people's modules."""
    return next((layer for layer in LAYERS if module == layer or module.startswith(f"{layer}.")), None)


def may_import_planner(module: str) -> bool:
    package, _, name = module.partition(".")
    return package == "planner" or (package == "executor" and (name == "adapt" or name.startswith("cli")))


def imported_modules(node: ast.AST, modules: frozenset[str]) -> Iterator[str]:
    """Yield the modules that an import statement names; `from package import module` names the module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in modules else node.module


def top_level_imports(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the import statements at the top, those in a `try` or a condition on the platform among them."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.Try):
            pending += [*node.body, *(inner for handler in node.handlers for inner in handler.body), *node.orelse]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            pending += [*node.body, *node.orelse]


def import_faults(module: str, source: str, modules: frozenset[str]) -> list[str]:
    """Return what is wrong with the imports of a module, one sentence each.

    Args:
        module: dotted name of the module.
        modules: dotted names of all our modules and packages.
    """
    tree = ast.parse(source)
    at_the_top = set(top_level_imports(tree))
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            faults.append(f"{module}:{node.lineno} imports by a call, which hides it")
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            faults.append(f"{module}:{node.lineno} has a relative import")
        if node not in at_the_top and module not in LATE_IMPORTERS:
            faults.append(f"{module}:{node.lineno} imports below the top")
        for imported in sorted(set(imported_modules(node, modules))):
            rule = broken_rule(module, imported)
            faults += [f"{module}:{node.lineno} imports {imported}: {rule}"] if rule else []
    return faults


def broken_rule(module: str, imported: str) -> str:
    """Return the rule that one import breaks; empty if it breaks none."""
    own_layer, layer = layer_of(module), layer_of(imported)
    assert own_layer is not None, module
    package, _, _ = module.partition(".")
    if imported.split(".")[0] in TORCH and package != "executor":
        return "only executor imports torch"
    if imported.split(".")[0] == "tests":
        return "no package imports tests"
    if layer is None:
        return ""
    if ORDER[layer] > ORDER[own_layer]:
        return f"{own_layer} is below {layer}"
    if layer == "planner" and not may_import_planner(module):
        return "inside executor only cli and adapt import planner"
    if imported == package:
        return "inside a package import the sibling module, not the package"
    return ""


def our_sources() -> dict[str, str]:
    """Return the source of each module of the packages, by dotted name."""
    sources = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        sources[module] = path.read_text(encoding="utf-8")
    return sources


SOURCES = our_sources()


@pytest.mark.parametrize("module", SOURCES)
def test_imports_of_a_module_point_downwards(module):
    assert import_faults(module, SOURCES[module], frozenset(SOURCES)) == []


def test_no_modules_import_each_other_in_a_circle():
    needs = {}
    for module, source in SOURCES.items():
        nodes = top_level_imports(ast.parse(source))
        needs[module] = {name for node in nodes for name in imported_modules(node, frozenset(SOURCES))} & SOURCES.keys()
    order = list(graphlib.TopologicalSorter(needs).static_order())
    assert set(order) == SOURCES.keys()


def test_simulator_and_planner_start_without_torch():
    names = [name for name in SOURCES if not name.startswith("executor")]
    code = f"import sys, {', '.join(names)}; print([name for name in {TORCH} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


# --- The checker itself, on made-up modules.

MADE_UP = frozenset(
    {
        "simulator",
        "simulator.errors",
        "simulator.specs",
        "simulator.specs.plan",
        "simulator.engine",
        "planner",
        "planner.search",
        "executor",
        "executor.cli",
        "executor.run",
    }
)


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("simulator.engine", "import planner.search", "imports planner.search: simulator is below planner"),
        ("simulator.engine", "from planner import search", "imports planner.search: simulator is below planner"),
        ("simulator.specs.plan", "from simulator.engine import run", "simulator.specs is below simulator"),
        ("simulator.specs.plan", "from simulator import engine", "simulator.specs is below simulator"),
        ("simulator.errors", "from simulator.specs import plan", "simulator.errors is below simulator.specs"),
        ("planner.search", "import numpy, executor.run", "imports executor.run: planner is below executor"),
        ("executor.run", "from planner.search import find_plan", "inside executor only cli and adapt import planner"),
        ("executor.report.page", "import planner", "inside executor only cli and adapt import planner"),
        ("simulator.engine", "import torch.nn as nn", "imports torch.nn: only executor imports torch"),
        ("planner.search", "from torch_geometric.data import Data", "only executor imports torch"),
        ("planner.search", "from planner import find_plan", "import the sibling module, not the package"),
        ("simulator.engine", "from tests import strategies", "no package imports tests"),
        ("simulator.engine", "from .specs import plan", "simulator.engine:1 has a relative import"),
        ("simulator.engine", "from . import specs", "simulator.engine:1 has a relative import"),
        ("simulator.engine", "def run():\n    import math", "simulator.engine:2 imports below the top"),
        ("executor.run", "def run():\n    from executor import cli", "executor.run:2 imports below the top"),
        ("executor.cli_plan", "class A:\n    import math", "executor.cli_plan:2 imports below the top"),
        ("simulator.engine", "if TYPE_CHECKING:\n    import math", "simulator.engine:2 imports below the top"),
        ("simulator.engine", "import importlib\nimportlib.import_module('torch')", ":2 imports by a call"),
        ("executor.run", "__import__('planner')", ":1 imports by a call"),
    ],
)
def test_the_checker_finds_a_fault_in_made_up_source(module, source, fault):
    found = import_faults(module, source, MADE_UP)
    assert len(found) == 1
    assert fault in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "simulator.engine",
            "import heapq\nfrom simulator.specs.plan import Plan\nfrom simulator.errors import PlanError",
        ),
        ("simulator", "from simulator.engine import simulate"),
        ("planner.search", "import simulator\nfrom simulator import simulate"),
        ("executor.run", "import torch\nimport simulator\nfrom executor.cli import main"),
        ("executor.cli", "import planner\n\ndef train():\n    from executor.run import run_plan"),
        ("executor.cli_plan", "from planner.search import find_plan"),
        ("executor.adapt", "from planner import search"),
        ("executor.run", "try:\n    import triton\nexcept ImportError:\n    triton = None"),
    ],
)
def test_the_checker_lets_good_imports_pass(module, source):
    assert import_faults(module, source, MADE_UP) == []


def test_the_checker_names_each_fault_of_a_bad_module():
    source = "import torch\nfrom planner import find_plan\n\ndef run():\n    import executor.run\n"
    assert sorted(import_faults("simulator.engine", source, MADE_UP)) == [
        "simulator.engine:1 imports torch: only executor imports torch",
        "simulator.engine:2 imports planner: simulator is below planner",
        "simulator.engine:5 imports below the top",
        "simulator.engine:5 imports executor.run: simulator is below executor",
    ]
