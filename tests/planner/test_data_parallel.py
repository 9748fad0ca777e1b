"""The arithmetic of data parallelism: closed forms, torch's own buckets, and real runs."""


import pytest
import torch
import torch.distributed as dist
from torch import nn

import planner
from planner.api import capture
from planner.ranks.data_parallel import RankCategories
from planner.step.rank_layout import assign_buckets, partition, unit_names

pytestmark = pytest.mark.compat

WIDTH, LAYERS, BATCH = 64, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x


def mean_square(output):
    return output.square().mean()


def bytes_of(module):
    return sum(p.numel() * p.element_size() for p in module.parameters())


MODEL = Stack()
WHOLE, BLOCK = bytes_of(MODEL), bytes_of(MODEL.blocks[0])


def look(kind, ranks=2, optimizer=None, model=MODEL, **settings):
    return planner.data_parallel(
        model, torch.empty(BATCH, WIDTH, device="meta"), loss_fn=mean_square, optimizer=optimizer,
        parallel=planner.DataParallel(kind, ranks, **settings))


def test_ddp_holds_every_gradient_twice_unless_they_are_views_of_the_buckets():
    plain = capture(MODEL, torch.empty(BATCH, WIDTH), loss_fn=mean_square, optimizer="adamw")
    twice = look("ddp", optimizer="adamw")
    assert twice.peak_bytes == pytest.approx(plain.baseline_peak_bytes + WHOLE, abs=64)
    assert sum(twice.bucket_bytes) == WHOLE == twice.memory["communication"]
    once = look("ddp", optimizer="adamw", gradient_as_bucket_view=True)
    assert once.memory["communication"] == 0 and once.memory["gradients"] == WHOLE
    assert once.resident_bytes == twice.resident_bytes
    assert once.peak_bytes == twice.peak_bytes - WHOLE


def test_the_categories_sum_to_the_peak():
    for kind in ("ddp", "zero1", "zero2", "zero3"):
        for optimizer in (None, "sgd", "adamw"):
            report = look(kind, optimizer=optimizer)
            assert list(report.memory) == list(RankCategories())
            assert sum(report.memory.values()) == report.peak_bytes >= report.resident_bytes
            assert report.peak_bytes == max(report.forward_backward_peak_bytes,
                                            report.optimizer_step_peak_bytes)


def test_each_stage_shares_more_of_the_state():
    reports = {kind: look(kind, 4, optimizer="adamw") for kind in ("ddp", "zero1", "zero3")}
    scalars = 2 * LAYERS * 2 * 4 + 4  # AdamW counts steps in a scalar for each parameter
    for kind, share in (("ddp", 1), ("zero1", 4), ("zero3", 4)):
        state = reports[kind].memory["optimizer"]
        assert 2 * WHOLE / share <= state <= 2 * WHOLE / share * 1.2 + scalars, kind
    assert reports["zero3"].memory["parameters"] == WHOLE // 4
    assert reports["zero1"].memory["parameters"] == WHOLE


def test_resharding_holds_no_more_than_two_units_and_the_root():
    kept, resharded = look("zero2", 4), look("zero3", 4)
    root = bytes_of(MODEL.entry)
    assert kept.memory["unsharded_parameters"] >= WHOLE - BLOCK
    assert resharded.memory["unsharded_parameters"] <= BLOCK + root
    held = (resharded.memory["unsharded_parameters"] + resharded.memory["communication"])
    assert BLOCK <= held <= 5 * BLOCK + root  # gathered ahead, copied by gloo, being reduced
    assert resharded.peak_bytes < kept.peak_bytes
    assert resharded.units == (*((f"blocks.{i}", BLOCK) for i in range(LAYERS)), ("", root))
    assert look("fsdp2", 4).to_dict()["memory"] == resharded.to_dict()["memory"]


def test_one_unit_gathers_everything_at_once():
    report = look("zero3", units=())
    assert report.units == (("", WHOLE),)
    # The gradients are copied into the buffer that is reduced, and gloo copies that.
    assert report.memory["communication"] == 2 * WHOLE


def test_uneven_shards_are_padded():
    odd = nn.Linear(WIDTH, 7)
    report = look("zero3", 4, model=odd)
    assert report.memory["parameters"] == 2 * (WIDTH + 1) * 4  # 2 of 7 rows


def test_frozen_parameters_have_no_gradient_and_no_bucket():
    model = Stack()
    model.blocks[0].requires_grad_(False)
    assert sum(look("ddp", model=model).bucket_bytes) == WHOLE - BLOCK
    assert look("zero3", model=model).memory["parameters"] == WHOLE // 2


def test_an_optimizer_instance_keeps_its_groups_and_settings():
    model = Stack()
    heavy = torch.optim.SGD([{"params": model.blocks.parameters(), "momentum": 0.9},
                             {"params": model.entry.parameters()}], lr=0.1)
    for kind, share in (("ddp", 1), ("zero3", 2)):
        state = look(kind, model=model, optimizer=heavy).memory["optimizer"]
        assert state == LAYERS * BLOCK // share
    assert not heavy.state


def test_an_optimizer_whose_parameters_are_offloaded_takes_nothing_of_the_device():
    arguments = {"loss_fn": mean_square, "optimizer": "adamw", "device": "cuda", "probe": False,
                 "parallel": planner.DataParallel("fsdp2", 2, offloads=True)}
    inputs = torch.empty(BATCH, WIDTH, device="meta")
    assert planner.data_parallel(MODEL, inputs, **arguments).memory["optimizer"] == 0
    steady = planner.memory(MODEL, inputs, **arguments).steady
    assert all(each.memory["optimizer"] == 0 for each in steady.phases)


@pytest.mark.parametrize("cap_mb", [None, 0.05, 1, 25])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.float64)])
def test_buckets_are_those_of_torch(cap_mb, dtypes):
    sizes = [3, 200_000, 10, 4_000_000, 300_000, 7, 150_000, 9_000_000, 20_000]
    tensors = [torch.empty(size, dtype=dtypes[i % len(dtypes)]) for i, size in enumerate(sizes)]
    limits = [2 ** 20, 25 * 2 ** 20] if cap_mb is None else [int(cap_mb * 2 ** 20)]
    backwards = tensors[::-1]
    indices, _ = dist._compute_bucket_assignment_by_size(
        backwards, limits, [False] * len(tensors))
    expected = [sum(backwards[i].nbytes for i in bucket) for bucket in indices]
    assert sorted(assign_buckets(tensors, cap_mb)) == sorted(expected)


def test_zero1_deals_out_whole_parameters():
    parameters = [torch.empty(size) for size in (5, 9, 3, 7, 1)]
    parts = partition(parameters, 2)
    assert sorted(sum(p.numel() for p in part) for part in parts) == [12, 13]


def test_units_by_name():
    assert unit_names(MODEL, None) == tuple((f"blocks.{i}",) for i in range(LAYERS))
    assert unit_names(MODEL, ("blocks.*.first",)) == tuple(
        (f"blocks.{i}.first",) for i in range(LAYERS))
    assert unit_names(MODEL, ("blocks.0", ("blocks.1.*", "blocks.2"))) == (
        ("blocks.0",), ("blocks.1.first", "blocks.1.second", "blocks.2"))
    with pytest.raises(ValueError, match=r"layers\.\*"):
        look("zero3", units=("layers.*",))
    with pytest.raises(ValueError, match=r"'blocks\.0' is in two units"):
        look("fsdp2", units=("blocks.0", ("blocks.0", "blocks.1")))
    with pytest.raises(ValueError, match=r"kept_units: 'blocks\.0' names no unit"):
        look("fsdp2", units=("blocks.1",), kept_units=("blocks.0",))


def test_the_report():
    assert "4 ranks under ddp" in str(look("ddp", 4)) and "bucket" in str(look("ddp", 4))
    text = str(look("zero3", 4))
    assert "unsharded parameters" in text and "no optimizer was given" in text


@pytest.mark.parametrize(("settings", "error", "message"), [
    ({"kind": "ddp3", "ranks": 2}, ValueError, "known: ddp"),
    ({"kind": "ddp", "ranks": 1}, ValueError, "at least 2"),
    ({"kind": "ddp", "ranks": 2.0}, TypeError, "whole number"),
    ({"kind": "zero3", "ranks": 2, "gradient_as_bucket_view": True}, ValueError, "no buckets"),
    ({"kind": "ddp", "ranks": 2, "units": ("blocks.*",)}, ValueError, "whole model"),
    ({"kind": "zero3", "ranks": 2, "units": "blocks.*"}, TypeError, "tuple of names"),
    ({"kind": "zero3", "ranks": 2, "reshard_after_forward": True}, ValueError, "fsdp2"),
    ({"kind": "zero3", "ranks": 2, "kept_units": ("blocks.0",)}, ValueError, "fsdp2"),
    ({"kind": "fsdp2", "ranks": 2, "kept_units": "blocks.0"}, TypeError, "tuple of names"),
    ({"kind": "ddp", "ranks": 2, "bucket_cap_mb": 0}, ValueError, "bucket_cap_mb"),
])
def test_settings_that_do_not_belong_together(settings, error, message):
    with pytest.raises(error, match=message):
        planner.DataParallel(**settings)


def test_wrong_arguments_are_told():
    with pytest.raises(TypeError, match=r"planner\.DataParallel"):
        planner.data_parallel(MODEL, torch.empty(2, WIDTH), parallel="ddp")
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        planner.data_parallel(3, parallel=planner.DataParallel("ddp", 2))
    with pytest.raises(planner.CaptureError):
        look("ddp", model=Stack().requires_grad_(False))
    with pytest.raises(ValueError, match="no_such_optimizer"):
        look("ddp", optimizer="no_such_optimizer")
