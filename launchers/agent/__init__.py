"""The processes of a job on this machine: started, watched, and what they leave when they fail."""
