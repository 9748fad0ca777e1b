"""What the layers of `make lint` cannot say: private torch stands behind one door, and tests take
their helpers from `tests.support`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = ("apply", "graph_capture", "planner", "solvers")
DOOR = ROOT / "graph_capture" / "torch_compat"
PLAIN_DOCSTRINGS = (
    *(f"graph_capture/{name}" for name in (
        "torch_compat", "op_costs", "device_kernels", "memory", "data_parallel", "inductor",
        "optimizer")),
    *(f"planner/{name}" for name in ("reporters", "ranks", "training_loop")))


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize(
    "path", [path for path in files(*PRODUCT) if DOOR not in path.parents], ids=short)
def test_private_torch_stands_behind_one_door(path):
    assert not list(private_torch(ast.parse(path.read_text())))


def private_torch(tree: ast.AST) -> Iterator[str]:
    """Private names of torch that a module imports, or reads from `torch`; ops are none."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        yield from (name for name in names if re.match(r"torch(?!\.ops\.)(\.\w+)*\._(?!_)", name))


def test_docstrings_say_what_a_thing_is_and_begin_with_neither_what_nor_whether():
    found = [f"{short(path)}: {text.splitlines()[0]}" for path in files(*PLAIN_DOCSTRINGS)
             for text in strings_that_stand_alone(ast.parse(path.read_text()))
             if text.startswith(("What ", "Whether "))]
    assert not found


def strings_that_stand_alone(tree: ast.AST) -> Iterator[str]:
    """Docstrings, also those under fields and constants."""
    for node in ast.walk(tree):
        if (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)):
            yield node.value.value


@pytest.mark.parametrize("path", files("tests"), ids=short)
def test_no_test_is_a_library(path):
    modules = [node.module or "" for node in ast.walk(ast.parse(path.read_text()))
               if isinstance(node, ast.ImportFrom)]
    assert not [module for module in modules if re.match(r"tests\.(.*\.)?test_", module)]
