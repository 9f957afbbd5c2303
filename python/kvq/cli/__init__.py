"""The command line: one module a subcommand, which parses and prints; the work is done elsewhere."""
