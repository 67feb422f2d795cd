"""The commands of the command line, each calling what does the work."""
