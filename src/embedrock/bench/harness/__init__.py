"""What every benchmark is made of: workloads, processes, rounds, targets, what is printed and written."""
