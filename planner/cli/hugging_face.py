"""`hf:CONFIG`: a transformers model built from its config with random weights, and matching inputs.

CONFIG is a `config.json`, a folder that contains one, or a model type such as `gpt2`.  Nothing is
downloaded.  The model has a training loss: masked or causal language modelling, sequence to
sequence, or image classification, depending on the architecture.

Blind spot: the batch is the plain one of its task, ids or pixels and labels, without a mask;
`--input` adds others.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cli.options import TargetOptions, TensorSpec, parse_inputs
from planner.cli.output import TargetError, UsageError

if TYPE_CHECKING:
    from torch import nn

_DEFAULT_BATCH = 1
_LONGEST_DEFAULT_SEQUENCE = 1024


@dataclass(frozen=True, slots=True)
class _Task:
    """A kind of training for which transformers has model classes."""

    mapping: str
    """Name of the table from model type to class name."""
    automatic: str
    """Name of the class that builds such a model from a config."""


_TASKS = (
    _Task("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
    _Task("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForImageClassification"),
    # Encoders such as BERT are in both tables; they are masked language models.
    _Task("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),
    _Task("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
)


def load_hugging_face(options: TargetOptions, *, device: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model on `device` in training mode, and keyword inputs with labels.

    Raises `UsageError` for an unknown type, file or setting, and `TargetError` if transformers is
    missing or rejects the config.
    """
    given = parse_inputs(options.inputs)
    family = _family(options)
    model = _build(family, options.target, device)
    positions = _positions(model, family)
    inputs = {spec.name: spec for spec in _batch(family, options, positions)}
    for name, spec in given.items():
        known = inputs.get(name)
        inputs[name] = spec if known is None else replace(spec, below=known.below)
    if family.takes_text and "input_ids" in given:
        _check_positions(inputs["input_ids"], positions, family)
    return model, {name: spec.make(device) for name, spec in inputs.items()}


def load_sized_hugging_face(
    options: TargetOptions, what: str
) -> tuple[nn.Module, Callable[[int], dict[str, Any]], int | None]:
    """The model on `meta` in training mode; a function from a size to keyword inputs with labels;
    and the largest size, if the config states it.

    `what` is the size that varies, `batch` or `sequence`; the other is that of `options`.  Raises
    as `load_hugging_face`.
    """
    family = _family(options)

    def make_inputs(size: int) -> dict[str, Any]:
        sized = (replace(options, batch=size) if what == "batch" else
                 replace(options, seq=size))
        return {spec.name: spec.make("meta") for spec in _batch(family, sized, positions)}

    model = _build(family, options.target, "meta")
    positions = _positions(model, family)
    make_inputs(1)  # raises usage errors early
    return model, make_inputs, None if what == "batch" else positions or family.stated_positions


@dataclass(frozen=True, slots=True)
class _Family:
    """A config and the training task of its model."""

    config: Any
    task: _Task

    @property
    def takes_text(self) -> bool:
        return self.task.automatic != "AutoModelForImageClassification"

    @property
    def stated_positions(self) -> int | None:
        """The longest sequence that the config states."""
        stated = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return stated if isinstance(stated, int) and stated >= 0 else None


def _family(options: TargetOptions) -> _Family:
    try:
        import transformers
    except ImportError:
        raise TargetError("hf: targets need transformers: "
                          'pip install "checkpoint-planner[hf]"') from None
    transformers.logging.set_verbosity_error()
    config = _config(options.target.removeprefix("hf:"), options.settings)
    task = _task(config)
    if task.automatic == "AutoModelForSeq2SeqLM" and (
            getattr(config, "decoder_start_token_id", None) is None):
        # Published configs name the first token of decoding; the defaults of a type do not.
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return _Family(config, task)


def _build(family: _Family, target: str, device: str) -> nn.Module:
    import torch
    import transformers

    try:
        with torch.device(device):
            model: nn.Module = getattr(
                transformers, family.task.automatic).from_config(family.config)
    except Exception as error:
        raise TargetError(f"transformers cannot build {target!r}: "
                          f"{type(error).__name__}: {error}") from error
    return model.train()


def _positions(model: nn.Module, family: _Family) -> int | None:
    """Length of the model's position table; `None` if positions are computed for any length."""
    from torch import nn

    stated = family.stated_positions
    if stated is None:
        return None
    tables = [stated] * any(stated in buffer.shape for buffer in model.buffers()
                            if buffer.dim() > 1)
    get_words = getattr(model, "get_input_embeddings", lambda: None)
    for module in model.modules():
        # Some tables reserve one or two rows at the start.
        if (isinstance(module, nn.Embedding) and module is not get_words()
                and stated <= module.num_embeddings <= stated + 2):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            tables.append(min(stated, module.num_embeddings - unused))
    return min(tables, default=None)


def _check_positions(ids: TensorSpec, positions: int | None, family: _Family) -> None:
    length = ids.shape[-1] if ids.shape else 0
    if positions is not None and length > positions:
        raise UsageError(f"sequences of {length:,} tokens: {family.config.model_type} has "
                         f"{positions:,} positions; shorten --seq, or raise the number of "
                         "positions by --set")


def _config(source: str, settings: tuple[str, ...]) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    fields = _read(Path(source))
    kind = source if fields is None else fields.pop("model_type", None)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING_NAMES:
        if fields is not None:
            raise UsageError(f"{source} is no config of transformers: its model_type is {kind!r}")
        near = difflib.get_close_matches(source, CONFIG_MAPPING_NAMES, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UsageError(f"hf:{source}: there is neither such a file nor such a model type{hint}")
    changes = dict(_setting(text) for text in settings)
    try:
        plain = AutoConfig.for_model(kind)
        for key in changes:
            if not hasattr(plain, key):
                near = difflib.get_close_matches(key, plain.to_dict(), n=3)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise UsageError(f"--set {key}: {kind} has no such setting{hint}")
        return AutoConfig.for_model(kind, **{**(fields or {}), **changes})
    except UsageError:
        raise
    except Exception as error:
        raise TargetError(f"transformers refuses the config of hf:{source}: "
                          f"{type(error).__name__}: {error}") from error


def _read(path: Path) -> dict[str, Any] | None:
    """The config in a file or folder; `None` if there is none."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if path.suffix == ".json":
            raise UsageError(f"hf:{path}: there is no such file")
        return None
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TargetError(f"{file} is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise TargetError(f"{file} is no config: expected a JSON object")
    return fields


def _setting(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise UsageError(f"--set must be KEY=VALUE, such as n_layer=24, got {text!r}")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value


def _task(config: Any) -> _Task:
    """The training task: the one named by `architectures` in the config, else the first task that
    knows the model type."""
    from transformers.models.auto import modeling_auto

    known = [task for task in _TASKS
             if config.model_type in getattr(modeling_auto, task.mapping)]
    stated = getattr(config, "architectures", None)
    wanted = {each for each in (stated if isinstance(stated, list) else ())
              if isinstance(each, str)}
    for task in known:
        classes = getattr(modeling_auto, task.mapping)[config.model_type]
        if not wanted.isdisjoint((classes,) if isinstance(classes, str) else classes):
            return task
    if not known:
        raise UsageError(f"hf: {config.model_type} has no model for language modelling or image "
                         "classification; write a factory and pass package.module:factory")
    return known[0]


def _batch(family: _Family, options: TargetOptions,
           positions: int | None) -> tuple[TensorSpec, ...]:
    """The inputs of the task; raises `UsageError` for more tokens than `positions`."""
    import torch

    config = family.config
    batch = _DEFAULT_BATCH if options.batch is None else options.batch
    if not family.takes_text:
        if options.seq is not None:
            raise UsageError(f"--seq: {config.model_type} takes images, not sequences")
        size = getattr(config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        channels = getattr(config, "num_channels", 3)
        return (TensorSpec("pixel_values", torch.float32, (batch, channels, height, width)),
                TensorSpec("labels", torch.int64, (batch,), below=config.num_labels))
    text = config.get_text_config()
    longest = positions or family.stated_positions or _LONGEST_DEFAULT_SEQUENCE
    seq = options.seq
    if seq is None:
        # A power of two: some architectures use a few of their positions for padding.
        seq = 1 << (min(longest, _LONGEST_DEFAULT_SEQUENCE).bit_length() - 1)
    shape = (batch, seq)
    ids = TensorSpec("input_ids", torch.int64, shape, below=text.vocab_size)
    _check_positions(ids, positions, family)
    return (ids, TensorSpec("labels", torch.int64, shape, below=text.vocab_size))
