"""Rewrite specs into running models; use it through `planner`."""
