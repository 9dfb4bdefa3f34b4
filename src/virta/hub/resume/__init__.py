"""Find the place where a consumer continues, and send it what it missed."""
