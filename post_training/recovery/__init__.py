"""Restart failed runs: find the cause, apply the policy, and decide when to give up."""
