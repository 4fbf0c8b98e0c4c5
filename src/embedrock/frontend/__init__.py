"""What the front ends share and needs no framework. They import it by its modules."""
