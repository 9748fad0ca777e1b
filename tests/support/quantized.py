"""Linear layers with quantized weights; a test is skipped where the library is not installed."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def four_bit(linear: nn.Linear) -> nn.Module:
    """bitsandbytes' NF4."""
    bnb = pytest.importorskip("bitsandbytes")
    packed = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False,
                               compute_dtype=torch.float32, quant_type="nf4")
    packed.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    quantized: nn.Module = packed.to("cpu")
    return quantized


def int8(linear: nn.Linear) -> nn.Module:
    """torchao's 8-bit integers, for the weight alone."""
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig())
    return linear
