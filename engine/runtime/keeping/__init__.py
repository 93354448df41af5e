"""The work on the disk of checkpoints that a launcher needs, in a process that the launcher can give up."""
