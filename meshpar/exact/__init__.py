"""Keep a loop equal to one process: the door around forward, backward and step, and what ranks compare there."""
