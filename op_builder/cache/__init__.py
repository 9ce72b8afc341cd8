"""Libraries on disk: what decides their keys, how they are kept, found, loaded and removed."""
