"""The features that patches of the stack 2026 belong to."""
