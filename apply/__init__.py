"""Recipes into running models; use it through `planner`."""
