"""What Inductor's partitioner would save; the two graphs that it makes of a joint graph are the
oracle."""

import pytest
import torch._functorch.config as functorch_config
from torch import fx

from planner._graph_capture.joint_graph.pipeline import saved_by_default
from planner.api import capture
from tests.support.compiler import needs_compiler
from tests.support.models import BUILDERS
from tests.support.training import SIZES

pytestmark = [pytest.mark.compat, needs_compiler]


@pytest.mark.parametrize("name", [
    "dropout_everywhere", *(pytest.param(name, marks=pytest.mark.slow)
                            for name in ("llama", "unet", "gpt2", "t5", "many_outputs"))])
def test_it_is_what_crosses_between_its_graphs(name, monkeypatch):
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    checked = []

    def compared(joint):
        num_outputs = len(joint.forward_outputs)
        with functorch_config.patch(activation_memory_budget=1.0):
            forward, _ = min_cut_rematerialization_partition(
                joint.copy(), (), compiler="inductor", num_fwd_outputs=num_outputs)
        returned = forward.graph.output_node().args[0]
        found = saved_by_default(joint)
        checked.append(found)
        assert found == {node.name for node in returned[num_outputs:] if isinstance(node, fx.Node)}
        return found

    monkeypatch.setattr("planner._graph_capture.joint_graph.pipeline.saved_by_default", compared)
    case = BUILDERS[name](**SIZES.get(name, {}))
    capture(case.model, case.inputs, loss_fn=case.loss_fn, backend="inductor")
    assert checked and all(checked)
