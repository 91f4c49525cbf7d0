"""One importance ratio for a whole response."""
