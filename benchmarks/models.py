"""Models to measure on two cores: activations outweigh parameters, a step lasts about a second.

All are built from a config with seeded random weights, dropout at the published rate, and train on
one fixed random batch.  Vocabularies are small: the logits of a large one would set the peak of
every step, and no recomputation lowers that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.api import capture
from planner.step.prepared import PreparedStep

LAYERS, WIDTH, VOCABULARY = 4, 256, 1024


@dataclass(frozen=True, slots=True)
class Workload:
    """The parts of a training step."""

    name: str
    model: nn.Module
    inputs: tuple[Any, ...] | Mapping[str, Any]
    loss_fn: Callable[[Any], Tensor] | None = None
    """`None`: the model computes its own loss."""

    def prepare(self, **arguments: Any) -> PreparedStep:
        """Return the step, captured; `arguments` are those of `planner.api.capture`."""
        return capture(self.model, self.inputs, loss_fn=self.loss_fn, **arguments)

    def call(self, model: nn.Module) -> Any:
        """Return the output of `model` for the inputs of `self.model`."""
        if isinstance(self.inputs, tuple):
            return model(*self.inputs)
        return model(**self.inputs)


class LossOnly(nn.Module):
    """A model that returns its loss and drops its other outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        loss: Tensor = self.model(**inputs).loss
        return loss


def returning_loss_only(workload: Workload) -> Workload:
    """Return the workload with a scalar output, if the model computes the loss."""
    if workload.loss_fn is not None:
        return workload
    return replace(workload, model=LossOnly(workload.model))


def gpt2(*, batch: int = 8, sequence: int = 192, dropout: float = 0.1, layers: int = LAYERS,
         width: int = WIDTH, heads: int = 8, vocabulary: int = VOCABULARY) -> Workload:
    """GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=sequence,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False,
        bos_token_id=0, eos_token_id=0))
    ids = torch.randint(0, vocabulary, (batch, sequence))
    return Workload("gpt2", model.train(), {"input_ids": ids, "labels": ids})


def bert(*, batch: int = 8, sequence: int = 192, dropout: float = 0.1,
         layers: int = LAYERS, width: int = WIDTH, vocabulary: int = VOCABULARY) -> Workload:
    """BERT as a masked language model; half of the last row is padding."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=4 * width,
        num_attention_heads=8, vocab_size=vocabulary, max_position_embeddings=sequence,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout))
    ids = torch.randint(0, vocabulary, (batch, sequence))
    mask = torch.ones(batch, sequence, dtype=torch.long)
    mask[-1, sequence // 2:] = 0
    return Workload("bert", model.train(),
                    {"input_ids": ids, "attention_mask": mask, "labels": ids})


def llama(*, batch: int = 8, sequence: int = 192, layers: int = LAYERS, width: int = WIDTH,
          inside: int = 3 * WIDTH, heads: int = 8, groups: int = 4, vocabulary: int = VOCABULARY
          ) -> Workload:
    """Llama with grouped-query attention; it has no dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=inside,
        num_attention_heads=heads, num_key_value_heads=groups, vocab_size=vocabulary,
        use_cache=False,
        max_position_embeddings=sequence, bos_token_id=0, eos_token_id=0))
    ids = torch.randint(0, vocabulary, (batch, sequence))
    return Workload("llama", model.train(), {"input_ids": ids, "labels": ids})


def mamba(*, batch: int = 4, sequence: int = 16, layers: int = 2, width: int = 64,
          vocabulary: int = 512) -> Workload:
    """Mamba, whose scan is a loop over the sequence where its kernels are not installed."""
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(
        hidden_size=width, num_hidden_layers=layers, vocab_size=vocabulary, state_size=8,
        use_cache=False))
    ids = torch.randint(0, vocabulary, (batch, sequence))
    return Workload("mamba", model.train(), {"input_ids": ids, "labels": ids})


def t5(*, batch: int = 8, sequence: int = 128, dropout: float = 0.1, width: int = WIDTH,
       vocabulary: int = VOCABULARY) -> Workload:
    """T5: as many layers in the encoder as in the decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(
        num_layers=LAYERS // 2, d_model=width, d_kv=width // 8, d_ff=4 * width, num_heads=8,
        vocab_size=vocabulary, dropout_rate=dropout, use_cache=False, decoder_start_token_id=0))
    ids = torch.randint(0, vocabulary, (batch, sequence))
    return Workload("t5", model.train(), {"input_ids": ids, "labels": ids})


def vit(*, batch: int = 8, image: int = 56, layers: int = LAYERS, width: int = WIDTH) -> Workload:
    """ViT, with 196 patches; no dropout, as published."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=4 * width,
        num_attention_heads=8, image_size=image, patch_size=4, num_labels=10))
    return Workload("vit", model.train(), {"pixel_values": torch.randn(batch, 3, image, image),
                                           "labels": torch.arange(batch) % 10})


def _normed(inside: int, outside: int, kernel: int, stride: int = 1, *, relu: bool = True,
            **options: Any) -> list[nn.Module]:
    """Return a convolution that keeps the size, up to its stride, and a batch normalization."""
    layers: list[nn.Module] = [
        nn.Conv2d(inside, outside, kernel, stride, kernel // 2, **{"bias": False, **options}),
        nn.BatchNorm2d(outside)]
    return [*layers, nn.ReLU(True)] if relu else layers


class _Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a residual connection around them."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.inner = nn.Sequential(*_normed(inside, width, 1), *_normed(width, width, 3, stride),
                                   *_normed(width, outside, 1, relu=False))
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(*_normed(inside, outside, 1, stride, relu=False))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y += self.shortcut(x)
        return self.relu(y)


def _resnet(width: int, blocks: tuple[int, ...], classes: int) -> nn.Module:
    layers: list[nn.Module] = [*_normed(3, width, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            inner = width * 2 ** stage
            layers.append(_Bottleneck(channels, inner, 2 if stage and not block else 1))
            channels = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(channels, classes))


def resnet(*, batch: int = 8, image: int = 112, width: int = 32) -> Workload:
    """ResNet-50's layout at half of its width."""
    torch.manual_seed(0)
    labels = torch.arange(batch) % 10
    return Workload("resnet", _resnet(width, (3, 4, 6, 3), 10).train(),
                    (torch.randn(batch, 3, image, image),),
                    lambda logits: F.cross_entropy(logits, labels))


class _Double(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(*_normed(inside, outside, 3, bias=True),
                         *_normed(outside, outside, 3, bias=True))


class _UNet(nn.Module):
    """Contracting and expanding path with concatenated skips."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        sizes = [width * 2 ** level for level in range(depth + 1)]
        steps = list(pairwise(sizes))
        self.entry = _Double(3, width)
        self.down = nn.ModuleList(_Double(a, b) for a, b in steps)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in steps)
        self.merge = nn.ModuleList(_Double(2 * a, a) for a in sizes[:-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.entry(x)]
        for down in self.down:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


def unet(*, batch: int = 4, image: int = 128, width: int = 16, depth: int = 4,
         layout: torch.memory_format = torch.contiguous_format) -> Workload:
    """U-Net at a quarter of its width."""
    torch.manual_seed(0)
    labels = torch.randint(0, 3, (batch, image, image))
    pixels = torch.randn(batch, 3, image, image).contiguous(memory_format=layout)
    return Workload("unet", _UNet(width, depth, 3).train().to(memory_format=layout), (pixels,),
                    lambda logits: F.cross_entropy(logits, labels))


def unet_channels_last(**sizes: int) -> Workload:
    """The U-Net in the layout in which a CPU's convolutions need no copies of their operands."""
    return replace(unet(layout=torch.channels_last, **sizes), name="unet_channels_last")


def unet_large(*, batch: int = 8, image: int = 256) -> Workload:
    """The U-Net in `channels_last` on images of four times the area, where gradients of parameters
    weigh less."""
    return replace(unet_channels_last(batch=batch, image=image), name="unet_large")


def unet_full(*, batch: int = 8, image: int = 160) -> Workload:
    """The U-Net of the published width, 64, in `channels_last`."""
    return replace(unet_channels_last(batch=batch, image=image, width=64), name="unet_full")


def mlp(*, batch: int = 512, width: int = 128, huge: int = 4096, layers: int = 6) -> Workload:
    """A perceptron in which one layer is far wider than the others."""
    torch.manual_seed(0)
    sizes = [width] * layers + [huge] + [width] * layers
    stack: list[nn.Module] = []
    for inside, outside in pairwise(sizes):
        stack += [nn.Linear(inside, outside), nn.ReLU()]
    return Workload("mlp", nn.Sequential(*stack).train(), (torch.randn(batch, width),),
                    lambda output: output.square().mean())


WORKLOADS: dict[str, Callable[..., Workload]] = {
    build.__name__: build for build in (
        gpt2, bert, llama, t5, vit, resnet, unet, unet_channels_last, unet_large,
        unet_full, mlp)}
"""Every model by name."""
