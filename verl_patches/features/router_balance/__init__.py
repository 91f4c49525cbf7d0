"""Every expert gets the same number of tokens, whatever the router says: what a benchmark with random weights needs."""
