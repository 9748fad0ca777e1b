"""The arguments of planning are stated once: every function that takes them has the same."""

import dataclasses
import inspect

import pytest
from torch import nn

import planner
from planner.api import capture
from planner.arguments.planning import PlanArguments, Planning
from planner.torch_compile_backend import read_options

TAKING = (planner.frontier, planner.max_batch_size, planner.max_sequence_length, planner.advise,
          capture)


def defaults(function):
    return {name: parameter.default for name, parameter
            in inspect.signature(function).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY}


def test_the_signature_of_plan_is_the_statement():
    stated = {field.name: field.default for field in dataclasses.fields(Planning)}
    own = {"budget_gb": None, "budget": None, "progress": None}
    assert defaults(planner.plan) == stated | own
    assert set(PlanArguments.__annotations__) == set(stated)
    for name in stated:
        assert f"        {name}: " in planner.plan.__doc__


@pytest.mark.parametrize("function", TAKING)
def test_all_others_show_the_same(function):
    stated = {field.name: field.default for field in dataclasses.fields(Planning)}
    if function is planner.advise:
        stated.pop("accumulation")
    if function not in (planner.frontier, capture):
        stated.pop("dynamic")
    assert stated.items() <= defaults(function).items()
    assert not any(parameter.kind is parameter.VAR_KEYWORD
                   for parameter in inspect.signature(function).parameters.values())


@pytest.mark.parametrize("function", TAKING)
def test_an_argument_that_there_is_not_is_told_with_those_that_there_are(function):
    needed = {"effective_batch": 2} if function is planner.advise else {}
    with pytest.raises(TypeError, match=r"argument 'optimzer'; known: .*optimizer"):
        function(None, None, optimzer="adamw", **needed)


def test_the_number_of_micro_steps_is_what_advise_looks_for():
    with pytest.raises(TypeError, match="unexpected keyword argument 'accumulation'"):
        planner.advise(None, None, effective_batch=2, accumulation=2)


def test_options_of_the_backend_are_those_that_no_graph_says():
    assert read_options({"gpu": "H100", "keep": ["aten.mm"]}).arguments["gpu"] == "H100"
    with pytest.raises(TypeError, match="no option 'loss_fn'"):
        read_options({"loss_fn": sum})


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"gpu": "H101"}, ValueError, "unknown gpu 'H101'; known: B200, "),
    ({"gpu": 100}, TypeError, "gpu must be the name"),
    ({"gpu": "H100"}, ValueError, "device='cuda'"),
    ({"backend": "jax"}, ValueError, "unknown backend 'jax'; known: eager, inductor"),
    ({"time_limit": "1"}, TypeError, "time_limit must be a number of seconds"),
    ({"accumulation": 1.5}, TypeError, "accumulation must be a whole number of micro-batches"),
    ({"keep": "a"}, TypeError, "for one name write keep="),
    ({"loss_fn": 3}, TypeError, "loss_fn must be a function of the model's output, got int"),
])
def test_what_is_wrong_in_itself_is_told(options, error, message):
    with pytest.raises(error, match=message):
        planner.plan(nn.Linear(2, 2), nn.Linear(2, 2).weight.detach(), **options)


def test_types_are_those_of_the_signature():
    for field in dataclasses.fields(Planning):
        assert field.type == inspect.signature(planner.plan).parameters[field.name].annotation


@pytest.mark.parametrize("regions", [3, [1, 2]])
def test_regions_that_are_no_names_are_told(regions):
    with pytest.raises(TypeError, match="a sequence of names of modules, got "):
        planner.plan(nn.Linear(2, 2), (), budget="60%", regions=regions)
