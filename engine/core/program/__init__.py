"""Programs: schedules, passes, dry run, verification; after a failure inventories, the planner and the ballot."""
