"""Jobs: domains, the table of jobs, schedules, and the commands on them."""
