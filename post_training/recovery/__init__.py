"""Starting a failed run again: why it failed, what the policy says of that, and when it is enough."""
