"""A whole run: its command line, joining, all steps, what is told of them, ending together."""
