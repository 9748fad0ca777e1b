"""Reports: `table` for people, `machine` for programs."""
