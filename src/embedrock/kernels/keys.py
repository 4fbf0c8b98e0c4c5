"""Keys of rows in pools and files, and the direct-address tables of an index."""

PART_BITS = 44  # the key of a row is its id, plus its table's number times 2**44
ID = (1 << PART_BITS) - 1
# Columns of `direct`, by number of a table: address and length of its direct-address table, and the bits of an item. An
# item of 32 bits is a slot + 1. An item of 1 bit, of a table alone, says whether the row exists. Its slot is its id.
ADDRESS, LENGTH, BITS = range(3)
