"""The rehearsal of the stack 2026 (docs/stacks.md); scripts/rehearse.sh starts it."""
