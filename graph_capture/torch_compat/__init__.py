"""The only access to private torch APIs; `requirements` lists them.

Names in these modules are not covered by torch's compatibility promise; nothing else in the product
touches a private name of torch.  The package offers the public names of the modules imported here.
"""

from planner._graph_capture.torch_compat.requirements import require

for _module in ("compilation", "dispatch", "fake_kernels", "foreign_calls", "joint_inputs",
                "kept_numbers", "memory", "optimizers", "plain_code", "recurrent", "symbols",
                "varying_numbers"):
    require(_module)

import planner._graph_capture.torch_compat.fake_kernels  # noqa: F401  puts fake kernels right
from planner._graph_capture.torch_compat.compilation import *
from planner._graph_capture.torch_compat.double_backward import *
from planner._graph_capture.torch_compat.foreign_calls import *
from planner._graph_capture.torch_compat.joint_inputs import *
from planner._graph_capture.torch_compat.kept_numbers import *
from planner._graph_capture.torch_compat.memory import *
from planner._graph_capture.torch_compat.optimizers import *
from planner._graph_capture.torch_compat.plain_code import *
from planner._graph_capture.torch_compat.symbols import *
from planner._graph_capture.torch_compat.varying_numbers import *
