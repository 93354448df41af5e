"""Turns the events of a run into tables and pages. Only this package imports pandas."""
