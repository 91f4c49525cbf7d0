"""Parts of scripts/supervise.py: the run and its starts, why one failed, what follows, and on which nodes."""
