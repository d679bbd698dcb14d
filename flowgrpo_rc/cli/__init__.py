"""Command line. The top floor: parses, builds, calls."""
