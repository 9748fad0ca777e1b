"""Under `fallback_random` Inductor draws torch's random numbers, and a plan draws them again: from
the generator's state of the first time, for the same numbers, with the generator left alone.

The oracles: plain PyTorch after the same seed, finite differences, the allocator's events.
"""


import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import nn

from planner._apply.planned_forward import apply_spec
from planner.api import capture
from planner.search.compiled_search import saved_buffers, schedule_saving, spec_for_inductor
from tests.support.compiler import needs_compiler
from tests.support.models import Case
from tests.support.training import measured_peak, train

pytestmark = [pytest.mark.compat, needs_compiler]

WIDTH = 32


class Attention(nn.Module):
    """A block of a transformer, with dropout where GPT-2 has it."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.norms[1](x)))), 0.1)


class ManyKinds(nn.Module):
    """Random ops of all kinds: Inductor runs some in place, and some take no tensor."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x):
        noises = (lambda y: F.alpha_dropout(y, 0.2, training=True), lambda y: F.dropout(y, 0.1),
                  lambda y: y * torch.rand_like(y), lambda y: F.dropout1d(y, 0.2),
                  lambda y: F.rrelu(y, training=True), lambda y: y * torch.randn(y.shape))
        for layer, noise in zip(self.layers, noises, strict=True):
            x = noise(layer(x).tanh())
        return x


def case_of(model):
    torch.manual_seed(0)
    return Case(model(), (torch.randn(4, 16, WIDTH),), lambda output: output.square().mean())


def compiled(case, keep):
    """The case, compiled with a schedule that saves those random results for the backward which
    `keep` names, and no others; its predicted peak; the names of what it runs again."""
    step = capture(case.model, case.inputs, loss_fn=case.loss_fn, backend="inductor")
    graph = step.base.graph
    saved = frozenset(
        b for b in saved_buffers(step.base, step.base.problem.keep_all_schedule)
        if graph.ops[graph.buffers[b].producer].replay_state_bytes
        and keep(graph.ops[graph.buffers[b].producer].target))
    spec = spec_for_inductor(step, step.base, schedule_saving(step.base, saved))
    again = {action.op for region in spec.regions for insertion in region.insertions
             for action in insertion.actions}
    random = {op.name for op in graph.ops if op.replay_state_bytes}
    peak = step.base.compiled.trace(spec).peak_bytes
    return apply_spec(case.model, spec), peak, random & again, random - again


def check(case, model, predicted_peak):
    """Two steps compute what the plain model does, draw as many numbers, and take what was
    predicted."""
    found, expected = train(model, case), train(case.model, case)
    assert found.distance(expected) <= 1e-6
    assert torch.equal(found.random_state, expected.random_state)
    assert measured_peak(model, case) == predicted_peak


@pytest.fixture
def numbers_of_eager():
    with inductor_config.patch(fallback_random=True):
        yield


def test_a_mask_is_drawn_again_and_gradients_are_those_of_eager(numbers_of_eager):
    case = case_of(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh()))
    model, peak, again, kept = compiled(case, lambda target: False)
    assert len(again) == 1 and not kept
    check(case, model, peak)
    # Finite differences along the gradient, with the masks of one seed.
    gradients = train(model, case, steps=1).gradients
    norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
    losses = []
    for offset in (1e-2, -1e-2):
        with torch.no_grad():
            for name, parameter in case.model.named_parameters():
                parameter.add_(gradients[name], alpha=offset / norm)
        losses.append(float(train(model, case, steps=1).outputs[-1]))
        with torch.no_grad():
            for name, parameter in case.model.named_parameters():
                parameter.sub_(gradients[name], alpha=offset / norm)
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(norm, rel=2e-2)


@pytest.mark.slow
def test_all_masks_of_a_transformer_are_drawn_again(numbers_of_eager):
    case = case_of(Attention)
    model, peak, again, kept = compiled(case, lambda target: False)
    assert len(again) == 3 and not kept
    check(case, model, peak)


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "number_kept"), [
    ((), 0), (("aten.randn.default", "aten.rand_like.default"), 2)], ids=["all", "some"])
def test_random_ops_of_all_kinds_run_again(numbers_of_eager, keep, number_kept):
    case = case_of(ManyKinds)
    model, peak, again, kept = compiled(case, lambda target: target in keep)
    assert len(again) == 6 - number_kept and len(kept) == number_kept
    check(case, model, peak)
