"""Move records between a log and files of other systems. Only the command line imports this package."""
