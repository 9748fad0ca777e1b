"""The benchmark for GPUs, as far as it runs without one."""

import sys

import pytest
import torch

from benchmarks import cuda


@pytest.mark.slow
def test_it_rehearses_on_the_cpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cuda", "--rehearse", "--rounds", "2"])
    cuda.main()
    printed = capsys.readouterr().out
    assert "| plain |" in printed and "plan, eager, at the peak of selective" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cuda"])
    cuda.main()
    assert "--rehearse" in capsys.readouterr().out
