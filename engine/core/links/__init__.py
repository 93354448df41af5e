"""Links between workers: frames and the messages of which they are pieces; pure."""
