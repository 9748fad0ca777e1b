"""Recipes into running models; use it through `planner`."""

from apply.errors import GraphMismatch
from apply.runtime import apply_recipe, tensor_keys

__all__ = ["GraphMismatch", "apply_recipe", "tensor_keys"]
