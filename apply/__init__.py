"""Rewrite specs into running models; used through `planner`."""
