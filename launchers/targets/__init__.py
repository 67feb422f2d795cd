"""Where a job runs: each target renders a file that its engine takes, and knows how to hand it over."""
