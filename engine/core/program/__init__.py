"""Programs: the needs and products of actions, the passes that build a program, dry run and verification."""
