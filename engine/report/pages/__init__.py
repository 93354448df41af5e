"""HTML pages that open without a network, with their styles and scripts."""
