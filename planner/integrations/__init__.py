"""`planner.within` for trainers that call back: one module for each, which imports its library."""
