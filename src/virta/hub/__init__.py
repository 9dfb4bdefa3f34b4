"""Follow the log, match each batch of events once, and send shared bytes to every subscriber."""
