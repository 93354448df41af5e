"""Cases: a run with its faults, its twin and its verdict; matrices, several hosts, hosts to break, host checks."""
