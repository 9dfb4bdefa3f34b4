"""Start Spark: find Java, configure the session, prepare its Python workers."""
