"""Built-in workloads: each model is a list of layers, each data source a pure function of its keys."""
