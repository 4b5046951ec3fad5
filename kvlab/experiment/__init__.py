"""From a config file to a table: expand, run, resume, collect, report."""
