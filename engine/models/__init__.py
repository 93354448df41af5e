"""Workloads: a model is a list of layers, a data source is a pure function of its keys."""
