"""Files of this machine: system calls that tests can replace, many reads at once, and disk probes."""
