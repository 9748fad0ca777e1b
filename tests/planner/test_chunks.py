"""`allow="chunk"`: a loss head, and the wide insides of layers, run in chunks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import planner
from planner import api
from planner._apply.errors import PlanMismatch
from planner._apply.outputs import OutputNotMade
from planner._graph_capture import capture as graph_capture
from planner.api import capture
from planner.arguments import planning
from planner.arguments.planning import Planning
from planner.plans.file import dumps, load, loads
from planner.sizes.sized_steps import SizedSteps
from tests.support.loss_head import (
    ALLOW,
    BATCH,
    LENGTH,
    LOSSES,
    VOCAB,
    WIDTH,
    Head,
    HeadBehindBlocks,
    batch,
    distance,
    gradients,
    peak_of,
)
from tests.support.models import gpt2, llama
from tests.support.training import apply_schedule, random_schedule


@pytest.fixture
def few_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four chunks alone, as there is a whole graph for each number that is tried."""
    monkeypatch.setattr(planning, "CHUNKS_OF", ((4, 4), (4, 1)))
    monkeypatch.setattr(api, "MOST_CHUNKS", ((4, 4), (4, 1)))


@pytest.mark.parametrize(("loss", "output"), [
    pytest.param(loss, output, marks=pytest.mark.slow if (number + 3 * order) % 6 else ())
    for number, loss in enumerate(LOSSES) for order, output in enumerate(("held", "dropped"))])
def test_gradients_and_peaks_in_pieces(loss, output):
    model, inputs = Head(loss, bias=loss in ("sum", "gather")), batch()
    step = capture(model, inputs, allow=ALLOW, hold_output=output == "held")
    variants = [variant for variant in step.variants if variant.chunks > 1]
    assert [variant.chunks for variant in variants] == [4, 8, 16, 64]
    plain = copy.deepcopy(model)
    for variant in variants[:2]:
        schedules = [variant.problem.keep_all_schedule]
        if output == "dropped":  # logits that are held are best not made again
            schedules.append(random_schedule(variant.problem, 0, 0.5))
        for schedule in schedules:
            planned, timeline = apply_schedule(
                type("Of", (), {"model": model, "inputs": inputs}), step, schedule, variant)
            assert distance(gradients(planned, inputs), gradients(plain, inputs)) < 1e-6
            assert peak_of(planned, inputs, held=output == "held") == timeline.peak_bytes
    for scale in (0.25, 1 / 3):  # of micro-batches that add up
        assert distance(gradients(planned, inputs, scale), gradients(plain, inputs, scale)) < 1e-6


def test_more_pieces_than_rows_are_one_for_each_row():
    step = capture(Head(), {key: value[:1, :5] for key, value in batch().items()}, allow=ALLOW)
    names = [
        op.name for op in step.variants[-1].graph.ops if op.target.startswith("aten._log_soft")
    ]
    assert len(names) == 2 * 5 == len(set(names))


@pytest.mark.slow
@pytest.mark.usefixtures("few_chunks")
def test_logits_that_are_dropped_are_not_made():
    """And say so when they are read; those that are held are the same as ever."""
    model, inputs = Head(), batch()
    logits_bytes = 4 * BATCH * LENGTH * VOCAB
    least = {}
    for output in ("held", "dropped"):
        with pytest.raises(planner.InfeasibleBudget) as refused:
            planner.plan(model, inputs, budget=1, hold_output=output == "held")
        (allow, least[output]), = refused.value.alternatives.items()
        assert allow == ALLOW and f"{least[output]:,} bytes would do" in str(refused.value)
        plan = planner.plan(model, inputs, budget=least[output], hold_output=output == "held",
                            allow=ALLOW)
        torch.manual_seed(0)
        found = plan.apply(copy.deepcopy(model))(**inputs)["logits"]
        if output == "held":
            torch.manual_seed(0)
            assert torch.equal(found, model(**inputs)["logits"])
        else:
            assert found.shape == (BATCH, LENGTH, VOCAB) and found.dtype == torch.float32
            assert found.float().detach().half().dtype == torch.float16
            with pytest.raises(OutputNotMade, match=r"shape \(3, 11, 700\).*hold_output=True"):
                found.argmax(-1)
    assert least["held"] - least["dropped"] > 0.9 * logits_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("few_chunks")
@pytest.mark.parametrize("is_read", [False, True])
def test_logits_behind_blocks_are_not_made_unless_other_code_reads_them(is_read):
    inputs = batch()
    model = Behind(HeadBehindBlocks()) if is_read else HeadBehindBlocks()
    refusals = {}
    for output in ("dropped",) if is_read else ("held", "dropped"):
        with pytest.raises(planner.InfeasibleBudget) as refused:
            planner.plan(model, inputs, budget=1, hold_output=output == "held", allow=ALLOW,
                         regions="blocks")
        refusals[output] = refused.value.minimum_bytes
    plan = planner.plan(model, inputs, budget=refusals["dropped"], hold_output=False,
                        allow=ALLOW, regions="blocks")
    plain, planned = copy.deepcopy(model), plan.apply(copy.deepcopy(model))
    assert distance(gradients(planned, inputs), gradients(plain, inputs)) < 1e-6
    if is_read:
        largest = []
        for each in (plain, planned):
            torch.manual_seed(2)
            largest.append(each(**inputs)["largest"])
        assert largest[0] == largest[1]
        return
    assert refusals["held"] - refusals["dropped"] > 0.9 * 4 * BATCH * LENGTH * VOCAB
    assert peak_of(planned, inputs, held=False) == plan.peak_bytes - plan.resident_bytes
    with pytest.raises(OutputNotMade):
        planned(**inputs)["logits"].argmax(-1)


class Behind(nn.Module):
    """Reads the logits of a model in code that is not compiled."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        output = self.model(**batch)
        torch._dynamo.graph_break()
        return {"loss": output["loss"], "largest": _largest(output["logits"])}


@torch._dynamo.disable
def _largest(logits):
    return logits.detach().amax()


@pytest.mark.slow
def test_a_refusal_captures_once_and_searches_its_alternative_less(monkeypatch):
    recorded = []
    record = graph_capture.record_training_step
    monkeypatch.setattr(graph_capture, "record_training_step",
                        lambda *args, **options: recorded.append(1) or record(*args, **options))
    with pytest.raises(planner.InfeasibleBudget) as refused:
        planner.plan(Head(), batch(), budget=1)
    assert refused.value.alternatives and len(recorded) == 1
    with pytest.raises(planner.InfeasibleBudget) as least:
        planner.plan(Head(), batch(), budget=1, allow=ALLOW)
    assert least.value.minimum_bytes <= refused.value.alternatives[ALLOW]


def test_a_plan_in_pieces_is_saved_and_serves_smaller_inputs(tmp_path):
    model, inputs = Head(), batch()
    with pytest.raises(planner.InfeasibleBudget) as refused:
        planner.plan(model, inputs, budget=1, allow=ALLOW)
    assert refused.value.alternatives == {}
    plan = planner.plan(model, inputs, budget=refused.value.minimum_bytes, allow=ALLOW)
    assert plan.spec.chunks > 1 and any("chunks" in note for note in plan.notes)
    plan.save(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == plan
    planned = load(tmp_path / "plan.json").apply(model)
    smaller = {key: value[:2] for key, value in inputs.items()}
    for given in (inputs, smaller):
        assert distance(gradients(planned, given), gradients(copy.deepcopy(model), given)) < 1e-6


def test_within_may_run_pieces():
    inputs = batch()
    plain = gradients(Head(), inputs)
    with pytest.raises(planner.InfeasibleBudget) as refused:
        planner.plan(Head(), inputs, budget=1, allow=ALLOW)
    model = planner.within(Head(), refused.value.minimum_bytes + 4096, allow=ALLOW)
    for _ in range(3):
        torch.manual_seed(2)
        model.zero_grad()
        output = model(**inputs)  # which is held
        output["loss"].backward()
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert distance(found, plain) < 1e-6
        del found, output  # the loop holds neither in the next step
    assert planner.plan_of(model).spec.chunks > 1
    assert planner.steps_of(model).planned == 3


def test_half_precision_scales_the_loss_first():
    """Gradients in float16 are made of the scaled loss: unscaled, they might be too small."""
    model, inputs = Head("sum").half(), batch()
    step = capture(model, inputs, allow=ALLOW)
    variant = step.variants[1]
    forward = [op for op in variant.graph.ops if op.target == "aten.nll_loss_backward.default"]
    assert variant.chunks == 4 and len(forward) == 4
    assert all(op.phase.value == "backward" for op in forward)


class Mlps(nn.Module):
    """MLPs, plain and gated, the residual stream around them, and a loss head or none."""

    def __init__(self, is_gated: bool, has_head: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(3)) if (
            is_gated) else [None] * 3
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, VOCAB) if has_head else None

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for gate, up, down, norm in zip(self.gates, self.ups, self.downs, self.norms, strict=True):
            inside = up(norm(hidden))
            inside = F.gelu(inside) if gate is None else F.silu(gate(norm(hidden))) * inside
            hidden = hidden + self.drop(down(inside))
        return {"loss": hidden.pow(2).mean() if self.head is None else F.cross_entropy(
            self.head(hidden).view(-1, VOCAB), labels.view(-1))}


@pytest.mark.parametrize(("is_gated", "has_head"), [
    (False, False), pytest.param(True, True, marks=pytest.mark.slow)])
def test_the_insides_of_layers_in_pieces(is_gated, has_head):
    """Of all three layers, beside a loss head or none."""
    model = Mlps(is_gated, has_head)
    inputs = {"hidden": torch.randn(4, 64, WIDTH), "labels": torch.randint(VOCAB, (4, 64))}
    step = capture(model, inputs, allow=ALLOW, hold_output=False)
    variant = next(variant for variant in step.variants if variant.inner_chunks > 1)
    assert len(step.variants) == (6 if has_head else 2)
    runs = [op for op in variant.graph.ops if op.target == "aten.addmm.default"
            and op.phase.value == "forward" and ".ups." in f".{op.name}"]
    assert len(runs) == 3 * 4
    plain = copy.deepcopy(model)
    planned, timeline = apply_schedule(
        type("Of", (), {"model": model, "inputs": inputs}), step,
        random_schedule(variant.problem, 0, 0.5), variant)
    assert distance(gradients(planned, inputs), gradients(plain, inputs)) < 1e-6
    measured = peak_of(planned, inputs, held=False)
    assert measured <= timeline.peak_bytes <= 1.01 * measured
    floors = {variant.inner_chunks: variant.floor_bytes for variant in step.variants[:2]}
    assert floors[4] < 0.8 * floors[1]


@pytest.mark.slow
@pytest.mark.usefixtures("few_chunks")
def test_what_only_the_backward_needs_of_a_layer_is_made_there():
    """With a vocabulary narrower than the MLPs, whose GELU is written out, there is no loss head
    that would hold forward and backward together."""
    case = gpt2(batch=2, seq=32, vocab=100)
    step = capture(case.model, case.inputs, allow=ALLOW)
    variant = step.variants[1]
    assert variant.inner_chunks == 4
    cubes = [op for op in variant.graph.ops if op.target == "aten.pow.Tensor_Scalar"]
    layers = len(case.model.transformer.h)
    assert [op.phase.value for op in cubes].count("backward") == 4 * layers == len(cubes) / 2
    with pytest.raises(planner.InfeasibleBudget):
        planner.plan(case.model, case.inputs, budget="1kB")


class Attention(nn.Module):
    """Attention of two layers, each op by itself, with something added to the scores, of which
    gradients may be wanted."""

    def __init__(self, added: torch.Tensor, learned: bool, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.added = nn.Parameter(added, requires_grad=learned)
        self.ins = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.outs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        for into, out in zip(self.ins, self.outs, strict=True):
            queries, keys, values = (each.unflatten(2, (self.heads, -1)).transpose(1, 2)
                                     for each in into(hidden).chunk(3, 2))
            scores = queries @ keys.transpose(2, 3) / 3 + self.added
            found = scores.softmax(3) @ values
            hidden = hidden + out(found.transpose(1, 2).flatten(2))
        return {"loss": hidden.pow(2).mean()}


@pytest.mark.parametrize(("batch", "heads", "shape", "learned"), [
    (3, 4, (1, 4), True), *(
        pytest.param(*row, marks=pytest.mark.slow)
        for row in ((3, 4, (3, 1), False), (3, 4, (1, 1), False), (1, 1, (1, 1), False)))])
def test_attention_in_pieces(batch, heads, shape, learned):
    """With masks of each sequence or of all, and with a learned bias of each head."""
    torch.manual_seed(1)
    length = 10 * WIDTH
    added = torch.randn(*shape, length, length)
    if not learned:
        added = added.masked_fill(torch.ones(length, length).triu(1).bool(), -1e9)
    model = Attention(added, learned, heads)
    inputs = {"hidden": torch.randn(batch, length, WIDTH)}
    step = capture(model, inputs, allow=ALLOW, hold_output=False)
    whole, variant = step.variants
    assert variant.inner_chunks == 4
    products = [op.phase.value for op in variant.graph.ops if "bmm" in op.target]
    assert products.count("forward") == 2 * 2 * 4 and products.count("backward") == 2 * 4 * 4
    plain = copy.deepcopy(model)
    for schedule in (variant.problem.keep_all_schedule, random_schedule(variant.problem, 0, 0.5)):
        planned, timeline = apply_schedule(
            type("Of", (), {"model": model, "inputs": inputs}), step, schedule, variant)
        assert distance(gradients(planned, inputs), gradients(plain, inputs)) < 1e-6
        assert peak_of(planned, inputs, held=False) == timeline.peak_bytes
    of_scores = 4 * batch * heads * length * length
    assert whole.floor_bytes - variant.floor_bytes > of_scores


@pytest.mark.parametrize(("length", "dropout"), [(10 * WIDTH, 0.1), (8, 0.0)])
def test_attention_that_stays_whole(length, dropout):
    """Where random numbers are drawn inside of it, and where nothing is wide."""
    model = nn.MultiheadAttention(WIDTH, 4, dropout, batch_first=True)
    hidden = torch.randn(2, length, WIDTH)
    inputs = {"query": hidden, "key": hidden, "value": hidden}
    step = capture(model, inputs, loss_fn=lambda output: output[0].pow(2).mean(), allow=ALLOW)
    assert len(step.variants) == 1


def plan_that_takes_less(case):
    """A plan in chunks that takes much less than the smallest without."""
    with pytest.raises(planner.InfeasibleBudget) as refused:
        planner.plan(case.model, case.inputs, budget=1, hold_output=False)
    in_chunks = refused.value.alternatives[ALLOW]
    assert in_chunks < 0.6 * refused.value.minimum_bytes
    return planner.plan(case.model, case.inputs, budget=in_chunks, hold_output=False,
                        allow=ALLOW, time_limit=1)


@pytest.mark.slow
@pytest.mark.usefixtures("few_chunks")
def test_attention_of_transformers_takes_less():
    """Where it is not fused, and the scores outweigh all else."""
    case = llama(layers=1, batch=4, seq=256, width=32, vocab=100)
    case.model.set_attn_implementation("eager")
    plan = plan_that_takes_less(case)
    planned = plan.apply(copy.deepcopy(case.model))
    assert distance(gradients(planned, case.inputs), gradients(case.model, case.inputs)) < 1e-6
    assert planner.verify(case.model, plan, case.inputs).ok


@pytest.mark.slow
@pytest.mark.usefixtures("few_chunks")
def test_a_plan_with_attention_in_pieces_serves_shorter_sequences():
    """As long as attention is wide in them; where it is not, its ops are others."""
    case = gpt2(layers=1, batch=3, seq=256, width=32, vocab=100, dropout=0.0)
    case.model.set_attn_implementation("eager")
    plan = planner.plan(case.model, case.inputs, budget="60%", allow=ALLOW, time_limit=1)
    assert plan.spec.inner_chunks > 1
    planned = plan.apply(copy.deepcopy(case.model))
    for rows, length in ((3, 256), (2, 256), (3, 101)):
        inputs = {name: value[:rows, :length] for name, value in case.inputs.items()}
        assert distance(gradients(planned, inputs), gradients(case.model, inputs)) < 1e-6
    with pytest.raises(PlanMismatch):
        planned(**{name: value[:, :9] for name, value in case.inputs.items()})


@pytest.mark.slow
@pytest.mark.usefixtures("few_chunks")
def test_a_model_of_transformers_takes_less():
    case = gpt2(layers=1, batch=4, seq=64, vocab=4096)
    plan = plan_that_takes_less(case)
    assert planner.verify(case.model, plan, case.inputs).ok


@pytest.mark.slow
@pytest.mark.usefixtures("few_chunks")
def test_inductor_compiles_chunks():
    """What a loss makes of its targets, as wide as the logits, is made in chunks too."""
    model, inputs = Head("smooth"), batch()
    model.drop.p = 0.0  # Inductor draws other numbers
    arguments = {"backend": "inductor", "hold_output": False}
    least_bytes = []
    for allow in ((), ALLOW):
        with pytest.raises(planner.InfeasibleBudget) as caught:
            planner.plan(model, inputs, budget=1, allow=allow, **arguments)
        least_bytes.append(caught.value.minimum_bytes)
    assert least_bytes[1] < least_bytes[0]
    made = planner.plan(model, inputs, budget=least_bytes[1], allow=ALLOW, **arguments)
    plan = loads(dumps(made))
    assert plan == made and plan.spec.chunks > 1
    plain = copy.deepcopy(model)
    planned = plan.apply(model)
    assert distance(gradients(planned, inputs), gradients(plain, inputs)) < 1e-6
    assert plan.resident_bytes + peak_of(planned, inputs, held=False) == plan.peak_bytes


def test_choices_are_checked():
    model, inputs = Head(), batch()
    with pytest.raises(ValueError, match="unknown choice in allow 'fuse'; known: recompute, chunk"):
        planner.plan(model, inputs, allow=("recompute", "fuse"))
    with pytest.raises(TypeError, match='allow must be "chunk", "offload" or a sequence'):
        planner.plan(model, inputs, allow=3)
    for written in ("chunk", ("chunk",), ["recompute", "chunk", "chunk"]):
        assert Planning(allow=written).allow == ("chunk",)


def test_the_plain_step_of_a_size_is_captured_without_pieces():
    """For the largest batch, chunks are made only where a plan is looked for."""
    def made(count: int) -> dict[str, torch.Tensor]:
        return {"ids": torch.zeros(count, LENGTH, dtype=torch.long),
                "labels": torch.zeros(count, LENGTH, dtype=torch.long)}

    steps = SizedSteps(Head(), made, Planning(allow=ALLOW, hold_output=False), what="batch")
    plain = steps.plain_at(2)
    assert max(variant.chunks for variant in plain.variants) == 1
    whole = steps.at(2)
    assert max(variant.chunks for variant in whole.variants) > 1
    assert steps.plain_at(2) is whole is steps.at(2) and list(steps.captured) == [2]
    assert plain.baseline_peak_bytes == whole.baseline_peak_bytes
