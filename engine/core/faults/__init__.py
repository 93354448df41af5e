"""Faults: kinds, moments, victims, scenarios and matrices, and their text forms."""
