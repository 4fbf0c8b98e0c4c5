"""What the front ends share: whatever of their work needs no framework. They import it by its modules."""
