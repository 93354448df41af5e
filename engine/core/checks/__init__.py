"""The judgement of a run: expectations, trajectories, and recoveries read off its events."""
