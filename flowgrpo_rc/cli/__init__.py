"""Command line. Floor 6: parses, builds, calls."""
