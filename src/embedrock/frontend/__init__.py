"""The part of the front ends that needs no framework. They import its modules."""
