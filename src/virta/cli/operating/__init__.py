"""Commands for operators: backup, restore, top."""
