"""Reports of plans and predictions, for people."""
