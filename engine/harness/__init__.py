"""Cases: a run with its faults, its fault-free twin and its verdict; single, many side by side, or in a running job."""
