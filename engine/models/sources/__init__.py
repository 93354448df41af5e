"""Sources: the data of a job as pure microbatches."""
