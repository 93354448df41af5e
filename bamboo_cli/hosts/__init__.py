"""The commands of a host that works for a run that another command has started."""
