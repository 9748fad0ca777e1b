"""What people and programs read: `table` for people, `machine` for programs."""
