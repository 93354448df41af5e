"""Commands about the stock: the parts to choose from, the runs that are kept, the files to delete."""
