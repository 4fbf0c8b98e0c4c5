"""What the machine gives: files, memory, processors."""
