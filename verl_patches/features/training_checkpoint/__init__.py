"""Training checkpoints: a resumed run continues bit for bit under the same layout, and can change its layout."""
