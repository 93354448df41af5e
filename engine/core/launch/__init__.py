"""Runs on several hosts as files for Slurm, Kubernetes, Ray and ssh, which place one agent on each host."""
