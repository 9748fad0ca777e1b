"""Inductor's scheduler: changes to its kernels before and after it fuses them.

Imported only if a step is planned for or run by Inductor, as `inductor`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from planner._graph_capture.torch_compat.requirements import require

require(__name__)

from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

# Inductor caches only with a pass of this class.
_Pass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)


class SchedulerPass(_Pass):
    """A pass over the scheduler's nodes; it runs after the user's own pass."""

    setting: str
    """Name of its setting in `torch._inductor.config`."""

    def __init__(self) -> None:
        self._of_user = getattr(inductor_config, self.setting)

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Change the scheduler's nodes, which are in the order of execution; a pass that the user
        had set runs first."""
        return self._change(self._of_user(nodes) if self._of_user else nodes)

    @abstractmethod
    def _change(self, nodes: list[Any]) -> list[Any]:
        """The nodes that replace these."""

    @property
    @abstractmethod
    def _version(self) -> tuple[object, ...]:
        """Key of the pass in the compilation caches; must change with its code."""

    def uuid(self) -> tuple[object, ...] | None:
        """Key of this pass and the user's in the compilation caches; `None`, for no caching, if the
        user's is a plain function."""
        if self._of_user is None:
            return self._version
        if not isinstance(self._of_user, _Pass):
            return None
        return (*self._version, self._of_user.uuid())
