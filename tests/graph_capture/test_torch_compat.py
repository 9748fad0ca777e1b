"""The private names of torch: all that are used are listed, and one that is missing or is called
otherwise gives one clear error."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._functorch.partitioners as partitioners

import planner._graph_capture.torch_compat
from planner._graph_capture.errors import UnsupportedTorch
from planner._graph_capture.torch_compat import requirements

pytestmark = pytest.mark.compat

FOLDER = Path(planner._graph_capture.torch_compat.__file__).parent


def test_a_missing_name_is_named(monkeypatch):
    monkeypatch.delattr(partitioners, "_extract_fwd_bwd_modules")
    with pytest.raises(UnsupportedTorch) as refused:
        requirements.require("compilation")
    text = str(refused.value)
    assert "torch._functorch.partitioners._extract_fwd_bwd_modules is missing" in text
    assert f"torch {torch.__version__} " in text
    assert "Known to work: torch 2.11.0, 2.12.1, 2.13.0, 2.14.1, 2.15.0" in text
    assert "pip install torch==2.15.0" in text


def test_a_missing_module_is_named(monkeypatch):
    monkeypatch.setattr(sys, "modules", {**sys.modules, "torch._functorch.partitioners": None})
    monkeypatch.delattr(torch._functorch, "partitioners")
    with pytest.raises(UnsupportedTorch, match=r"\._extract_fwd_bwd_modules is missing"):
        requirements.require("compilation")


def test_another_signature_is_named(monkeypatch):
    def renamed(joint, saved, sizes, *, forward_outputs):
        raise AssertionError

    monkeypatch.setattr(partitioners, "_extract_fwd_bwd_modules", renamed)
    with pytest.raises(UnsupportedTorch) as refused:
        requirements.require("compilation")
    assert ("_extract_fwd_bwd_modules is called with (joint, saved, sizes, num_fwd_outputs=), but "
            "takes (joint, saved, sizes, *, forward_outputs)") in str(refused.value)


def test_a_version_that_nobody_knows_is_tried(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    for module in requirements.REQUIRED:
        requirements.require(module)


@pytest.mark.slow
def test_the_first_use_raises_it():
    code = ("import torch._functorch.partitioners as p; del p._extract_fwd_bwd_modules\n"
            "import planner, torch\n"
            "planner.plan(torch.nn.Linear(2, 2), torch.ones(2, 2))")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "UnsupportedTorch: checkpoint-planner needs internals of torch" in ran.stderr


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_all_that_is_used_is_listed(path):
    """A name counts as listed where the table has it or what is below it."""
    listed = [requirement.partition("(")[0] for requirement
              in requirements.REQUIRED.get(path.stem, ())]
    missing = [name for name in private_names(ast.parse(path.read_text()))
               if not any(entry == name or entry.startswith(f"{name}.")
                          or name.startswith(f"{entry}.") for entry in listed)]
    assert not missing


def private_names(tree: ast.AST) -> Iterator[str]:
    """The dotted private names of torch that a module imports or reads."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    used = {*modules.values()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            if head in modules and rest.replace(".", "").isidentifier():
                used.add(f"{modules[head]}.{rest}")
    return (name for name in sorted(used) if name.startswith("torch.")
            and any(part.startswith("_") and not part.startswith("__")
                    for part in name.split(".")))
