"""GSPO: one importance ratio for a whole response."""
