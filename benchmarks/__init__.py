"""One script per claim about speed; each prints a table and writes its numbers to results/."""
