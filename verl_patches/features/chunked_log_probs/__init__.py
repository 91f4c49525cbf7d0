"""Log-probs and entropy of Megatron's training without whole logits."""
