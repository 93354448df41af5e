"""The order of the samples of a finite data set, and the ledger of a run: each sample once per pass."""
