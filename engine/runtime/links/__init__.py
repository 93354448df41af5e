"""Links: the connections of one worker to others, which outlive its epochs."""
