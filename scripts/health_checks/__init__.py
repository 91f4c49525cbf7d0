"""Health checks of a node and a cluster before a job starts; each finding names its remedy."""
