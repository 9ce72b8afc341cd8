"""Libraries on disk: their keys, and how they are kept, found, loaded and removed."""
