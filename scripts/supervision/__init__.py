"""Parts of scripts/supervise.py: what the launcher would start, and on which nodes it goes on."""
