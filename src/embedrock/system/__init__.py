"""Process and machine: forks, Ctrl-C, platform, RAM, shared memory, sizes and profiler phases."""
