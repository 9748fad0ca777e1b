"""TARGET at the command line: factories, transformers configs, inputs in text; the mistakes."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from planner.cli.options import parse_inputs
from planner.cli.output import TargetError, UsageError
from planner.cli.target import (
    OF_CLASSES,
    OF_VALUES,
    TargetOptions,
    find_loss,
    fitted_to,
    load_target,
)

FACTORIES = """
import torch

def model():
    print("building")
    return torch.nn.Linear(3, 2)

def pair():
    return torch.nn.Linear(3, 2), (torch.ones(4, 3),)

def broken():
    return {}["missing"]

def mean_square(output):
    return output.square().mean()

def triple():
    return (*pair(), mean_square)

def four():
    return (*pair(), mean_square, 4)

def number():
    return 3

constant = 5
instance = torch.nn.Linear(1, 1)

class Holder:
    @staticmethod
    def model():
        return torch.nn.Linear(7, 1)
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "own_models.py").write_text(FACTORIES)
    (tmp_path / "broken_module.py").write_text("import torch\nraise RuntimeError('no such luck')\n")
    (tmp_path / "needs_more.py").write_text("import package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("own_models", "broken_module", "needs_more"):
        sys.modules.pop(name, None)


def load(target, device="meta", **options):
    model, inputs, _ = load_target(TargetOptions(target, **options), device=device)
    return model, inputs


def test_a_factory_gives_a_model_or_a_model_and_its_inputs(factories):
    model, inputs = load("own_models:model")
    assert isinstance(model, torch.nn.Linear) and inputs is None
    model, inputs = load("own_models:pair")
    assert inputs[0].shape == (4, 3)
    assert load("own_models:instance")[0].in_features == 1
    assert load("own_models:Holder.model")[0].in_features == 7


def test_inputs_in_text_replace_those_of_the_factory(factories):
    _, inputs = load("own_models:pair", inputs=("input:float32[5,3]",))
    assert {name: tuple(t.shape) for name, t in inputs.items()} == {"input": (5, 3)}


def test_a_factory_may_give_the_loss_and_an_option_another(factories):
    def loss(target, **options):
        return load_target(TargetOptions(target, **options), device="meta").loss_fn

    assert loss("own_models:pair") is None
    assert loss("own_models:triple")(torch.full((2,), 3.0)) == 9
    assert loss("own_models:triple", loss="own_models:number") is sys.modules["own_models"].number
    assert loss("own_models:pair", loss="own_models.py:mean_square")(torch.ones(2)) == 1
    with pytest.raises(UsageError, match="'own_models:constant' is no function"):
        loss("own_models:pair", loss="own_models:constant")
    with pytest.raises(UsageError, match=r"one of cross_entropy, .*; got 'cross_entrop'"):
        loss("own_models:pair", loss="cross_entrop")


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 5, 3)])
@pytest.mark.parametrize("name", OF_CLASSES + OF_VALUES)
def test_losses_of_torch_get_a_target_that_fits(name, shape):
    for output in (torch.rand(shape), {"other": torch.rand(shape)}):
        loss = find_loss(name)(output)
        assert loss.shape == () and loss.isfinite()


@pytest.mark.parametrize("name", OF_CLASSES)
def test_the_classes_of_a_language_model_are_the_last_dimension(name):
    logits = torch.randn(2, 3, 7)
    ids = torch.zeros(2, 3, dtype=torch.long)
    expected = getattr(torch.nn.functional, name)(logits.flatten(0, 1), ids.flatten())
    assert fitted_to(find_loss(name), {"ids": ids})(logits) == expected
    assert find_loss(name)(SimpleNamespace(logits=logits)) == expected
    assert fitted_to(find_loss(name), (torch.randn(2, 3),))(logits) == (
        getattr(torch.nn.functional, name)(logits, ids.new_zeros(2, 7)))


@pytest.mark.parametrize("output", [torch.tensor(1.0), torch.tensor([1, 2]), None, "text"])
def test_a_loss_of_torch_says_what_it_needs(output):
    with pytest.raises(UsageError, match=r"--loss cross_entropy is made of .*the model returns"):
        find_loss("cross_entropy")(output)


def test_a_target_in_a_file(factories, monkeypatch):
    (factories / "inner").mkdir()
    (factories / "inner" / "json.py").write_text("from beside import pair as make\n")
    (factories / "inner" / "beside.py").write_text(FACTORIES)
    assert load("inner/json.py:make")[1][0].shape == (4, 3)
    assert json.loads("1") == 1  # the module of this name is still itself
    assert load(f"{factories}/own_models.py:Holder.model")[0].in_features == 7
    with pytest.raises(UsageError, match=r"there is no file .*/none\.py"):
        load("none.py:make")
    with pytest.raises(UsageError, match=r"a file is named with its ending"):
        load("inner/json:make")
    sys.modules.pop("beside")


@pytest.mark.parametrize(("target", "message"), [
    ("own_models", "must be package.module:factory"),
    (":model", "must be package.module:factory"),
    ("own_models:", "must be package.module:factory"),
    ("no_such_module:model", "no module 'no_such_module'"),
    ("no_such_package.inner:model", "no module 'no_such_package'"),
    ("own_models:absent", "has no 'absent'"),
    ("own_models:constant", "no function"),
])
def test_a_target_that_is_not_there_is_a_usage_error(factories, target, message):
    with pytest.raises(UsageError, match=message):
        load(target)


@pytest.mark.parametrize(("target", "message"), [
    ("own_models:broken", r"KeyError: 'missing' \(.*own_models.py:12\)"),
    ("own_models:number", "must return a model, .*got int"),
    ("own_models:four", r"got \(Linear, tuple, function, int\)"),
    ("broken_module:model", r"no such luck \(.*broken_module.py:2\)"),
    ("needs_more:model", "package_that_is_not_there"),
])
def test_a_factory_that_fails_is_told_with_its_place(factories, target, message):
    with pytest.raises(TargetError, match=message):
        load(target)


def test_settings_of_a_config_are_not_for_factories(factories):
    for options in ({"settings": ("n_layer=2",)}, {"batch": 2}, {"seq": 3}):
        with pytest.raises(UsageError, match="is for hf: targets"):
            load("own_models:model", **options)


@pytest.mark.parametrize(("target", "settings", "kind", "shapes"), [
    ("hf:gpt2", ("n_layer=2", "n_embd=32", "n_head=2", "vocab_size=100"), "GPT2LMHeadModel",
     {"input_ids": (3, 16), "labels": (3, 16)}),
    ("hf:llama", ("num_hidden_layers=1", "hidden_size=32", "num_attention_heads=2",
                  "num_key_value_heads=1", "intermediate_size=64", "vocab_size=100"),
     "LlamaForCausalLM", {"input_ids": (3, 16), "labels": (3, 16)}),
    ("hf:bert", ("num_hidden_layers=1", "hidden_size=32", "num_attention_heads=2",
                 "intermediate_size=64", "vocab_size=100"),
     "BertForMaskedLM", {"input_ids": (3, 16), "labels": (3, 16)}),
    ("hf:t5", ("num_layers=1", "d_model=32", "d_ff=64", "num_heads=2", "d_kv=16",
               "vocab_size=100"),
     "T5ForConditionalGeneration", {"input_ids": (3, 16), "labels": (3, 16)}),
    ("hf:vit", ("num_hidden_layers=1", "hidden_size=32", "num_attention_heads=2",
                "intermediate_size=64", "image_size=32"),
     "ViTForImageClassification", {"pixel_values": (3, 3, 32, 32), "labels": (3,)}),
])
def test_a_model_type_gives_a_model_with_a_loss_and_a_batch_that_fits(
        target, settings, kind, shapes):
    options = {"batch": 3, "settings": settings, **({} if "vit" in target else {"seq": 16})}
    on_meta, inputs = load(target, **options)
    assert type(on_meta).__name__ == kind and on_meta.training
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == shapes
    assert {p.device.type for p in on_meta.parameters()} == {"meta"}
    state = torch.get_rng_state()
    model, inputs = load(target, device="cpu", **options)
    for tensor in inputs.values():
        if not tensor.is_floating_point():
            assert tensor.min() >= 0 and tensor.max() < 100
    torch.set_rng_state(state)
    model(**inputs).loss.backward()


def test_a_config_file_or_its_folder_is_read(tmp_path):
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50,
              "n_positions": 24, "architectures": ["GPT2LMHeadModel"]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    for target in (f"hf:{path}", f"hf:{tmp_path}"):
        model, inputs = load(target, settings=("n_layer=2",))
        assert len(model.transformer.h) == 2
        assert inputs["input_ids"].shape == (1, 16)


def test_an_input_in_text_changes_or_joins_the_batch():
    _, inputs = load("hf:gpt2", settings=("n_layer=1", "n_embd=16", "n_head=2", "vocab_size=9"),
                     seq=8, inputs=("attention_mask:int64[1,8]", "labels:int64[1,8]"))
    assert list(inputs) == ["input_ids", "labels", "attention_mask"]


@pytest.mark.parametrize(("target", "options", "message"), [
    ("hf:gpt22", {}, "did you mean gpt2"),
    ("hf:/no/such/config.json", {}, "no such file"),
    ("hf:gpt2", {"settings": ("n_layers=2",)}, "did you mean n_layer"),
    ("hf:gpt2", {"settings": ("n_layer",)}, "KEY=VALUE"),
    ("hf:vit", {"seq": 4}, "takes images"),
    ("hf:wav2vec2", {}, "write a factory"),
    ("hf:gpt2", {"inputs": ("input_ids",)}, "NAME:DTYPE"),
    ("hf:gpt2", {"inputs": ("input_ids:int65[2]",)}, "no dtype"),
])
def test_mistakes_about_a_config_are_usage_errors(target, options, message):
    with pytest.raises(UsageError, match=message):
        load(target, **options)


def test_a_config_that_transformers_refuses_is_told(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(TargetError, match="no JSON"):
        load(f"hf:{path}")
    with pytest.raises(TargetError, match=r"cannot build|refuses"):
        load("hf:gpt2", settings=("n_embd=31", "n_head=2"))


def test_tensors_from_text_have_values_that_fit_and_leave_the_random_state_alone():
    state = torch.get_rng_state()
    specs = parse_inputs(["x:float32[2,3]", "n:int64[4]", "flag:bool[]", "y:bfloat16[ 1 , 2 ]"])
    made = {name: spec.make("cpu") for name, spec in specs.items()}
    assert made["x"].shape == (2, 3) and made["x"].std() > 0
    assert made["n"].dtype == torch.int64 and made["flag"].shape == ()
    assert made["y"].dtype == torch.bfloat16
    assert torch.equal(torch.get_rng_state(), state)
