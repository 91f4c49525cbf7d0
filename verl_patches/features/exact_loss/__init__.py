"""A loss that does not depend on how a batch is cut."""
