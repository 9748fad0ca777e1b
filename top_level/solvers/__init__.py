"""`import solvers`: the public names of `planner.solvers`, where nothing else has the name."""

from planner.solvers import *  # noqa: F403
