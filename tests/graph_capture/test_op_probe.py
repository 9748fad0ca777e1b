"""Workspace of single ops against a direct measurement; the cache; the margins."""

from __future__ import annotations

import importlib
import itertools
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from planner._graph_capture.memory.allocator import record_peak, record_peak_of_op
from planner._graph_capture.op_costs import probe as op_probe
from planner._graph_capture.op_costs.headroom import ProbeHeadroom
from planner._graph_capture.op_costs.probe import (
    ENVIRONMENT_VARIABLE,
    OpCache,
    OpProbe,
    cache_directory,
    signature,
)

pytestmark = pytest.mark.compat

aten = torch.ops.aten
CONV = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def measured(target, *args, **kwargs) -> int:
    held = []
    with torch.no_grad():
        record = record_peak_of_op(lambda: held.append(target(*args, **kwargs)),
                                   torch.device("cpu"))
    return record.peak_bytes - record.end_bytes


def probed(probe: OpProbe, target, *args, **kwargs) -> int:
    """The probe sees fake tensors only, as it does in use."""
    with FakeTensorMode() as mode:
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda t: mode.from_tensor(t, static_shapes=True), (args, kwargs))
        return probe.workspace_bytes(target, args, kwargs, target(*args, **kwargs))


@pytest.fixture
def probe(tmp_path: Path) -> OpProbe:
    return OpProbe("cpu", directory=tmp_path)


def calls():
    x, q = torch.randn(4, 8, 12, 12), torch.randn(2, 4, 64, 16)
    weight, grad = torch.randn(16, 8, 3, 3), torch.randn(4, 16, 12, 12)
    rows = torch.randn(32, 48)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)
    yield "convolution", aten.convolution.default, (x, weight, None, *CONV)
    yield "its backward", aten.convolution_backward.default, (
        grad, x, weight, [16], *CONV, [True, True, True])
    yield "its weight only", aten.convolution_backward.default, (
        grad, x, weight, [16], *CONV, [False, True, False])
    yield "channels last", aten.convolution.default, (
        x.to(memory_format=torch.channels_last), weight, None, *CONV)
    yield "attention", aten._scaled_dot_product_flash_attention_for_cpu.default, (
        q, q, q, 0.0, True)
    yield "its gradient", aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (
        out, q, q, q, out, lse, 0.0, True)
    yield "softmax", aten._safe_softmax.default, (rows, -1)
    yield "transposed softmax", aten._softmax.default, (rows.t(), -1, False)
    yield "mixed dtypes", aten.add.Tensor, (rows, rows.bfloat16())
    yield "mask", aten.mul.Tensor, (rows, rows > 0)
    yield "mm", aten.mm.default, (rows, rows.t())
    yield "mm, strided", aten.mm.default, (rows[:, ::2], rows[:, 1::2].t())
    yield "mm, expanded", aten.mm.default, (rows[:1, :1].expand(8, 32), rows)
    yield "mm, bf16", aten.mm.default, (rows.bfloat16(), rows.bfloat16().t())
    yield "bmm, strided", aten.bmm.default, (q[0, :, :, ::2], q[0, :, :8, :])
    yield "addmm, f64", aten.addmm.default, (rows[0].double(), rows.double(),
                                             torch.randn(48, 48).double()[::1])
    yield "cumsum", aten.cumsum.default, (rows > 0, 1)
    yield "topk", aten.topk.default, (rows, 3)
    yield "layer norm", aten.native_layer_norm.default, (rows, [48], rows[0], rows[1], 1e-5)
    yield "norm of a view", aten.native_layer_norm.default, (
        rows.t(), [32], rows[:, 0].clone(), None, 1e-5)
    yield "in place", aten.add_.Tensor, (rows.clone(), rows.bfloat16())


@pytest.mark.parametrize(("target", "args"), [pytest.param(t, a, id=n) for n, t, a in calls()])
def test_workspace_is_what_the_op_allocates_beside_its_result(probe, target, args):
    assert probed(probe, target, *args) == measured(target, *args)
    assert not probe.assumed


POINTWISE_CALLS = [
    (aten.add.Tensor, 2), (aten.mul.Tensor, 2), (aten.div.Tensor, 2), (aten.maximum.default, 2),
    (aten.gt.Tensor, 2), (aten.gelu_backward.default, 2), (aten.silu_backward.default, 2),
    (aten.tanh_backward.default, 2), (aten.addcmul.default, 3), (aten.gelu.default, 1),
    (aten.relu.default, 1), (aten.silu.default, 1), (aten.tanh.default, 1), (aten.exp.default, 1),
    (aten.sigmoid.default, 1), (aten.rsqrt.default, 1), (aten.neg.default, 1),
    (aten.pow.Tensor_Scalar, 1)]


def layouts() -> tuple[torch.Tensor, ...]:
    return (torch.rand(6, 10) + 0.1, torch.rand(10, 6).t(), torch.rand(6, 20)[:, ::2],
            torch.rand(1, 10).expand(6, 10), torch.rand(10) + 0.1, torch.tensor(2.0))


@pytest.mark.parametrize(("target", "operands"), POINTWISE_CALLS, ids=lambda value: str(value))
def test_pointwise_ops_are_rightly_taken_as_free_or_measured(probe, target, operands):
    assert torch.Tag.pointwise in target.tags
    for tensors in itertools.product(layouts(), repeat=operands):
        if target.name().endswith("backward") and tensors[0].shape != tensors[1].shape:
            continue
        args = (*tensors, 2) if target is aten.pow.Tensor_Scalar else tensors
        assert probed(probe, target, *args) == measured(target, *args)


def test_other_free_ops_are_rightly_taken_as_free():
    for left, right in itertools.product(layouts()[:4], repeat=2):
        assert measured(aten.clone.default, left) == 0
        assert measured(aten.zeros_like.default, left) == 0
        assert measured(aten.set_.source_Tensor, torch.empty(0), left) == 0
        assert measured(aten.copy_.default, torch.empty(6, 10), right) == 0
        assert measured(aten.slice_backward.default, left, [6, 20], 1, 0, 20, 2) == 0
        assert measured(aten.select_backward.default, left, [6, 3, 10], 1, 0) == 0
    dense, target = torch.rand(6, 10), torch.zeros(6, dtype=torch.long)
    logs = aten._log_softmax.default(dense, 1, False)
    _, weight = aten.nll_loss_forward.default(logs, target, None, 1, -100)
    for call in (
            (aten._softmax.default, dense, 1, False), (aten._log_softmax.default, dense, 1, False),
            (aten._softmax.default, dense, 0, False), (aten._log_softmax.default, dense, 0, False),
            (aten._softmax_backward_data.default, dense, dense, 1, torch.float32),
            (aten._log_softmax_backward_data.default, dense, dense, 1, torch.float32),
            (aten.nll_loss_forward.default, logs, target, None, 1, -100),
            (aten.nll_loss_backward.default, torch.tensor(1.0), logs, target, None, 1, -100,
             weight),
            (aten.embedding.default, dense, target)):
        assert measured(call[0], *call[1:]) == 0, call[0]


def test_views_run_nothing(probe):
    probe._measure = None  # would fail if it were called
    for target, args in ((aten.t.default, (torch.ones(2, 3),)),
                         (aten.detach.default, (torch.ones(2),)),
                         (aten.expand.default, (torch.ones(1, 3), [4, 3]))):
        assert probed(probe, target, *args) == 0


def test_random_state_and_global_modes_are_untouched(probe):
    state = torch.get_rng_state()
    assert probed(probe, aten.native_dropout.default, torch.ones(64, 64), 0.5, True) == measured(
        aten.native_dropout.default, torch.ones(64, 64), 0.5, True)
    torch.set_rng_state(state)
    probed(OpProbe("cpu", directory=Path("/nonexistent")), aten.native_dropout.default,
           torch.ones(64, 64), 0.5, True)
    assert torch.equal(torch.get_rng_state(), state)


def test_second_process_measures_nothing(probe, tmp_path: Path, monkeypatch):
    call = (aten._safe_softmax.default, torch.randn(32, 48), -1)
    first = probed(probe, *call)
    monkeypatch.setattr(OpProbe, "_measure", None)
    monkeypatch.setattr(op_probe, "_read", {})
    assert probed(OpProbe("cpu", directory=tmp_path), *call) == first > 0


def test_damaged_cache_is_skipped(tmp_path: Path, monkeypatch):
    cache = OpCache("here", tmp_path)
    cache.put("a", 3)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes() + b'{"key": "torn", "val\n\xff\xfe[1]\n'
                     b'{"key": 1, "value": 2}\n'
                     b'{"key": "negative", "value": -1}\n{"key": "b"')
    OpCache("here", tmp_path).put("c", 4.5)
    monkeypatch.setattr(op_probe, "_read", {})  # as another process
    again = OpCache("here", tmp_path)
    assert [again.get(key) for key in ("a", "b", "c", "torn", "negative")] == [
        3, None, 4.5, None, None]
    assert OpCache("elsewhere", tmp_path).get("a") is None
    path.unlink()
    path.mkdir()  # neither readable nor writable as a file
    OpCache("here", tmp_path).put("d", 1)


def test_a_file_is_read_once_and_what_others_append_is_seen(tmp_path: Path, monkeypatch):
    OpCache("here", tmp_path).put("a", 3)
    (path,) = tmp_path.iterdir()
    parsed = []
    monkeypatch.setattr(op_probe.json, "loads", lambda line, of=op_probe.json.loads: (
        parsed.append(line), of(line))[1])
    OpCache("here", tmp_path)
    with path.open("ab") as file:
        file.write(b'{"key": "b", "value": 5}\n')
    again = OpCache("here", tmp_path)
    assert (again.get("a"), again.get("b")) == (3, 5)
    assert parsed.count(b'{"key": "a", "value": 3}') == 1


def test_cache_directory(monkeypatch, tmp_path: Path):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    assert cache_directory() is None
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    assert cache_directory().name == "checkpoint-planner"


def test_signature_tells_layouts_and_aliasing_apart():
    a, b = torch.ones(4, 4), torch.ones(4, 4)
    signatures = [signature(aten.add.Tensor, args, {}) for args in (
        (a, b), (a, a), (a, b.t().contiguous()), (a.t(), b), (a, b.double()), (a, 2), (a, 2.0))]
    assert signatures[0] == signatures[2]
    assert len(set(signatures)) == len(signatures) - 1


@pytest.mark.parametrize("reason", ["switched off", "no device", "too large"])
def test_margin_where_an_op_cannot_be_run(reason, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(op_probe, "free_bytes", lambda device: 1000)
    device = "cuda" if reason == "no device" and not torch.cuda.is_available() else "cpu"
    probe = OpProbe(device, probe=reason != "switched off", directory=tmp_path)
    x, weight = torch.randn(4, 8, 12, 12), torch.randn(16, 8, 3, 3)
    rounded = 4 * (4 * 8 * 144 + 16 * 8 * 9 + 4 * 16 * 144)
    assert probed(probe, aten.convolution.default, x, weight, None, *CONV) == rounded
    assert probed(probe, aten.cumsum.default, x, 0) == 0
    assert probe.assumed == {"aten.convolution.default", "aten.cumsum.default"}
    assert probe.seconds(aten.cumsum.default, (x, 0), {}, x) is None


def test_margin_after_an_error(probe):
    """Made-up values can be refused: a made-up integer is 0, which is no size of a window."""
    def run(*args, **kwargs):
        return probe.workspace_bytes(aten.index_select.default, *args, **kwargs)

    wrong = (torch.ones(3), 7, torch.zeros(1, dtype=torch.long))
    assert run(wrong, {}, torch.ones(1)) == 0
    assert probe.assumed == {"aten.index_select.default"}


def test_ops_of_others_are_never_run(probe):
    calls = []

    @torch.library.custom_op("checkpoint_planner_tests::spy", mutates_args=())
    def spy(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.clone()

    x = torch.ones(3)
    target = torch.ops.checkpoint_planner_tests.spy.default
    assert probe.workspace_bytes(target, (x,), {}, x.clone()) == 0
    assert not calls and probe.assumed == {"checkpoint_planner_tests.spy.default"}


def test_seconds_grow_with_the_work(probe):
    small, large = torch.randn(16, 16), torch.randn(512, 512)
    fast = probe.seconds(aten.mm.default, (small, small), {}, small)
    slow = probe.seconds(aten.mm.default, (large, large), {}, large)
    assert 0 < fast < slow
    assert probe.seconds(aten.mm.default, (large, large), {}, large) == slow


def test_a_kernel_that_writes_to_its_operands_sees_the_same_numbers_each_time(probe):
    seen = []

    def shrink(x):
        seen.append(x.clone())
        x.mul_(1e-3)

    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.randn(3, 5000), static_shapes=True)
    assert probe.seconds_of_function("shrink", lambda: shrink, (x,), {}) > 0
    assert len(seen) > 3
    assert all(torch.equal(numbers, seen[0]) for numbers in seen[1:])


def test_the_backward_of_an_lstm_is_measured_with_the_reserve_of_its_forward(probe):
    x, h = torch.randn(5, 2, 4), torch.randn(2, 3)
    weights = torch.randn(12, 4), torch.randn(12, 3), torch.randn(12), torch.randn(12)
    with torch.enable_grad():
        *_, reserve = aten.mkldnn_rnn_layer.default(
            x, *weights, h, h, False, [], 2, 3, 1, True, False, False, True)

    def args(reserve):
        return (x, *weights, h, h, torch.randn(5, 2, 3), h, h, torch.randn(5, 2, 3), None, None,
                False, 2, 3, 1, True, True, False, [], False, reserve)

    target = aten.mkldnn_rnn_layer_backward.default
    # A trace without data has a reserve that the kernel must not read.
    assert probed(probe, target, *args(torch.empty(0, dtype=torch.uint8))) == measured(
        target, *args(reserve)) > 0
    assert not probe.assumed


def test_an_op_that_ends_its_process_is_assumed_and_others_are_still_measured(
        probe, tmp_path, monkeypatch):
    # The child imports the module of the op's namespace.
    (tmp_path / "planner_test_ends.py").write_text("""
import os, torch
torch.library.define("planner_test_ends::ends", "(Tensor x) -> Tensor")
torch.library.impl("planner_test_ends::ends", "CPU", lambda x: os._exit(1))
torch.library.register_fake("planner_test_ends::ends", torch.empty_like)
""")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("planner_test_ends")
    assert probed(probe, torch.ops.planner_test_ends.ends.default, torch.randn(8)) == 0
    assert probe.assumed == {"planner_test_ends.ends.default"}
    values = torch.randn(64, 64)
    assert probed(probe, aten.linalg_lu_factor_ex.default, values) == measured(
        aten.linalg_lu_factor_ex.default, values)
    assert probe.assumed == {"planner_test_ends.ends.default"}


class Unreadable:
    """Its pickle is made, and cannot be read."""

    def __reduce__(self):
        return int, ("none",)


def test_what_runs_in_a_child_is_what_runs_here():
    from planner._graph_capture.joint_graph.low_peak_backward import REALIZED_COPY
    from planner._graph_capture.op_costs.isolated import IsolatedProbe, is_trusted

    child, here = IsolatedProbe(torch.device("cpu")), OpProbe("cpu", directory=None)
    x, weight = torch.randn(4, 8, 12, 12), torch.randn(16, 8, 3, 3)
    for target, args in [(aten.convolution.default, (x, weight, None, *CONV)),
                         (aten.sort.default, (x,)), (aten.linalg_qr.default, (x,))]:
        expected = here.run_alone(lambda target=target: target, args, {}, "workspace")
        assert child.measure(target, args, {}, "workspace") == expected is not None
    assert child.measure(aten.sort.default, (x,), {}, "seconds") > 0
    process = child._child
    library = torch.library.Library("tests_of_one_process", "DEF")
    library.define("doubled(Tensor x) -> Tensor")
    unknown = torch.ops.tests_of_one_process.doubled.default
    assert child.measure(unknown, (x,), {}, "workspace") is None
    assert child.measure(aten.sort.default, (x, Unreadable()), {}, "workspace") is None
    assert child._child is process is not None
    assert is_trusted(REALIZED_COPY)


def test_what_the_budget_has_no_room_for_is_measured_elsewhere(tmp_path):
    rows = torch.randn(256, 1024)
    expected = measured(aten.cumsum.default, rows.bool(), 1)
    asked = []

    def headroom() -> int:
        asked.append(True)
        return 300_000  # a MB of operands and results

    probe = OpProbe("cpu", directory=tmp_path, headroom=headroom)
    found = []
    peak = record_peak(lambda: found.append(
        probed(probe, aten.cumsum.default, rows.bool(), 1)), "cpu").peak_bytes
    assert found == [expected]
    assert not probe.assumed
    assert peak < 300_000
    assert asked


def test_room_is_what_the_budget_leaves_at_the_moment():
    held = [600]
    of_bytes = ProbeHeadroom(1000, lambda: held[0], resident_bytes=500).left(lambda: 1 // 0)
    of_share = ProbeHeadroom(Fraction(1, 2), lambda: held[0], resident_bytes=500).left(lambda: 1500)
    assert (of_bytes(), of_share()) == (400, 400)
    held[0] = 1200
    assert (of_bytes(), of_share()) == (0, 0)


def test_a_storage_is_described_by_its_size(monkeypatch):
    def text(storage: torch.UntypedStorage) -> str:
        raise AssertionError("the text of a storage has all its bytes")

    monkeypatch.setattr(torch.UntypedStorage, "__repr__", text)
    small, large = (signature(torch.ops.aten.set_.source_Storage,
                              (torch.empty(0), torch.empty(size).untyped_storage()), {})
                    for size in (4, 5))
    assert small != large
