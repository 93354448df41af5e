"""The history of a run: its records, their lines, their chain and seal, the state that they add up to; hosts as one."""
