"""Omission of the forward that recomputes old_log_prob, if that changes nothing."""
