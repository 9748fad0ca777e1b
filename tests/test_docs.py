"""The examples of the documentation run: each block marked `<!-- run -->`, in the order of its
page, with a tiny GPT-2 as `model` and a batch of it."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import planner
from tests.support.models import gpt2

ROOT = Path(__file__).resolve().parent.parent
FRAMEWORKS = ("accelerate", "datasets", "diffusers", "lightning", "peft", "trl")
MISSING = [name for name in FRAMEWORKS if find_spec(name) is None]
PAGES = ("README.md", "docs/tutorials/fit_a_model.md", "docs/tutorials/your_own_loop.md",
         "docs/how_to/plan.md", "docs/how_to/within.md", pytest.param(
    "docs/how_to/frameworks.md", marks=[
        pytest.mark.filterwarnings("ignore"),  # those of the frameworks
        pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")]))
NEW_MODEL_EACH = {"docs/how_to/frameworks.md"}
"""Pages whose blocks have nothing to do with one another but what they define."""
RUN = re.compile(r"^<!-- run -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"planner": planner, "torch": torch}
    text = (ROOT / page).read_text()
    blocks = list(RUN.finditer(text))
    assert blocks
    for block in blocks:
        if "model" not in names or page in NEW_MODEL_EACH:
            case = gpt2(layers=1 if page in NEW_MODEL_EACH else 2, batch=8, seq=64, width=32)
            names |= {"model": case.model, "batch": case.inputs}
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], ROOT / page, "exec"), names)


@pytest.mark.parametrize("page", sorted(
    path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))))
def test_the_links_of_a_page_lead_somewhere(page):
    for target in LINK.findall((ROOT / page).read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        if anchor:
            assert anchor in map(as_anchor, HEADING.findall(path.read_text())), target


def as_anchor(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
