"""The command line: each command parses, makes one call, prints, exits."""
