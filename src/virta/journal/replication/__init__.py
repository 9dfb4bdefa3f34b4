"""Copies on other daemons: links, messages, and the merge of states."""
