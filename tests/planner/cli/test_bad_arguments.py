"""Every command over bad arguments: one line on stderr, nothing on stdout, the documented code."""

import json
import sys

import pytest

from planner.search.planning import plan_within
from tests.support.command_line import TINY_GPT2, invoke, run
from tests.support.graphs import HandMadeStep, chain, prepared

OWN = """
import sys
import torch

print("at import")

class Model(torch.nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.act = act

    def forward(self, input):
        print("in the forward")
        if self.act is not None:
            self.act()
        return self.linear(input)

class Silent(Exception):
    def __str__(self):
        raise RuntimeError

def fail(error):
    raise error

inputs = torch.ones(4, 3)
def model(): return Model(), inputs
def alone(): return Model()
def sized(size): return Model(), torch.ones(size, 3)
def exits(): sys.exit(7)
def sized_exits(size): sys.exit(7)
def exits_well(): sys.exit(0)
def exits_in_forward(): return Model(lambda: sys.exit(9)), inputs
def exits_in_loss(): return Model(), inputs, lambda output: sys.exit(3)
def fails_in_forward(): return Model(lambda: fail(ValueError("two\\nlines"))), inputs
def silent(): raise Silent
def endless(): return endless()
def generator_ends(): raise GeneratorExit
def interrupts(): raise KeyboardInterrupt
def needs(more, than_nothing): return model()
def nothing(): return None
def a_class(): return Model
def wrong_inputs(): return Model(), 5
def wrong_loss(): return Model(), inputs, 5
def no_gradient(): return torch.nn.ReLU(), inputs
constant = 5
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the user's files, entered."""
    path = tmp_path_factory.mktemp("user")
    (path / "own_bad.py").write_text(OWN)
    (path / "exits_at_import.py").write_text("import sys\nsys.exit()\n")
    (path / "no_syntax.py").write_text("def (\n")
    (path / "no_text.py").write_bytes(b"\xff\xfe")
    (path / "list.json").write_text("[]")
    (path / "typeless.json").write_text("{}")
    (path / "listed_type.json").write_text('{"model_type": ["gpt2"]}')
    (path / "ill_typed.json").write_text('{"model_type": "gpt2", "n_layer": "x"}')
    (path / "no_text.json").write_bytes(b"\xff\xfe")
    (path / "deep.json").write_text("[" * 100_000)
    plan_within(prepared(HandMadeStep(chain(12), 2600)), 1900).save(path / "plan.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setattr(sys, "path", list(sys.path))
        yield path
    for name in ("own_bad", "exits_at_import"):
        sys.modules.pop(name, None)


def words(row):
    """The arguments that a row of a table stands for."""
    for word in row.split():
        if word == "GPT2":
            yield from (*TINY_GPT2, "--set", "n_positions=48")
        else:
            yield word.replace("EMPTY", "").replace("NO_UTF8", "\udcff")


ERRORS = """
plan own_bad:exits
plan own_bad:exits_well
plan own_bad:exits_in_loss
plan own_bad:fails_in_forward
plan own_bad:silent
plan own_bad:endless
plan own_bad:generator_ends
plan own_bad:needs
plan own_bad:nothing
plan own_bad:a_class
plan own_bad:wrong_loss
plan own_bad:no_gradient
plan own_bad.py:exits
plan exits_at_import:f
plan exits_at_import.py:f
plan no_syntax.py:f
plan no_text.py:f
plan own_bad:model --loss exits_at_import:f
plan own_bad:model --loss own_bad:needs
plan own_bad:model -o missing/plan.json
plan own_bad:model -o own_bad.py/plan.json
plan own_bad:model -o NO_UTF8/plan.json
plan hf:no_text.json
plan hf:deep.json
plan hf:list.json
plan hf:ill_typed.json
plan GPT2 --set n_embd=abc
plan GPT2 --set n_embd=-5
plan GPT2 --set n_embd=1e999
plan GPT2 --set n_embd=NaN
plan GPT2 --set n_embd=null
plan GPT2 --set vocab_size=-1
plan GPT2 --set n_layer=-1
plan GPT2 --set attn_pdrop=7
plan GPT2 --set activation_function=none_such
plan GPT2 --set use_cache=maybe
plan GPT2 --input input_ids:float32[1,8]
memory own_bad:exits_in_forward
memory own_bad:model --plan missing.json
frontier own_bad:exits
max-batch own_bad:sized_exits --budget 1GB
advise own_bad:sized_exits --budget 1GB --effective-batch 4
show missing.json
show NO_UTF8
show EMPTY
show .
show own_bad.py
show no_text.json
show deep.json
show /dev/null
verify own_bad:model missing.json
verify own_bad:model own_bad.py
verify own_bad:exits plan.json
verify own_bad:alone plan.json --input input:float32[1000000000000,3]
"""

USAGE = """
EMPTY
NO_UTF8
--nothing
nothing
plan
plan --nothing
plan own_bad
plan own_bad:
plan :model
plan own_bad:absent
plan own_bad:constant
plan own_bad:NO_UTF8
plan NO_UTF8:model
plan ./own_bad:model
plan .own_bad:model
plan /:model
plan none.py:model
plan own_bad:wrong_inputs
plan own_bad:alone
plan own_bad:alone --input input
plan own_bad:alone --input input:float33[2]
plan own_bad:alone --input input:float32[-1]
plan own_bad:alone --input input:float32[99999999999,9999999999]
plan own_bad:alone --input NO_UTF8:float32[2]
plan own_bad:model --set n_layer=2
plan own_bad:model --batch 2
plan own_bad:model --seq 2
plan own_bad:model --device x
plan own_bad:model --device EMPTY
plan own_bad:model --device meta
plan own_bad:model --gpu EMPTY
plan own_bad:model --gpu H101
plan own_bad:model --optimizer none_such
plan own_bad:model --solver EMPTY
plan own_bad:model --backend EMPTY
plan own_bad:model --cost-model EMPTY
plan own_bad:model --regions none_such
plan own_bad:model --keep NO_UTF8
plan own_bad:model --autocast fp8
plan own_bad:model --allow EMPTY
plan own_bad:model --allow fuse
plan own_bad:model --budget-of device
plan own_bad:model --budget-of reserved
plan own_bad:model --loss EMPTY
plan own_bad:model --loss :
plan own_bad:model --loss own_bad:constant
plan own_bad:model --budget EMPTY
plan own_bad:model --budget NO_UTF8
plan own_bad:model --budget lots
plan own_bad:model --budget nan
plan own_bad:model --budget inf%
plan own_bad:model --budget 0
plan own_bad:model --budget -5%
plan own_bad:model --budget 1e308%
plan own_bad:model --budget 1e308
plan own_bad:model --budget 1e300GB
plan own_bad:model --budget 1e999999999
plan own_bad:model --time-limit 0
plan own_bad:model --time-limit -1
plan own_bad:model --time-limit nan
plan own_bad:model --time-limit 1e400
plan own_bad:model --time-limit long
plan own_bad:model --accumulation 0
plan own_bad:model --accumulation 1.5
plan own_bad:model --ranks 2
plan own_bad:model --parallel ddp
plan own_bad:model --parallel ddp --ranks 1
plan own_bad:model --parallel ddp --ranks -1
plan own_bad:model --parallel none_such --ranks 2
plan own_bad:model --parallel fsdp2 --ranks 2 --unit none_such
plan own_bad:model -o EMPTY
plan own_bad:model -o .
plan hf:
plan hf:NO_UTF8
plan hf:missing.json
plan hf:typeless.json
plan hf:listed_type.json
plan hf:gpt22
plan GPT2 --batch 0
plan GPT2 --batch x
plan GPT2 --batch 99999999999999999999999999
plan GPT2 --seq -1
plan GPT2 --seq 49
plan GPT2 --input input_ids:int64[2,49]
plan GPT2 --set n_embd
plan GPT2 --set =3
plan GPT2 --set n_embeds=3
memory own_bad:model --grad-clip nan
memory own_bad:model --grad-clip -1
memory own_bad:model --zero-grad never
memory own_bad:model --hold-output never
memory own_bad:model --device x
memory GPT2 --seq 49
frontier own_bad:model --points 1
frontier own_bad:model --points x
frontier own_bad:model --plot curve.none_such
frontier own_bad:model --plot .
frontier own_bad:model --device x
show
show plan.json more
show plan.json --plot step.none_such
verify own_bad:model
verify own_bad:model plan.json --device x
verify own_bad:model plan.json --device meta
verify own_bad:model plan.json --device cuda:99
max-batch own_bad:sized
max-batch own_bad:model --budget 1GB
max-batch own_bad:sized --budget 50%
max-batch own_bad:sized --budget 1e308GB
max-batch own_bad:sized --budget 1GB --overhead nan
max-batch own_bad:sized --budget 1GB --overhead -1
max-batch own_bad:sized --budget 1GB --overhead x%
max-batch own_bad:sized --budget 1GB --smallest 10 --largest 5
max-batch own_bad:sized --budget 1GB --multiple-of 0
max-batch own_bad:sized --budget 1GB --device x
max-batch GPT2 --budget 1GB
max-seq GPT2 --budget 1GB --smallest 49
max-seq own_bad:model --budget 1GB
advise own_bad:sized --budget 1GB
advise own_bad:sized --budget 1GB --effective-batch 0
advise own_bad:sized --budget 1GB --effective-batch x
advise own_bad:sized --budget 50% --effective-batch 4
"""


def rows(table, code):
    return [pytest.param(row, code, id=row) for row in table.split("\n") if row]


@pytest.mark.filterwarnings("ignore")  # torch's own, on sizes that make no sense
@pytest.mark.parametrize(("row", "code"), rows(ERRORS, 1) + rows(USAGE, 2))
def test_bad_arguments_are_told_in_one_line(folder, row, code):
    error = run(*words(row), code=code).stderr.splitlines()[-1]
    assert error.isprintable() and len(error) > len("error: ")


@pytest.mark.parametrize("target", ["exits", "exits_well", "exits_in_loss"])
def test_an_exit_of_the_users_code_is_told_with_its_place(folder, target):
    assert "own_bad.py:" in run("plan", f"own_bad:{target}", code=1).stderr


def test_a_text_of_several_lines_is_told_in_one(folder):
    assert "two lines" in run("plan", "own_bad:fails_in_forward", code=1).stderr.splitlines()[-1]


def test_an_interrupt_of_the_users_code_ends_the_command(folder):
    result = invoke("plan", "own_bad:interrupts")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.endswith("error: interrupted\n")


def test_prints_of_the_users_code_do_not_mix_with_results(folder):
    sys.modules.pop("own_bad", None)
    result = run("memory", "own_bad:model", "--json")
    assert json.loads(result.stdout)["peak_bytes"] > 0
    assert "at import" in result.stderr


def test_without_arguments_the_help_is_shown():
    result = invoke()
    assert (result.exit_code, result.stdout) == (2, "")
    for command in ("plan", "show", "frontier", "verify"):
        assert command in result.stderr


def test_inputs_in_text_take_no_memory_to_plan(folder):
    """A batch of 1.2 TB."""
    found = run("plan", "own_bad:alone", "--input", "input:float32[100000000000,3]")
    assert "1.20 TB" in found.stdout


def test_a_model_that_computes_its_positions_takes_longer_sequences():
    settings = ("num_hidden_layers=1", "hidden_size=32", "num_attention_heads=2",
                "num_key_value_heads=1", "intermediate_size=64", "vocab_size=100",
                "max_position_embeddings=16")
    options = [word for setting in settings for word in ("--set", setting)]
    run("memory", "hf:llama", *options, "--seq", "32")


def test_positions_that_a_model_leaves_free_are_not_counted():
    """RoBERTa's begin behind the padding."""
    options = ["--set", "num_hidden_layers=1", "--set", "hidden_size=16", "--set",
               "num_attention_heads=2", "--set", "vocab_size=100"]
    refused = run("memory", "hf:roberta", *options, "--seq", "511", code=2)
    assert "510 positions" in refused.stderr
    run("memory", "hf:roberta", *options)
