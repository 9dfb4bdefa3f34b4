"""What keeps a server healthy: figures over time, retention."""
