"""Graphs that Dynamo traces anew at the second call; one compilation, and the step itself measured,
are the oracles."""

import pytest
import torch
from torch import nn

import planner
from planner._graph_capture.dynamo.captured_graphs import RepeatedGraphs
from planner.api import capture
from tests.support.compiler import needs_compiler
from tests.support.inductor import EFFORT, batch, budget_at, loss_of, measured_peak, step


class Noting(nn.Module):
    """Notes what it trains for at its first call, as the classification losses of transformers."""

    def __init__(self, *, alike: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(layer for _ in range(3) for layer in (
            nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))))
        self.kind: str | None = None
        self.alike = alike

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            self.kind = "regression"
            if not self.alike:
                x = x + 1
        return self.body(x)


@pytest.fixture
def compiled(monkeypatch):
    """Graphs that were given to a compiler."""
    seen = []
    init = RepeatedGraphs.__init__

    def noting(self, backend, running):
        init(self, lambda module, inputs: seen.append(module) or backend(module, inputs), running)

    monkeypatch.setattr(RepeatedGraphs, "__init__", noting)
    return seen


@pytest.mark.parametrize("backend", [
    "eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
@pytest.mark.parametrize("alike", [True, False])
def test_a_graph_that_is_traced_again_is_compiled_once(backend, alike, compiled):
    capture(Noting(alike=alike), batch(), loss_fn=loss_of, backend=backend)
    assert len(compiled) == (1 if alike else 2)


@pytest.mark.parametrize("backend", [
    "eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_its_plan_is_kept(backend):
    model = Noting()
    prepared = capture(model, batch(), loss_fn=loss_of, backend=backend)
    default = planner.plan(model, batch(), loss_fn=loss_of, backend=backend)
    budget = budget_at(prepared, default, 0.7)
    plan = planner.plan(model, batch(), loss_fn=loss_of, backend=backend, budget=budget,
                        time_limit=EFFORT.time_limit)
    assert plan.peak_bytes <= budget
    assert model.kind is None
    plain = step(Noting())
    applied = plan.apply(model)
    assert measured_peak(applied) + plan.resident_bytes == plan.peak_bytes
    torch.testing.assert_close(step(applied), plain)


def test_other_parameters_constants_and_layouts_are_other_graphs():
    made = []

    def backend(module, inputs):
        made.append(module)
        return lambda *args: args

    weights = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]

    def graph(constant=1.0):
        graph = torch.fx.Graph()
        x, weight = graph.placeholder("x"), graph.placeholder("weight")
        root = nn.Module()
        root.register_buffer("constant", torch.tensor(constant))
        graph.output(graph.call_function(torch.addmm, (graph.get_attr("constant"), x, weight)))
        return torch.fx.GraphModule(root, graph)

    x, shared = torch.ones(2, 2), graph()
    repeated = RepeatedGraphs(backend, lambda: "")
    first = repeated(shared, [x, weights[0]])
    assert repeated(graph(2.0), [x, weights[0]]) is not first
    repeated.are_expected = True
    assert repeated(shared, [torch.zeros(2, 2), weights[0]]) is first
    for module, inputs in ((shared, [x, weights[1]]), (graph(), [x, weights[0]]),
                           (shared, [x.t(), weights[0]]), (shared, [x.double(), weights[0]]),
                           (shared, [x.clone().requires_grad_(), weights[0]])):
        before = len(made)
        assert repeated(module, inputs) is not first
        assert len(made) == before + 1 or inputs[0].t().is_contiguous()
    with torch.no_grad():
        assert repeated(shared, [x, weights[0]]) is not first


def test_which_of_two_parts_of_the_model_is_traced_again_is_not_guessed():
    repeated = RepeatedGraphs(lambda module, inputs: lambda *args: args, lambda: "")
    graph = torch.fx.symbolic_trace(lambda x: x.sin())
    parts = [repeated(graph, [torch.ones(2)]) for _ in range(2)]
    assert parts[0] is not parts[1]
    repeated.are_expected = True
    assert repeated(graph, [torch.ones(2)]) not in parts


class ThroughAnother(nn.Module):
    """Its graph breaks in a function that its forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(3))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def test_captures_leave_no_code_to_torch_compile():
    """torch runs what it has of any backend once it has compiled code as often as it may."""
    x, model = torch.randn(16, 32), ThroughAnother()
    want = [model(x).item()] * 3
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(3):
            planner.plan(ThroughAnother(), x, regions="blocks")
        compiled = torch.compile(model, backend="eager")
        assert [compiled(x).item() for _ in range(3)] == want
