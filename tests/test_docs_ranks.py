"""The documentation's scripts for several ranks run, each on two ranks that torchrun starts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("docs/tutorials/several_ranks.md", "docs/how_to/distributed.md")
SCRIPTS = [script for page in PAGES for script in re.findall(
    r"^<!-- torchrun -->\n```python\n(.*?)^```$", (ROOT / page).read_text(),
    re.DOTALL | re.MULTILINE)]


def test_there_are_scripts():
    assert len(SCRIPTS) == 4


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_a_script_runs_on_two_ranks(number, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPTS[number])
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo",
             "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr[-3000:]
