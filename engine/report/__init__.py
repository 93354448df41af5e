"""Events to tables and pages. pandas and plotly are imported here and nowhere else."""
