"""Links between workers: what travels, and what is done with it; pure."""
