"""Ordinary modules, cut into layers: recorded while their forward runs, and run again piece by piece."""
