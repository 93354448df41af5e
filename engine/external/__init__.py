"""Jobs of other launchers: their progress, and their state as evidence."""
