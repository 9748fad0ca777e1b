"""Models for the tests, each in a selectable size.

Every builder returns a `Case`: the model in training mode with seeded random weights, the inputs of
one call (a tuple or a mapping) and a loss of its output, or `None` if the model computes its own.
`BUILDERS` lists them by name; `HF`, `CONVOLUTIONAL` and `VARIANTS` group the names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Case(NamedTuple):
    """The parts of a training step."""

    model: nn.Module
    inputs: tuple[Any, ...] | Mapping[str, Any]
    loss_fn: Callable[[Any], Tensor] | None

    @property
    def args(self) -> tuple[Any, ...]:
        return self.inputs if isinstance(self.inputs, tuple) else ()

    @property
    def kwargs(self) -> dict[str, Any]:
        return {} if isinstance(self.inputs, tuple) else dict(self.inputs)


def tokens(batch: int, seq: int, vocab: int) -> Tensor:
    return torch.randint(0, vocab, (batch, seq))


# --- Hugging Face models, from a config, with random weights -------------------------------------


def gpt2(layers: int = 2, batch: int = 2, seq: int = 32, width: int = 64, vocab: int = 256, *,
         dropout: float = 0.1, use_cache: bool = False) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, vocab_size=vocab, n_positions=seq,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=use_cache,
        bos_token_id=0, eos_token_id=0)).train()
    ids = tokens(batch, seq, vocab)
    return Case(model, {"input_ids": ids, "labels": ids}, None)


def llama(layers: int = 2, batch: int = 2, seq: int = 32, width: int = 64, vocab: int = 256, *,
          use_cache: bool = False) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=3 * width,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=vocab, use_cache=use_cache,
        max_position_embeddings=seq, bos_token_id=0, eos_token_id=0)).train()
    ids = tokens(batch, seq, vocab)
    return Case(model, {"input_ids": ids, "labels": ids}, None)


def bert(layers: int = 2, batch: int = 2, seq: int = 32, width: int = 64, vocab: int = 256, *,
         dropout: float = 0.1) -> Case:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=4 * width,
        num_attention_heads=4, vocab_size=vocab, max_position_embeddings=seq,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)).train()
    ids = tokens(batch, seq, vocab)
    mask = torch.ones(batch, seq, dtype=torch.long)
    mask[-1, seq // 2:] = 0
    return Case(model, {"input_ids": ids, "attention_mask": mask, "labels": ids}, None)


def t5(layers: int = 2, batch: int = 2, seq: int = 32, width: int = 64, vocab: int = 256, *,
       dropout: float = 0.1) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(
        num_layers=layers, d_model=width, d_kv=width // 4, d_ff=4 * width, num_heads=4,
        vocab_size=vocab, dropout_rate=dropout, use_cache=False, decoder_start_token_id=0)).train()
    ids = tokens(batch, seq, vocab)
    return Case(model, {"input_ids": ids, "labels": ids}, None)


def vit(layers: int = 2, batch: int = 2, image: int = 32, width: int = 64, *,
        dropout: float = 0.0) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=4 * width,
        num_attention_heads=4, image_size=image, patch_size=4, num_labels=10,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)).train()
    return Case(model, {"pixel_values": torch.randn(batch, 3, image, image),
                        "labels": torch.arange(batch) % 10}, None)


# --- Convolutional models ------------------------------------------------------------------------


class _Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False),
                                          nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """The classical residual network, two convolutions per block, in-place ReLU."""

    def __init__(self, width: int, stages: int, blocks: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width),
                                  nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        layers: list[nn.Module] = []
        channels = width
        for stage in range(stages):
            for block in range(blocks):
                out = width * 2 ** stage
                layers.append(_Residual(channels, out, 2 if stage and not block else 1))
                channels = out
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.stem(x))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class _Double(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(True),
            nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(True))


class UNet(nn.Module):
    """Contracting and expanding path with concatenated skips."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        sizes = [width * 2 ** level for level in range(depth + 1)]
        self.entry = _Double(3, width)
        self.down = nn.ModuleList(_Double(a, b) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2)
                                for a, b in pairwise(sizes))
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


def resnet(batch: int = 4, image: int = 64, width: int = 16, stages: int = 3,
           blocks: int = 2) -> Case:
    torch.manual_seed(0)
    labels = torch.arange(batch) % 10
    return Case(ResNet(width, stages, blocks, 10), (torch.randn(batch, 3, image, image),),
                lambda logits: F.cross_entropy(logits, labels))


def unet(batch: int = 2, image: int = 64, width: int = 8, depth: int = 2) -> Case:
    torch.manual_seed(0)
    labels = torch.randint(0, 3, (batch, image, image))
    return Case(UNet(width, depth, 3), (torch.randn(batch, 3, image, image),),
                lambda logits: F.cross_entropy(logits, labels))


# --- Small models, each with one difficulty ------------------------------------------------------


class Block(nn.Module):
    """Pre-norm transformer block with a LoRA-like branch if `rank` is not 0."""

    def __init__(self, width: int, dropout: float = 0.0, rank: int = 0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)
        self.lora = nn.Sequential(nn.Linear(width, rank, bias=False),
                                  nn.Linear(rank, width, bias=False)) if rank else None

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2)
                   for part in self.qkv(normed).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = self.proj(attended.transpose(1, 2).flatten(2))
        if self.lora is not None:
            attended = attended + self.lora(normed)
        x = x + self.drop(attended)
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class LanguageModel(nn.Module):
    """Embedding, blocks, head; the head's logits are the output."""

    def __init__(self, layers: int, width: int, vocab: int, *, dropout: float = 0.0, rank: int = 0,
                 tied: bool = False, repeats: int = 1, graph_break: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, dropout, rank) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("lora" in name)
        self.repeats, self.graph_break = repeats, graph_break

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for index, block in enumerate(self.blocks):
            for _ in range(self.repeats):
                x = block(x)
            if self.graph_break and index == len(self.blocks) // 2 - 1:
                torch._dynamo.graph_break()
        return self.head(x)


class CausalModel(LanguageModel):
    """Called as the models of transformers, which take longer to trace."""

    def __init__(self, layers: int, width: int, vocab: int, *, dropout: float = 0.0) -> None:
        from transformers.modeling_outputs import CausalLMOutput

        super().__init__(layers, width, vocab, dropout=dropout)
        self.output = CausalLMOutput

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        # In one frame, as in transformers: by blocks, head and loss are then one region.
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return self.output(loss=loss, logits=logits)


def causal_model(layers: int = 2, batch: int = 2, seq: int = 32, width: int = 64,
                 vocab: int = 256, *, dropout: float = 0.0) -> Case:
    torch.manual_seed(0)
    ids = tokens(batch, seq, vocab)
    model = CausalModel(layers, width, vocab, dropout=dropout)
    return Case(model, {"input_ids": ids, "labels": ids}, None)


def language_model(layers: int = 2, batch: int = 2, seq: int = 32, width: int = 64,
                   vocab: int = 256, **options: Any) -> Case:
    torch.manual_seed(0)
    ids = tokens(batch, seq, vocab)
    return Case(LanguageModel(layers, width, vocab, **options), (ids,),
                lambda logits: F.cross_entropy(logits.flatten(0, 1), ids.flatten()))


def dropout_everywhere(**size: int) -> Case:
    return language_model(**size, dropout=0.2)


def lora(**size: int) -> Case:
    return language_model(**size, rank=4, dropout=0.1)


def tied(**size: int) -> Case:
    return language_model(**size, tied=True)


def block_twice(**size: int) -> Case:
    return language_model(**size, repeats=2)


def graph_break(**size: int) -> Case:
    return language_model(**size, graph_break=True)


def untied_embedding(vocab: int = 4096, **size: int) -> Case:
    return language_model(**size, vocab=vocab)


class _UnderAutocast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(*args, **kwargs)


def autocast(**size: int) -> Case:
    """A model that enters autocast bf16 in its own forward."""
    case = language_model(**size)
    return Case(_UnderAutocast(case.model), case.inputs, case.loss_fn)


class _ManyOutputs(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Linear(width, width)
        self.used, self.unused = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.body(x))
        unused = torch.relu(self.unused(hidden))
        return {"loss": self.used(hidden).square().mean(), "hidden": hidden,
                "more": (unused, unused.argmax(-1)), "detached": hidden.detach() * 2, "note": 3}


def many_outputs(batch: int = 16, width: int = 64) -> Case:
    torch.manual_seed(0)
    return Case(_ManyOutputs(width), (torch.randn(batch, width),), None)


class _Views(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.rand(width, width).t())

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x).chunk(2, -1)
        x = left.transpose(0, 1) * torch.sigmoid(right).transpose(0, 1)
        x = self.second(x[1::2]) @ self.scale
        y = x.clone()
        y[:, ::2].mul_(0.5)
        y[0] = x[1].flip(0)
        return (y.permute(1, 0, 2).expand(2, -1, -1, -1) * x.transpose(0, 1)).sum((0, 2))


def views(batch: int = 4, seq: int = 16, width: int = 32) -> Case:
    torch.manual_seed(0)
    return Case(_Views(width), (torch.randn(batch, seq, width),),
                lambda out: out.square().sum())


def mlp_huge(batch: int = 64, width: int = 64, huge: int = 2048, layers: int = 4) -> Case:
    """An MLP in which one layer is far larger than the others."""
    torch.manual_seed(0)
    sizes = [width] * layers + [huge] + [width] * layers
    stack: list[nn.Module] = []
    for inside, outside in pairwise(sizes):
        stack += [nn.Linear(inside, outside), nn.ReLU()]
    return Case(nn.Sequential(*stack), (torch.randn(batch, width),),
                lambda out: out.square().mean())


def gpt2_cache(**size: int) -> Case:
    return gpt2(**size, use_cache=True)


def llama_cache(**size: int) -> Case:
    return llama(**size, use_cache=True)


BUILDERS: dict[str, Callable[..., Case]] = {builder.__name__: builder for builder in (
    gpt2, llama, bert, t5, vit, resnet, unet, language_model, dropout_everywhere, lora, tied,
    block_twice, graph_break, untied_embedding, autocast, many_outputs, views, mlp_huge, gpt2_cache,
    llama_cache)}
HF = ("gpt2", "llama", "bert", "t5", "vit", "gpt2_cache", "llama_cache")
CONVOLUTIONAL = ("resnet", "unet")
VARIANTS = tuple(name for name in BUILDERS if name not in HF + CONVOLUTIONAL)


def step(case: Case, model: nn.Module | None = None) -> Tensor:
    """Run forward and backward of one plain training step; return the loss."""
    output = (model or case.model)(*case.args, **case.kwargs)
    loss = case.loss_fn(output) if case.loss_fn else output["loss"]
    loss.backward()
    return loss.detach()
