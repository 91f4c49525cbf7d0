"""Distribution of prompts among rollout engines by the lengths of their answers in the previous epoch."""
