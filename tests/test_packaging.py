"""The package lives beside others: a user's folders `solvers`, `apply` and `graph_capture`."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OWN = ("apply", "graph_capture", "solvers")

TRAIN = """
import sys
from importlib.metadata import entry_points

import apply
import graph_capture
import solvers

assert {apply.OWNER, graph_capture.OWNER, solvers.OWNER} == {"user"}

import torch

import planner
import planner.solvers

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1)), (
        torch.randn(64, 8),)

if __name__ == "__main__":
    model, inputs = make()
    plan = planner.plan(model, inputs, budget="95%", loss_fn=torch.mean, probe=False)
    plan.save("plan.json")
    planner.apply(model, planner.load("plan.json"))(*inputs).mean().backward()
    within = planner.within(make()[0], "95%", loss_fn=torch.mean)
    within(*inputs).mean().backward()
    assert planner.plan_of(within) is not None
    assert planner.solvers.solve.__module__ == "planner.solvers.solve"
    if sys.argv[1:] == ["installed"]:
        (backend,) = entry_points(group="torch_dynamo_backends", name="checkpoint_planner")
        assert callable(backend.load())
    assert {apply.OWNER, graph_capture.OWNER, solvers.OWNER} == {"user"}
    print(planner.__file__)
"""

SOLVERS = """
import sys
import solvers
import planner.solvers
assert "torch" not in sys.modules and "planner.public" not in sys.modules
for name in ("load_problem", "solve", "simulate", "Problem", "InfeasibleBudget"):
    assert getattr(solvers, name) is getattr(planner.solvers, name)
assert solvers.SOLVERS == planner.solvers.SOLVERS
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of the sources, for building leaves files behind."""
    shutil.copytree(ROOT, tmp_path / "checkout", symlinks=True,
                    ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
    return tmp_path / "checkout"


@pytest.fixture
def beside(tmp_path):
    """A user's folder that has all three."""
    folder = tmp_path / "user"
    for name in OWN:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("OWNER = 'user'\n")
    (folder / "train.py").write_text(TRAIN)
    return folder


def python(where, *arguments, **variables):
    """Run the Python of an environment; returns stdout."""
    result = subprocess.run([*arguments], cwd=where, capture_output=True, text=True, env={
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **variables})
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout


def environment(folder):
    """One that has what this one has, but for what is installed in place: the project itself."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wheel", "editable", "path"])
def test_folders_of_the_user_do_not_shadow_ours(checkout, beside, tmp_path, how):
    own = environment(tmp_path / "venv")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    install = [*pip, "--python", own, "install", "--no-deps", "--no-index"]
    variables, scripts = {}, own.parent
    if how == "wheel":
        python(tmp_path, *pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index",
               "-w", tmp_path / "dist", checkout)
        python(tmp_path, *install, *(tmp_path / "dist").glob("*.whl"))
        shutil.rmtree(checkout)
    elif how == "editable":
        python(tmp_path, *install, "--no-build-isolation", "-e", checkout)
    else:
        variables["PYTHONPATH"] = str(checkout)
    which = [] if how == "path" else ["installed"]
    where = python(beside, own, "train.py", *which, **variables).splitlines()[-1]
    assert (tmp_path / "venv" if how == "wheel" else checkout) in Path(where).parents
    assert "Usage" in python(beside, own, "-m", "planner", "--help", **variables)
    if how != "path":
        printed = python(beside, scripts / "checkpoint-planner", "plan", "train.py:make", "--json")
        assert printed.startswith("{")
    python(tmp_path, own, "-c", SOLVERS, **variables)
