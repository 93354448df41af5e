"""Between the processes of a host: links, the control channel of a worker, events, the progress board."""
