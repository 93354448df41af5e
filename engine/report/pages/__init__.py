"""Pages: HTML that opens without a network, with its styles and scripts."""
