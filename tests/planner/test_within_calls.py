"""`planner.within` in loops whose step is more than one call: the budget is that of the step."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import types
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner._graph_capture.memory.allocator import heap_bytes
from planner._graph_capture.training_graph import HELD_IN_FORWARD
from tests.support.stages import record_stages

STEPS = 4
Loop = Callable[[nn.Module], Callable[[], torch.Tensor]]


def layers(seed: int = 0, depth: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
                           for _ in range(depth)])


def nbytes(*models: nn.Module) -> int:
    return sum(p.nbytes for model in models for p in model.parameters())


def run(net: nn.Module, loop: Loop, outside_bytes: int = 0) -> tuple[list[float], list[int]]:
    """Losses, and the peak of each step, with the parameters and what the loop holds."""
    step = loop(net)
    losses = []

    def one(number: int) -> None:
        torch.manual_seed(number)
        losses.append(step().item())

    records = record_stages([lambda number=number: one(number) for number in range(STEPS)])
    return losses, [nbytes(net) + outside_bytes + record.peak_bytes for record in records]


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01)


def pairs(net: nn.Module, rows: int = 256) -> Callable[[], torch.Tensor]:
    """A contrastive loss of two calls, the first with so many rows."""
    optimizer = sgd(net)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        scores = net(torch.randn(rows, 32)) @ net(torch.randn(256, 32)).T
        loss = F.cross_entropy(scores, torch.arange(rows))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def in_order(zero_grad: str) -> Loop:
    def loop(net: nn.Module) -> Callable[[], torch.Tensor]:
        optimizer = sgd(net)

        def step() -> torch.Tensor:
            loss = net(torch.randn(256, 32)).square().mean()
            if zero_grad == "before backward":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if zero_grad == "last":
                optimizer.zero_grad()
            return loss.detach()

        return step

    return loop


@pytest.mark.parametrize(("budget", "rows"), [
    ("70%", 256), ("70%", 64), pytest.param(2_700_000, 256, marks=pytest.mark.slow)])
def test_calls_that_hold_memory_at_once_share_the_budget(budget, rows):
    losses, peaks = run(layers(), partial(pairs, rows=rows))
    net = planner.within(layers(), budget, time_limit=1)
    found, measured = run(net, partial(pairs, rows=rows))
    plan, status = planner.plan_of(net), planner.status(net)
    assert found == losses
    assert plan.recompute_flops > 0
    assert max(measured[2:]) <= plan.budget_bytes < max(peaks)
    assert plan.peak_bytes == pytest.approx(measured[-1], rel=0.03)
    assert plan.baseline_peak_bytes == pytest.approx(peaks[-1], rel=0.03)
    assert plan.memory.activations > plan.optimizer.state_bytes
    assert (status.steps, status.planned_steps, status.calls) == (STEPS, STEPS, 2 * STEPS)


def crops(net: nn.Module) -> Callable[[], torch.Tensor]:
    """Two large and four small views of the same images, before one backward."""
    optimizer = sgd(net)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        views = [net(torch.randn(rows, 32)).mean(0) for rows in (256, 256, 64, 64, 64, 64)]
        loss = torch.stack(views).var(0).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.slow
def test_calls_of_two_sizes_that_hold_memory_at_once():
    losses, peaks = run(layers(), crops)
    net = planner.within(layers(), "80%", time_limit=1)
    found, measured = run(net, crops)
    assert found == losses
    assert max(measured[2:]) <= 0.8 * max(peaks)
    assert planner.status(net).plan.baseline_peak_bytes == pytest.approx(peaks[-1], rel=0.03)


def narrowing() -> nn.Module:
    """Layers whose schedule of the smallest peak saves far more than their input."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for wide, narrow in [(8, 128), (128, 64), (64, 32)] for layer in (
        nn.Linear(wide, narrow), nn.BatchNorm1d(narrow), nn.ReLU(inplace=True))])


@pytest.mark.slow
def test_calls_save_less_than_their_smallest_peak_would_have_them():
    def triplets(net: nn.Module) -> Callable[[], torch.Tensor]:
        optimizer = sgd(net)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.triplet_margin_loss(*(net(torch.randn(1024, 8)) for _ in range(3)))
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    losses, peaks = run(narrowing(), triplets)
    net = planner.within(narrowing(), "65%")
    found, measured = run(net, triplets)
    assert found == losses
    assert max(measured[2:]) <= planner.plan_of(net).budget_bytes < 0.67 * max(peaks)
    assert planner.status(net).planned_steps == STEPS


@pytest.mark.parametrize("zero_grad", ["before backward", "last"])
def test_gradients_count_where_a_backward_begins(zero_grad):
    losses, peaks = run(layers(), in_order(zero_grad))
    net = planner.within(layers(), "85%", time_limit=1)
    found, measured = run(net, in_order(zero_grad))
    plan = planner.plan_of(net)
    assert found == losses
    assert plan.baseline_peak_bytes == pytest.approx(max(peaks[1:]), rel=0.01)
    assert max(measured[2:]) <= plan.budget_bytes
    assert not net.forward.graphs[0].known.accumulates


@pytest.mark.parametrize("loss_of", [lambda y: y.square().mean(), lambda y: F.cross_entropy(
    y, y.detach().softmax(1))])
def test_gradients_that_the_forward_alone_meets_are_part_of_the_step(loss_of):
    """The plan uses its budget to the byte that is measured, though the gradients are as large as
    half of the activations."""
    def loop(net: nn.Module) -> Callable[[], torch.Tensor]:
        optimizer = sgd(net)

        def step() -> torch.Tensor:
            loss = loss_of(net(torch.randn(64, 32)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    losses, peaks = run(layers(), loop)
    net = planner.within(layers(), "80%", time_limit=1)
    found, measured = run(net, loop)
    plan = planner.plan_of(net)
    assert found == losses
    assert plan.recompute_flops > 0
    assert plan.baseline_peak_bytes == pytest.approx(max(peaks[1:]), rel=0.01)
    assert max(measured[2:]) <= plan.budget_bytes
    assert plan.peak_bytes == pytest.approx(measured[-1], rel=0.002)
    assert any(op.name == HELD_IN_FORWARD for op in plan.spec.ops)


def stays_plain_but_for_memory(loop: Loop, outside_bytes: int = 0, *, budget: str = "80%",
                               rel: float = 0.01) -> tuple[planner.Plan, list[int]]:
    """Run the loop plain and within the budget; return the plan, and the peak of each step within
    it.  `rel`: tolerance of the plain peak."""
    losses, peaks = run(layers(), loop, outside_bytes)
    net = planner.within(layers(), budget, time_limit=1)
    found, measured = run(net, loop, outside_bytes)
    plan = planner.plan_of(net)
    assert found == losses
    assert plan.baseline_peak_bytes == pytest.approx(peaks[-1], rel=rel)
    return plan, measured


def test_what_the_loop_holds_beside_the_model_counts():
    def loop(net: nn.Module) -> Callable[[], torch.Tensor]:
        optimizer, reference, memory = sgd(net), layers(1), torch.zeros(50_000)

        def step() -> torch.Tensor:
            inputs, targets = torch.randn(256, 32), torch.randn(256, 32)
            with torch.no_grad():
                targets += reference(inputs) + memory[0]
            loss = F.mse_loss(net(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    plan, measured = stays_plain_but_for_memory(loop, nbytes(layers()) + 200_000)
    assert max(measured[2:]) <= plan.budget_bytes
    assert plan.peak_bytes == pytest.approx(measured[-1], rel=0.01)


def test_what_an_earlier_loop_has_used_does_not_count():
    def first_baseline(teacher: nn.Module) -> int:
        net = planner.within(layers(), "95%", time_limit=1)
        optimizer, inputs = sgd(net), torch.randn(256, 32)
        output = net(inputs)
        with torch.no_grad():
            targets = teacher(inputs)
        F.mse_loss(output, targets).backward()
        optimizer.step()
        return planner.plan_of(net).baseline_peak_bytes

    teacher = nn.Sequential(nn.Linear(32, 1024), nn.Tanh(), nn.Linear(1024, 32))
    alone = first_baseline(nn.Identity())
    first_baseline(teacher)
    assert first_baseline(nn.Identity()) == alone


def test_batches_from_before_count_while_they_are_used():
    batches = [(torch.randn(256, 32), torch.randn(256, 32)) for _ in range(14)]
    net = planner.within(layers(), "80%", time_limit=1)
    optimizer, seen = sgd(net), []
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.l1_loss(net(inputs), targets).backward()
        optimizer.step()
        status = planner.status(net)
        seen.append((status.plans, status.budget_bytes))
    assert len({*seen[5:]}) == 1


def test_batches_that_stay_alive_count():
    def loop(net: nn.Module) -> Callable[[], torch.Tensor]:
        optimizer, batches = sgd(net), [torch.randn(256, 32) for _ in range(STEPS)]
        ahead = iter(batches)

        def step() -> torch.Tensor:
            loss = net(next(ahead)).square().mean() + 0 * batches[0].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    plan, measured = stays_plain_but_for_memory(loop, outside_bytes=STEPS * 256 * 32 * 4)
    assert max(measured[1:]) <= plan.budget_bytes


def test_models_of_one_step_share_its_budget():
    def loop(net: nn.Module) -> Callable[[], torch.Tensor]:
        maker, evaluate = net
        optimizers = sgd(maker), sgd(evaluate)

        def step() -> torch.Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            made = maker(torch.randn(256, 32))
            loss = sum(evaluate(x).square().mean() for x in (made, torch.randn(256, 32)))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            return loss.detach()

        return step

    losses, peaks = run(nn.ModuleList([layers(0), layers(1)]), loop)
    models = nn.ModuleList([layers(0), layers(1)])
    budget = int(0.75 * max(peaks))
    for net in models:
        planner.within(net, budget, time_limit=1)
    found, measured = run(models, loop)
    assert found == losses
    assert max(measured[2:]) <= budget < max(peaks)


@pytest.mark.slow
def test_a_model_leaves_room_to_another_that_is_called_before_its_backward():
    def loop(net: nn.Module) -> Callable[[], torch.Tensor]:
        maker, judge = net
        optimizers = sgd(maker), sgd(judge)

        def step() -> torch.Tensor:
            made = maker(torch.randn(256, 32))
            recon, goal = made.square().mean(), -judge(made).square().mean()
            ratio = [torch.autograd.grad(each, maker[15][2].weight, retain_graph=True)[0].norm()
                     for each in (recon, goal)]
            loss = recon + (ratio[0] / ratio[1]).detach() * goal
            optimizers[0].zero_grad()
            loss.backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            judge(made.detach()).square().mean().backward()
            optimizers[1].step()
            return loss.detach()

        return step

    def models() -> nn.ModuleList:
        return nn.ModuleList([layers(depth=16), nn.Sequential(nn.Linear(32, 64))])

    losses, peaks = run(models(), loop)
    net = models()
    for each in net:
        planner.within(each, "65%", time_limit=1)
    found, measured = run(net, loop)
    plan = planner.plan_of(net[0])
    assert found == losses
    assert max(measured[2:]) <= plan.budget_bytes
    assert plan.budget_bytes == pytest.approx(0.65 * max(peaks), rel=0.1)
    assert not net[0].forward.graphs[0].is_lean and plan.overhead < 0.25


def test_hooks_of_saved_tensors_do_not_reach_what_a_plan_saves():
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    net = planner.within(layers(), "90%", time_limit=1, loss_fn=lambda out: out.square().mean())
    inputs, optimizer = torch.randn(64, 32), sgd(net)
    for _ in range(2):  # From then on its plan does not change.
        net(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with (pytest.warns(UserWarning, match="saved-tensor hooks"),
          torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)):
        loss = net(inputs).square().mean()
    assert packed == [torch.Size([64, 32])]
    loss.backward()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = layers()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def test_training_by_another_method_is_said_at_once():
    net = planner.within(Encoder(), "80%")
    optimizer = sgd(net)
    with pytest.warns(UserWarning, match="forward was not called") as said:
        for _ in range(2):
            optimizer.zero_grad()
            net.encode(torch.randn(8, 32)).mean().backward()
            optimizer.step()
    assert len(said) == 1
    status = planner.status(net)
    assert (status.steps, status.planned_steps, status.calls) == (2, 0, 0)
    assert "forward was not called" in status.last_reason
    assert status.last_reason in str(status)


@pytest.mark.slow
@pytest.mark.parametrize("as_before", [0, 2])
def test_a_forward_that_replaces_the_planned_one_is_planned(as_before):
    """A trainer that adds a loss head of its own to the model it is given."""

    def train(net: nn.Module) -> tuple[list[float], list[int]]:
        optimizer, losses = sgd(net), []

        def step(**options: bool) -> None:
            loss = net(torch.randn(256, 32), **options).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

        torch.manual_seed(0)
        for _ in range(as_before):
            step()
        original = net.forward

        def forward(self: nn.Module, x: torch.Tensor, *, halves: bool = False) -> torch.Tensor:
            if not halves:
                return original(x)
            for block in self:
                x = 0.5 * block(x)
            return x

        net.forward = types.MethodType(forward, net)
        records = record_stages([partial(step, halves=True)] * 4 + [step] * 2)
        return losses, [record.peak_bytes for record in records[1:]]

    expected, plain = train(layers())
    net = planner.within(layers(), "70%", time_limit=1)
    with pytest.warns(UserWarning, match="was replaced after planner.within") as said:
        losses, peaks = train(net)
    assert len(said) == 1
    assert losses == expected
    assert max(peaks) <= 0.75 * max(plain)
    status = planner.status(net)
    assert (status.steps, status.planned_steps, status.calls) == (
        6 + as_before, 5 + as_before, 5 + as_before)
    assert max(peaks) + nbytes(net) <= status.budget_bytes
    assert copy.deepcopy(net)(torch.randn(8, 32)).shape == (8, 32)


def test_planning_throws_no_dice():
    net = planner.within(layers(), "90%", time_limit=1)
    net.register_forward_pre_hook(lambda *_: random.random() and None)
    random.seed(3)
    expected = [random.random() for _ in range(2)]
    random.seed(3)
    net(torch.randn(8, 32)).mean().backward()
    assert random.random() == expected[1]


def test_status_is_for_models_within_a_budget():
    with pytest.raises(ValueError, match=r"planner\.within was not called"):
        planner.status(layers())


def adversaries(discriminator: nn.Module) -> Callable[[], torch.Tensor]:
    """A discriminator that is trained on two calls, then called once more for its generator."""
    generator = planner.within(layers(1), "90%", time_limit=1) if hasattr(
        discriminator.forward, "graphs") else layers(1)
    optimizers = sgd(discriminator), sgd(generator)

    def step() -> torch.Tensor:
        noise, real = torch.randn(128, 32), torch.randn(128, 32)
        optimizers[0].zero_grad()
        loss = (F.softplus(-discriminator(real)).mean()
                + F.softplus(discriminator(generator(noise).detach())).mean())
        loss.backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        F.softplus(-discriminator(generator(noise))).mean().backward()
        optimizers[1].step()
        return loss.detach()

    return step


@pytest.mark.slow
def test_a_percentage_is_of_the_whole_step_of_two_models():
    losses, peaks = run(layers(), adversaries)
    net = planner.within(layers(), "90%", time_limit=1)
    found, measured = run(net, adversaries)
    assert found == pytest.approx(losses, rel=1e-6)
    generator_bytes = nbytes(layers())  # `run` counts the other model alone
    budgets = {graph.plan.budget_bytes for graph in net.forward.graphs}
    assert max(budgets) <= 1.01 * min(budgets)
    assert max(measured[2:]) + generator_bytes <= min(budgets)
    assert min(budgets) == pytest.approx(0.9 * (max(peaks[1:]) + generator_bytes), rel=0.05)


def images(generates: bool) -> nn.Module:
    """The generator or the discriminator of a DCGAN."""
    torch.manual_seed(generates)
    if generates:
        return nn.Sequential(
            nn.Linear(16, 1024), nn.Unflatten(1, (64, 4, 4)), nn.BatchNorm2d(64), nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh())
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(.2), nn.Conv2d(16, 32, 4, 2, 1),
        nn.BatchNorm2d(32), nn.LeakyReLU(.2), nn.Conv2d(32, 64, 4, 2, 1), nn.BatchNorm2d(64),
        nn.LeakyReLU(.2), nn.Flatten(), nn.Linear(1024, 1))


def dcgan(discriminator: nn.Module) -> Callable[[], torch.Tensor]:
    generator = images(generates=True)
    if hasattr(discriminator.forward, "graphs"):
        planner.within(generator, "75%", time_limit=1)
    optimizers = sgd(generator), sgd(discriminator)

    def step() -> torch.Tensor:
        real, noise = torch.randn(64, 3, 32, 32), torch.randn(64, 16)
        loss = F.softplus(-discriminator(generator(noise))).mean()
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        loss = (F.softplus(-discriminator(real)).mean()
                + F.softplus(discriminator(generator(noise).detach())).mean())
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        return loss.detach()

    return step


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_calls_that_need_more_make_others_keep_less():
    losses, peaks = run(images(generates=False), dcgan)
    found, measured = run(planner.within(images(generates=False), "75%", time_limit=1), dcgan)
    assert found == losses
    other_bytes = nbytes(images(generates=True))
    assert max(measured[2:]) + other_bytes <= 0.75 * (max(peaks) + other_bytes)


def test_what_breaks_a_budget_is_said_once_and_planned_for(caplog):
    def loop(net: nn.Module) -> Callable[[], torch.Tensor]:
        optimizer, numbers = sgd(net), iter(range(STEPS))

        def step() -> torch.Tensor:
            outputs = net(torch.randn(256, 32))
            grown = torch.zeros(50_000 * (next(numbers) >= 2))
            loss = outputs.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach() + grown.sum()

        return step

    net = planner.within(layers(), 1_500_000, time_limit=1)
    _, measured = run(net, loop)
    status = planner.status(net)
    assert measured[1] <= status.budget_bytes < measured[2]
    assert measured[3] <= status.budget_bytes
    assert status.worst_peak_bytes == pytest.approx(measured[2], rel=0.01)
    said, = [record.getMessage() for record in caplog.records if "exceeded" in record.getMessage()]
    assert "predicted 1.4" in said
    assert "measured 1.6" in said
    assert "the next step is planned with it" in said


def test_a_second_backward_through_a_graph_adds_to_the_gradients_of_the_first():
    def loop(net: nn.Module) -> Callable[[], torch.Tensor]:
        optimizer = sgd(net)

        def step() -> torch.Tensor:
            output = net(torch.randn(256, 32))
            loss = output.sin().mean()
            loss.backward(retain_graph=True)
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    plan, measured = stays_plain_but_for_memory(loop, budget="85%", rel=0.05)
    assert max(measured[2:]) <= plan.budget_bytes


@pytest.mark.skipif(heap_bytes() is None, reason="the C library does not tell of its heap")
def test_what_the_loop_begins_to_hold_late_is_planned_for(caplog):
    net = planner.within(layers(), 1_500_000, time_limit=1)
    optimizer, held, plans = sgd(net), [], []

    def step(number: int) -> None:
        if number == 10:
            held.append(torch.zeros(40_000))  # such as averaged weights
        torch.manual_seed(number)
        net(torch.randn(256, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plans.append(planner.status(net).plans)

    records = record_stages([partial(step, number) for number in range(13)])
    peaks = [nbytes(net) + each.peak_bytes for each in records]
    assert peaks[9] + 160_000 > 1_500_000
    assert max(peaks) <= 1_500_000
    assert plans[3] == plans[9] == plans[10] - 1 == plans[12] - 1
    assert not [each for each in caplog.records if "exceeded" in each.getMessage()]


@pytest.mark.parametrize("named", [True, False])
def test_another_method_than_forward_is_planned(named):
    def loop(net: nn.Module) -> Callable[[], torch.Tensor]:
        optimizer = sgd(net)

        def step() -> torch.Tensor:
            loss = net.encode(torch.randn(256, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    losses, peaks = run(Encoder(), loop)
    net = planner.within(Encoder(), "80%", time_limit=1,
                         methods=("forward", "encode") if named else ("forward",))
    with contextlib.nullcontext() if named else pytest.warns(UserWarning, match="not called"):
        found, measured = run(net, loop)
    status = planner.status(net)
    assert found == losses
    assert max(measured[2:]) <= status.budget_bytes < max(peaks)
    assert (status.steps, status.planned_steps) == (STEPS, STEPS if named else 2)
    copied = pickle.loads(pickle.dumps(net))
    assert copied.encode.model is copied
    assert list(copied.state_dict()) == list(Encoder().state_dict())


def test_methods_are_checked():
    with pytest.raises(ValueError, match="Encoder has no method 'embed'"):
        planner.within(Encoder(), methods=("embed",))
    with pytest.raises(TypeError, match="methods must be a tuple of names"):
        planner.within(Encoder(), methods="encode")


def test_models_with_a_shared_body_take_turns():
    """What the other's call leaves in the body is no step of a model that was not called; the
    warning would be an error."""
    body = layers()
    heads = [nn.Sequential(body, nn.Linear(32, width)) for width in (8, 4)]
    optimizer = torch.optim.SGD({*heads[0].parameters(), *heads[1].parameters()}, lr=0.01)
    for head in heads:
        planner.within(head, "80%", time_limit=1)
    for number in range(6):
        heads[number % 2](torch.randn(256, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [planner.status(head).planned_steps for head in heads] == [3, 3]
    assert [planner.status(head).steps for head in heads] == [3, 3]


def test_what_a_step_allocated_unforeseen_is_counted_once():
    """The parameters of the decoder, which were there before the loop, are found to be used."""
    def with_decoder(net: nn.Module, decoder: nn.Module) -> Callable[[], torch.Tensor]:
        optimizers = [torch.optim.AdamW(each.parameters(), 1e-3) for each in (net, decoder)]

        def step() -> torch.Tensor:
            loss = decoder(net(torch.randn(256, 32))).square().mean()
            loss.backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
            return loss

        return step

    plain = layers()
    _, peaks = run(plain, partial(with_decoder, decoder=layers(1)), outside_bytes=nbytes(plain))
    decoder = layers(1)
    net = planner.within(layers(), "75%", time_limit=1)
    run(net, partial(with_decoder, decoder=decoder))
    found = planner.status(net).plan.baseline_peak_bytes
    assert abs(found - peaks[-1]) < 0.01 * peaks[-1]
