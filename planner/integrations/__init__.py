"""`planner.within` as trainer callbacks: one module per trainer, which imports its library."""
