"""Leaving out the forward that recomputes old_log_prob, where that changes nothing."""
