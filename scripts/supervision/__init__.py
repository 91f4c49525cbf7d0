"""Parts of scripts/supervise.py: the run and its starts, the causes of failures, restarts, and the choice of nodes."""
