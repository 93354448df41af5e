"""The evidence of a run as values: chains of records, the seal over the files, and the verdict on the weights."""
