"""A running journal: the commit loop, TCP, HTTP and the embedded journal."""
