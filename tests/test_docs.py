"""The examples of the documentation run: each block marked `<!-- run -->`, in the order of its
page, with a tiny GPT-2 as `model` and a batch of it."""

import re
from pathlib import Path

import pytest
import torch

import planner
from tests.support.models import gpt2

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/guide.md", "docs/within.md")
RUN = re.compile(r"^<!-- run -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
MADE_BY_A_COMMAND = {"docs/torch_versions.md"}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = gpt2(layers=2, batch=8, seq=64, width=32)
    names = {"planner": planner, "torch": torch, "model": case.model, "batch": case.inputs}
    text = (ROOT / page).read_text()
    blocks = list(RUN.finditer(text))
    assert blocks
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], ROOT / page, "exec"), names)


@pytest.mark.parametrize("page", sorted(
    path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))))
def test_the_links_of_a_page_lead_somewhere(page):
    for target in LINK.findall((ROOT / page).read_text()):
        if "://" not in target:
            path = ((ROOT / page).parent / target).resolve()
            assert path.exists() or path.relative_to(ROOT).as_posix() in MADE_BY_A_COMMAND, target
