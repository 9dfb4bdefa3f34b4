"""The hub: follows the log, matches each batch once, and hands shared bytes to every hearer."""
