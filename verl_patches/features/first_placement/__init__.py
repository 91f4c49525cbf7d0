"""Prompts are dealt out to rollout engines by how long their answers were in the epoch before."""
