"""Routes that show what the server does: figures, subscribers, explanations, health; and the console."""
