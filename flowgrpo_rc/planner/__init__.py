"""Memory and time of a configuration, planned from configuration files alone. Floor 5."""
