"""Runs on a bed of hosts that are broken: their agents, the strikes from outside, the case with its twin."""
