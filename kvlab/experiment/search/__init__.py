"""`kvlab run --search`: the most aggressive value of a setting that still passes."""
