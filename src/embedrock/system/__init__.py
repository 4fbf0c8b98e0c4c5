"""What happens to the process as a whole: forks, and Ctrl-C."""
